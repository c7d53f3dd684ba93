"""The tutorial of the first job, run from its text on a platform that trains: one sees that it learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tutorials import run_tutorial

SECONDS = 900

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(SECONDS + 60)]


def test_the_first_job_learns(live: Any, reference_model: Path, tmp_path: Path) -> None:
    (tmp_path / "pi0").symlink_to(reference_model)

    done = run_tutorial("first_job", live.url, tmp_path, SECONDS)

    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert "warning" not in (done.stdout + done.stderr).lower()
    before, after, low, _ = map(float, re.findall(r"[01]\.\d\d", done.stdout.splitlines()[-1]))
    assert after - before >= 0.1, done.stdout.splitlines()[-1]
    assert low > before
    assert (tmp_path / "learnt" / "model.safetensors").exists()
