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
from tests.support.budget import day, sampled

ROOT = Path(__file__).parents[2]
# Whole platforms of 60 to 180 CPU s, and what each alone looks at: a run has those of the day and those whose sources
# changed, `make test-nightly` all. What every run has is not named here: kills of the demo, and each verifier's job.
OF_A_DAY: dict[str, tuple[str, ...]] = {
    "test_redis_comes_back_empty.py": ("services/orchestrator/recovery.py", "spo/service/state.py"),
    "test_trainer_ranks.py": ("services/trainer/ranks.py", "services/trainer/deepspeed_engine.py"),
    "test_two_trainers.py": ("services/trainer/lease.py", "services/orchestrator/leases.py"),
    "live/test_what_people_say.py": ("services/orchestrator/capture.py", "services/orchestrator/continual.py"),
    "live/test_live_command_line.py": ("spo/cli",),
    "live/test_live_sight.py": ("spo/observability.py", "services/orchestrator/monitor.py"),
    "live/test_notebook.py": ("docs/examples", "spo/client"),
    "live/test_first_job.py": ("docs/tutorials/first_job.md",),
    "test_readme.py": ("README.md",),
}
TODAY = sampled(list(OF_A_DAY), 2, OF_A_DAY.__getitem__)
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the files that are neither of the day nor changed; a file named in the call is run."""
    for item in items:
        name = (
            str(item.path.relative_to(Path(__file__).parent)) if item.path.is_relative_to(Path(__file__).parent) else ""
        )
        named = any(Path(argument.partition("::")[0]).name == item.path.name for argument in item.config.args)
        if name in OF_A_DAY and name not in TODAY and not named:
            item.add_marker(pytest.mark.skip(reason=f"not in the sample of {day()}"))
