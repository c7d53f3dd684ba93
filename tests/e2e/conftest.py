"""What the tests of a whole platform share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spo.demo.demo import WITH_PEOPLE
from spo.reproduce.plan import merged
from spo.spec.section import read_spec

ROOT = Path(__file__).parents[2]
# A short run: what is looked at is the platform, not what is learnt.
SHORT: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 8, "evaluation_problems": 4},
    "value": {"samples": 8},
    "replay": {
        "mix": [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}],
        "min_online": 16,
        "error_buffer": 32,
    },
    "trainer": {
        "steps": 40,
        "batch_size": 16,
        "micro_batch_size": 16,
        "learning_rate": 1e-4,
        "update_interval": 10,
        "checkpoint_interval": 20,
    },
    "evaluation": {"interval_steps": 20, "samples": 2, "ks": [1]},
}


def demo_spec(reference_model: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """The demo's job on this pi0, with changes by section."""
    return merged(read_spec(WITH_PEOPLE), *changes, {"model": {"path": str(reference_model)}})


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """pi0 of the toy contest, shared with the demo's cache so that it is built once."""
    cache = ROOT / ".spo" / "cache" / "models"
    command = [sys.executable, "-m", "spo.demo.reference_model", str(cache), "standard"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    return Path(json.loads(finished.stdout.splitlines()[-1])["folder"])
