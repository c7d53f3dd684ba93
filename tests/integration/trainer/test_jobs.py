"""The trainer with real DeepSpeed on a tiny model, against an orchestrator and a replay buffer over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spo.algorithm.objectives import Rounding
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.store import WeightStore
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, STAGES, Bench, final_weights, job_spec

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_lowers_the_loss_and_publishes_weights_that_load(bench: Bench, tiny_model_path: Path, stage: int) -> None:
    bench.job.spec = job_spec(tiny_model_path, zero_stage=stage, steps=20)

    finish = bench.train_until_finished()

    assert (finish.error_code, finish.final_step) == ("", 20)
    losses = [bench.job.metrics[step]["loss"] for step in range(1, 21)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 15), (4, 20)]
    assert [each.step for each in bench.job.checkpoints] == [5, 10, 15, 20]
    weights, reference = final_weights(bench), load_file(tiny_model_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in reference.items()
    }
    assert not torch.equal(weights["lm_head.weight"], reference["lm_head.weight"])


def test_a_trainer_that_lost_its_lease_publishes_nothing_and_asks_for_work_again(bench: Bench) -> None:
    def lose_the_lease(step: int, batch: Any) -> None:
        if step == 4 and bench.job.epoch == 1:
            bench.job.epoch = 2

    bench.pool.spoil = lose_the_lease
    bench.start()

    bench.job.wait_until(lambda: bench.job.refused > 0, LIMIT_SECONDS, "the stale trainer is refused")
    assert bench.job.published == []
    bench.job.lapse()
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes under the new lease")

    store = WeightStore(bench.job.state_path / "weights")
    assert [each.epoch for each in bench.job.published] == [4, 4]
    assert [store.open("job_test", version).manifest["epoch"] for version in store.versions("job_test")] == [4, 4]


def test_reference_logprobs_of_another_model_end_the_run_before_its_first_step(bench: Bench) -> None:
    def shift(step: int, batch: Any) -> None:
        batch.batch[3].trajectory.reference_logprobs[0] += 0.1

    bench.pool.spoil = shift

    finish = bench.train_until_finished()

    assert finish.error_code == "reference_mismatch"
    assert "Q_t departs from Qhat_0" in finish.error_message
    assert bench.job.metrics == {}
    assert bench.job.published == []


def test_a_sampler_with_other_log_probs_is_told_with_numbers_and_ends_nothing(bench: Bench) -> None:
    def shift(step: int, batch: Any) -> None:
        if step == 1:
            batch.batch[3].trajectory.sampling_logprobs[0] += 0.7

    bench.pool.spoil = shift

    assert bench.train_until_finished().error_code == ""

    first, second = bench.job.metrics[1], bench.job.metrics[2]
    assert first["sampler_mismatch/token"] == pytest.approx(0.7, abs=1e-4)
    assert first["sampler_mismatch/excess"] > 1
    assert list(bench.job.alarms) == [1]
    assert "0.7 nats at a token" in bench.job.alarms[1]["sampler_mismatch"]
    assert "sampler_mismatch/token" not in second


def not_finite_reward(trajectory: Any) -> None:
    trajectory.reward = float("nan")


def not_finite_reference(trajectory: Any) -> None:
    trajectory.reference_logprobs[0] = float("inf")


def no_reward(trajectory: Any) -> None:
    trajectory.ClearField("reward")


def too_few_reference_logprobs(trajectory: Any) -> None:
    del trajectory.reference_logprobs[-1]


def token_outside_the_vocabulary(trajectory: Any) -> None:
    trajectory.response_token_ids[0] = 10_000_000


def not_finite_sampling(trajectory: Any) -> None:
    trajectory.sampling_logprobs[0] = float("-inf")


@pytest.mark.parametrize(
    "fault",
    [
        not_finite_reward,
        not_finite_reference,
        not_finite_sampling,
        no_reward,
        too_few_reference_logprobs,
        token_outside_the_vocabulary,
    ],
)
def test_an_unusable_batch_is_quarantined_and_changes_no_weights(bench: Bench, fault: Callable[[Any], None]) -> None:
    bench.job.spec = bench.job.spec.model_copy(
        update={"trainer": bench.job.spec.trainer.model_copy(update={"steps": 5})}
    )
    bench.train_until_finished()
    clean = final_weights(bench)
    # The step after the last of the run above: had its batch been applied, the weights would differ.
    bench.job.reset(
        bench.job.spec.model_copy(update={"trainer": bench.job.spec.trainer.model_copy(update={"steps": 6})}), "job_b"
    )
    bench.pool.spoil = lambda step, batch: fault(batch.batch[5].trajectory) if step == 6 else None

    finish = bench.train_until_finished()

    assert finish.error_code == ""
    assert bench.job.metrics[6]["quarantined"] == 8
    assert "loss" not in bench.job.metrics[6]
    told = bench.job.quarantined[6]
    assert len(told.quarantined_ids) == 8
    assert told.quarantined_ids[5] in told.quarantine_reason
    assert all(torch.equal(clean[name], tensor) for name, tensor in final_weights(bench).items())


def test_several_unusable_batches_in_a_row_fail_the_run(bench: Bench) -> None:
    def spoil_from_third(step: int, batch: Any) -> None:
        if step >= 3:
            not_finite_reward(batch.batch[0].trajectory)

    bench.pool.spoil = spoil_from_third

    finish = bench.train_until_finished()

    assert (finish.error_code, finish.final_step) == ("batches_unusable", 5)
    assert "the reward is missing or not finite" in finish.error_message


def test_a_paused_run_is_checkpointed_kept_and_goes_on(bench: Bench) -> None:
    def pause(step: int, batch: Any) -> None:
        if step == 3 and not bench.job.checkpoints:
            bench.job.directive = wire.DIRECTIVE_PAUSE
            bench.job.wait_for_renewals(2)

    bench.pool.spoil = pause
    bench.start()
    bench.job.wait_until(lambda: bool(bench.job.checkpoints), LIMIT_SECONDS, "a checkpoint of the pause")
    bench.job.wait_for_renewals(2)

    assert [each.step for each in bench.job.checkpoints] == [3]
    assert max(bench.job.metrics) == 3
    bench.job.directive = wire.DIRECTIVE_CONTINUE
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes")
    assert bench.job.finished[0].final_step == 10


def test_a_cancelled_run_is_given_back_at_once(bench: Bench) -> None:
    def cancel(step: int, batch: Any) -> None:
        bench.job.directive = wire.DIRECTIVE_CANCEL
        bench.job.wait_for_renewals(2)

    bench.pool.spoil = cancel

    finish = bench.train_until_finished()

    assert (finish.error_code, finish.final_step) == ("cancelled", 1)
    assert bench.job.published == []


def test_an_asked_checkpoint_is_made_once(bench: Bench) -> None:
    def ask(step: int, batch: Any) -> None:
        if step == 3:
            bench.job.directive = wire.DIRECTIVE_CHECKPOINT
            bench.job.wait_for_renewals(2)
            bench.job.directive = wire.DIRECTIVE_CONTINUE

    bench.pool.spoil = ask

    bench.train_until_finished()

    assert [each.step for each in bench.job.checkpoints] == [3, 5, 10]


def test_the_trainer_waits_for_experience_and_for_an_absent_orchestrator(bench: Bench) -> None:
    broken: list[int] = []

    def break_once(step: int, batch: Any) -> None:
        if step == 2 and not broken:
            broken.append(step)
            raise ConnectionError("Redis is restarting")

    bench.pool.ready, bench.job.away = False, True
    bench.start()

    bench.job.away = False
    bench.job.wait_until(lambda: bench.job.leased, LIMIT_SECONDS, "the job is leased")
    bench.pool.ready = True
    bench.pool.spoil = break_once
    bench.job.wait_until(lambda: bool(bench.job.published), LIMIT_SECONDS, "the first weights")
    bench.job.away = True
    bench.job.away = False
    bench.job.wait_until(lambda: bool(bench.job.finished), LIMIT_SECONDS, "the run finishes")

    assert sorted(bench.job.metrics) == list(range(1, 11))
    assert broken == [2]


@pytest.mark.parametrize(("reference", "code"), [("cached", "reference_mismatch"), ("sampler", "")])
def test_the_rounding_of_another_engine_is_taken_where_the_sampler_gives_the_references_log_probs(
    bench: Bench, tiny_model_path: Path, reference: str, code: str
) -> None:
    bench.job.reset(job_spec(tiny_model_path, reference=reference), f"job_of_{reference}")

    def round_off(step: int, batch: Any) -> None:
        rounding = Rounding.of_one_forward(torch.float32)
        for each in batch.batch:
            known = each.trajectory.reference_logprobs
            off = 1.5 * float(rounding.tolerance(torch.tensor([len(known)]))[0])
            known[0] += off

    bench.pool.spoil = round_off

    assert bench.train_until_finished().error_code == code


def test_a_reference_held_by_the_trainer_gives_the_same_losses_as_cached_logprobs(
    bench: Bench, tiny_model_path: Path
) -> None:
    bench.train_until_finished()
    cached = [bench.job.metrics[step]["loss"] for step in range(1, 11)]
    bench.job.reset(job_spec(tiny_model_path, reference="in_trainer"), "job_in_trainer")

    def clear(step: int, batch: Any) -> None:
        for each in batch.batch:
            each.trajectory.ClearField("reference_logprobs")

    bench.pool.spoil = clear

    finish = bench.train_until_finished()

    assert finish.error_code == ""
    assert [bench.job.metrics[step]["loss"] for step in range(1, 11)] == pytest.approx(cached, abs=1e-6)


def test_every_step_reports_its_curves(bench: Bench) -> None:
    bench.train_until_finished()

    expected = {
        *("loss", "loss/terminal_squared", "reward", "reward/online", "reward/reference", "kl_to_reference"),
        *("log_ratio", "entropy", "grad_norm", "learning_rate", "response_length", "staleness", "tokens"),
        *("wait_seconds", "step_seconds", "quarantined", "trajectories"),
    }
    assert all(expected <= bench.job.metrics[step].keys() for step in range(1, 11))
    assert bench.job.metrics[1]["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    assert bench.job.metrics[1]["learning_rate"] == pytest.approx(1.5e-3)
    assert bench.job.metrics[10]["learning_rate"] == pytest.approx(3e-3)


def test_a_model_folder_that_may_not_be_loaded_fails_the_job_with_its_reason(bench: Bench, tmp_path: Path) -> None:
    bench.job.spec = job_spec(tmp_path / "nowhere")

    finish = bench.train_until_finished()

    assert finish.error_code == "model_refused"
