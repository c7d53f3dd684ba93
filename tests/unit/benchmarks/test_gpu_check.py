"""`make gpu-check` without a GPU: it is refused, and its rehearsal runs every part but the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as check
from benchmarks.gpu.__main__ import PARTS, REFUSED, Part, main, run_part

# Of 25 minutes; the rest is for the installation.
SECONDS = 18 * 60.0


def test_the_parts_fit_into_their_time_and_the_first_is_short() -> None:
    assert sum(part.limit_seconds for part in PARTS) <= SECONDS
    assert PARTS[0].limit_seconds <= 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("torch_sees", [False, True])
def test_it_is_refused_unless_torch_and_vllm_see_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch_sees: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees)
    assert main(["--output", str(tmp_path / "gpu.json")]) == REFUSED
    assert ("vLLM is built for" if torch_sees else "sees no CUDA device") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_check_that_was_cut_off_goes_on_and_says_what_it_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def measured(part: Part, **_: object) -> dict[str, object]:
        ran.append(part.name)
        if part.name == "training" and ran.count("training") == 1:
            raise KeyboardInterrupt
        return {"skipped": "needs 2 GPUs, has 1"} if part.devices > 1 else {"figures": {"tokens_per_second": 2.0}}

    machine = {"devices": [{"name": "a card"}], "versions": {"torch": "1"}}
    monkeypatch.setattr(check, "without_cuda", lambda: "")
    monkeypatch.setattr(check, "describe", lambda: dict(machine))
    monkeypatch.setattr(check, "run_part", measured)
    output = ["--output", str(tmp_path / "gpu.json")]
    with pytest.raises(KeyboardInterrupt):
        main(output)
    assert main(output) == 0
    assert ran == ["head", "serving", "yardstick", "training", "training", "transfer", "demo"]
    assert json.loads((tmp_path / "gpu.json").read_text())["serving_of_yardstick"] == 1.0
    assert "skipped: transfer: needs 2 GPUs, has 1" in capsys.readouterr().out

    # Another card, another version, or asked for: everything anew but what has no figures here.
    machine["versions"] = {"torch": "2"}
    assert main(output) == 0
    assert ran[7:] == [part.name for part in PARTS]
    assert main([*output, "--again", "head"]) == 0
    assert ran[13:] == ["head"]


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
