"""The first block of Python in the README, as it stands there: it starts a platform of its own and trains on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(300), pytest.mark.timeout(SECONDS + 60)]


def test_the_first_python_block_of_the_readme_trains_a_job(tmp_path: Path) -> None:
    (block, *_) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    # In a folder of its own, and at a port that nobody has.
    surroundings = {"PYTHONPATH": str(ROOT), "SPO_LAUNCHER_HTTP_PORT": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("SPO_")} | surroundings,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    state, reward = ran.stdout.split()[-2:]
    assert state == "succeeded"
    assert -1 <= float(reward) <= 0
