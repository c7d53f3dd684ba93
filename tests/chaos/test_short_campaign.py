"""The campaign in its short form: some minutes of faults of every family, and everything that must hold, holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINUTES = 1.0
LIMIT_SECONDS = 1500

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(LIMIT_SECONDS + 60)]


@pytest.mark.parametrize("own", [[], ["--agents"]], ids=["responses", "agents"])
def test_a_platform_under_faults_loses_nothing_and_its_jobs_succeed(tmp_path: Path, own: list[str]) -> None:
    result = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.chaos", "--minutes", str(MINUTES), "--seed", "7", *own]
    command += ["--result", str(result)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]

    found = json.loads(result.read_text())
    assert (found["lost"], found["doubled"], found["broken"]) == (0, 0, [])
    assert found["trajectories"] > 0
    assert found["faults"] >= 5
    assert found["kinds"] >= 4
