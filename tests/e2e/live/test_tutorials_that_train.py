"""Tutorials whose jobs train, run from their text on a platform: each ends with a figure of what was learnt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.budget import day, sampled
from tests.support.tutorials import FOLDER, TRAINING, run_tutorial

SECONDS = 900
TODAY = sampled(TRAINING, 1, lambda name: [f"docs/tutorials/{name}.md", "spo/cli/start.py"])

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(SECONDS + 60)]


def shares(line: str) -> list[float]:
    return [float(share) for share in re.findall(r"[01]\.\d\d", line)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in TODAY, reason=f"not in the sample of {day()}"))
        for name in TRAINING
    ],
)
def test_what_is_taught_is_learnt(name: str, live: Any, reference_model: Path, tmp_path: Path) -> None:
    assert (FOLDER / f"{name}.md").exists()
    (tmp_path / "pi0").symlink_to(reference_model)

    done = run_tutorial(name, live.url, tmp_path, SECONDS)

    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert "warning" not in (done.stdout + done.stderr).lower()
    before, after, *interval = shares(done.stdout.splitlines()[-1])
    assert after - before >= 0.1, done.stdout.splitlines()[-1]
    if interval:
        assert interval[0] > before
    if name == "first_job":
        assert (tmp_path / "learnt" / "model.safetensors").exists()
