"""A full disk, or one that turns read-only, delays what is written and ends nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spo.testing.peers import wait_until
from spo.weights.store import WeightStore
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, Bench, final_weights, job_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")


@pytest.mark.parametrize("full", ["checkpoints", "weights"])
def test_training_goes_on_when_there_is_room_again_and_ends_with_the_same_weights(
    bench: Bench, tiny_model_path: Path, tiny_disk: Path, fill_disk: Callable[[], Path], full: str
) -> None:
    bench.train_until_finished()
    straight = final_weights(bench)
    bench.job.reset(job_spec(tiny_model_path), "job_full")
    (bench.job.state_path / full / "job_full").symlink_to(tiny_disk)
    ballast: list[Path] = []

    def fill(step: int, batch: Any) -> None:
        if step == 4 and not ballast:
            ballast.append(fill_disk())

    bench.pool.spoil = fill
    stop = bench.start()
    said = wait_until(lambda: bench.contexts[-1].problem, "it says that there is no room", LIMIT_SECONDS)
    # The note of what is in hand is from before the disk was full.
    left = [path.name for path in tiny_disk.iterdir() if path != ballast[0] and not path.name.startswith("attempt.")]
    ballast[0].unlink()
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes")
    stop.set()

    assert f"no space is left in {bench.job.state_path / full}" in said
    assert "bytes are needed" in said
    assert left == []
    assert bench.job.finished[-1].error_code == ""
    assert bench.job.epoch == 2
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10)]
    assert bench.job.checkpoints[-1].step == 10
    assert sorted(bench.job.metrics) == list(range(1, 11))
    assert all(torch.equal(straight[name], tensor) for name, tensor in final_weights(bench).items())
    assert bench.contexts[-1].problem == ""


@pytest.mark.parametrize("barred", ["weights", "checkpoints"])
def test_training_waits_for_a_read_only_folder_and_goes_on_without_a_lost_or_doubled_version(
    bench: Bench, tiny_model_path: Path, tiny_disk: Path, barred: str
) -> None:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(tiny_disk)], check=True)

    (bench.job.state_path / barred).mkdir(parents=True, exist_ok=True)
    (bench.job.state_path / barred / bench.job.run_id).symlink_to(tiny_disk)
    mode = ["rw"]

    def bar(step: int, batch: Any) -> None:
        if step == 4 and mode == ["rw"]:
            remount("ro")
            mode.append("ro")

    bench.pool.spoil = bar
    stop = bench.start()
    try:
        named = wait_until(lambda: bench.contexts[-1].problem, "it says that the folder is read-only", LIMIT_SECONDS)
        published = len(bench.job.published)
    finally:
        remount("rw")
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes")
    stop.set()

    assert f"{bench.job.state_path / barred}" in named
    assert "EROFS: Read-only file system" in named
    assert published == (0 if barred == "weights" else 1)
    assert bench.job.finished[-1].error_code == ""
    assert bench.job.epoch == 1
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10)]
    assert bench.job.checkpoints[-1].step == 10
    assert sorted(bench.job.metrics) == list(range(1, 11))
    assert WeightStore(bench.job.state_path / "weights").versions(bench.job.run_id) == [1, 2]
    assert bench.contexts[-1].problem == ""
