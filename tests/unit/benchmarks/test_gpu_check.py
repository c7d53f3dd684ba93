"""`make gpu-check` without a GPU: it says so, and its rehearsal runs every part but the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS, Part, main, run_part

HALF_HOUR = 1800.0


def test_the_parts_fit_into_half_an_hour() -> None:
    assert sum(part.limit_seconds for part in PARTS) <= HALF_HOUR


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_part_is_skipped_by_name(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "gpu.json")]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["parts"] == {part.name: {"skipped": "no GPU"} for part in PARTS}
    assert report["devices"] == []


def test_a_part_that_breaks_or_takes_too_long_is_said_to_have_failed() -> None:
    assert "status" in run_part(Part("no_such_part", 60), dry_run=True, devices=0)["failed"]
    assert run_part(Part("head", 0.01), dry_run=True, devices=0) == {"failed": "not done in 0.01 s"}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_dry_run_gives_the_figures_of_every_part_but_the_demo(tmp_path: Path) -> None:
    output = tmp_path / "dry-run.json"
    assert main(["--dry-run", "--output", str(output)]) == 0
    parts = json.loads(output.read_text())["parts"]
    assert [name for name, found in parts.items() if "figures" not in found] == ["demo"]
    assert parts["transfer"]["figures"]["transport"] == "gloo"
