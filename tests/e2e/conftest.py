"""What the tests of a whole platform share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """pi0 of the toy contest, shared with the demo's cache so that it is built once."""
    cache = ROOT / ".spo" / "cache" / "models"
    command = [sys.executable, "-m", "spo.local.reference_model", str(cache), "standard"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    return Path(json.loads(finished.stdout.splitlines()[-1])["folder"])
