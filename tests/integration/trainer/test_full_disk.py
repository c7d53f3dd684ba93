"""A full disk delays what is written, and ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spo.testing.peers import wait_until
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
    left = [path.name for path in tiny_disk.iterdir() if path != ballast[0] and path.name != "attempt.json"]
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
