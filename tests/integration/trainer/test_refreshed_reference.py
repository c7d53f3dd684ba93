"""A reference that moves on while a job trains: a trainer that was killed goes on with the one of its checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spo.spec.job_spec import JobSpec
from spo.testing.runs import toy_spec
from spo.weights.store import WeightStore
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, Bench

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")


def refreshing(model_path: Path, checkpoint_interval: int) -> JobSpec:
    return toy_spec(
        {
            "model": {"path": str(model_path)},
            "algorithm": {"reference_refresh": {"interval_steps": 1}},
            "trainer": {
                "steps": 8,
                "batch_size": 8,
                "micro_batch_size": 4,
                "learning_rate": 3e-2,
                "update_interval": 1,
                "checkpoint_interval": checkpoint_interval,
                "reference": "in_trainer",
            },
        }
    )


def train_until_killed(bench: Bench, references: Mapping[int, int], last: int, **settings: Any) -> None:
    """Lose the lease with step `last` in hand; references: what the reference becomes, by the step in hand then."""

    def change(step: int, batch: Any) -> None:
        if step in references:
            bench.job.reference_version = references[step]
            bench.job.wait_for_renewals(2)
        if step == last:
            bench.contexts[-1].stop.set()
            bench.job.lapse()

    # Renewed five times a second.
    bench.job.lease_seconds = 0.6
    bench.job.reference_values = {each.trajectory.prompt_id: -0.3 for each in bench.pool.trajectories}
    bench.pool.spoil = change
    bench.start(**settings)
    bench.threads[-1][0].join(LIMIT_SECONDS)
    bench.pool.spoil = lambda step, batch: None


def test_the_reference_of_a_checkpoint_is_kept_after_a_later_one_took_its_place(
    bench: Bench, tiny_model_path: Path
) -> None:
    bench.job.spec = refreshing(tiny_model_path, checkpoint_interval=4)
    kept = {"weights_kept": 2, "checkpoints_kept": 1}
    train_until_killed(bench, {3: 2, 5: 4}, last=7, **kept)
    assert [saved.step for saved in bench.job.recorded] == [4]

    assert not bench.train_until_finished(**kept).error_code
    left = WeightStore(bench.job.state_path / "weights").versions(bench.job.run_id)
    assert {2, 4} <= set(left), "until the checkpoint of this lease is the only one that is kept"


def test_a_run_that_begins_anew_does_not_start_at_a_reference_that_has_moved_on(
    bench: Bench, tiny_model_path: Path
) -> None:
    bench.job.spec = refreshing(tiny_model_path, checkpoint_interval=8)
    train_until_killed(bench, {}, last=4)
    assert not bench.job.checkpoints
    # As while a model is loaded: the reference is known before the first batch.
    bench.job.reference_version, bench.pool.ready = 2, False
    renewals = bench.job.renewals

    def begin() -> None:
        bench.job.wait_until(lambda: bench.job.renewals >= renewals + 2, LIMIT_SECONDS, "renewals")
        bench.pool.ready = True

    threading.Thread(target=begin, daemon=True).start()
    finished = bench.train_until_finished()

    assert not finished.error_code
    assert abs(bench.job.metrics[1]["log_ratio"]) > 0.1
