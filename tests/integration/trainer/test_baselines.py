"""PPO's critic and several updates per batch, with real DeepSpeed on a tiny model."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.batches import (
    ForwardLimits,
    MicroBatch,
    Minibatch,
    TrainingSample,
    cut_into_minibatches,
    token_batch,
)
from services.trainer.checkpoints import CheckpointFolder, TrainingProgress, load_checkpoint, save_checkpoint
from services.trainer.critic import Critic, CriticOutput
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks
from spo.algorithm.baselines import generalised_advantages, kl_regularised_rewards
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LossTerm
from spo.errors import IntegrityError
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import JobSpec
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory
from tests.integration.trainer.trainer_bench import STAGES

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

OF_STAGES = pytest.mark.parametrize("stage", STAGES)
RATE = 3e-3
TRACE, DISCOUNT = 0.9, 0.97


def ppo_spec(model_path: Path, critic: dict[str, float] | None = None, **trainer: Any) -> JobSpec:
    defaults = {"batch_size": 8, "micro_batch_size": 3, "learning_rate": RATE}
    critic = critic or {"learning_rate": 5e-3, "trace": TRACE, "discount": DISCOUNT}
    return toy_spec(
        {
            "model": {"path": str(model_path)},
            "algorithm": {
                "beta": 0.1,
                "losses": [{"objective": "ppo"}],
                "critic": critic,
            },
            "value": None,
            "rollout": {"temperature": 1.0, "top_p": 1.0},
            "offline": {"human_solutions": False, "keep_reference_samples": False},
            "replay": {"mix": [{"source": "online", "share": 1.0}]},
            "trainer": {**defaults, **trainer},
        }
    )


@pytest.fixture(scope="module")
def rows(tiny_model_path: Path) -> list[TrainingSample]:
    """Eight online trajectories whose sampler was a little hotter or colder than the policy."""
    found = sampled_trajectories(tiny_model_path, 8)
    for each in found:
        each.trajectory.source = SOURCE_ONLINE
        each.trajectory.sampling_logprobs[:] = [
            (0.97 if index % 2 else 1.02) * logprob for index, logprob in enumerate(each.trajectory.reference_logprobs)
        ]
    return [TrainingSample(each.trajectory, each.qhat_0, index // 4) for index, each in enumerate(found)]


def minibatches(rows: Sequence[TrainingSample], spec: JobSpec) -> list[Minibatch]:
    limits = ForwardLimits.of(spec.trainer, packed=True)
    (share,) = cut_into_minibatches(rows, spec.trainer.minibatches, 1, limits, whole_groups=False)
    return share


def parameters(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.engine.full_parameters()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def one_step_by_hand(model_path: Path, spec: JobSpec, batch: TokenBatch) -> tuple[dict[str, Tensor], float]:
    """The policy after one PPO step, in torch alone, and its gradient norm; the critic says 0, as it does at first."""
    policy: Any = load_policy(model_path, "float32")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=spec.trainer.adam_betas, weight_decay=0.0)
    logprobs_BL = token_logprobs(policy, batch.input_ids_BL, batch.attention_mask_BL)
    advantage_BL, _ = generalised_advantages(
        kl_regularised_rewards(logprobs_BL, batch, spec.algorithm.beta),
        torch.zeros_like(logprobs_BL),
        batch.response_mask_BL,
        discount=DISCOUNT,
        trace=TRACE,
    )
    found = advantage_BL[batch.response_mask_BL]
    scaled_BL = (advantage_BL - found.mean()) / found.std(correction=0)
    judged = replace(batch, critic_advantage_BL=scaled_BL)
    loss, _ = spo_loss(logprobs_BL, judged, [LossTerm(objective="ppo")], spec.algorithm.beta)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), spec.trainer.max_grad_norm)
    optimizer.step()
    return dict(policy.named_parameters()), norm.item()


@OF_STAGES
def test_a_ppo_step_is_the_one_made_by_hand(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], stage: int
) -> None:
    spec = ppo_spec(tiny_model_path, zero_stage=stage)
    with closing(Learner(ranks, spec)) as learner:
        result = learner.learn(minibatches(rows, spec), RATE)
        observed = parameters(learner)

    assert (result.refused, result.updates) == ("", 1)
    batch = token_batch(rows, spec.algorithm.beta, spec.tasks.reward)
    expected, norm = one_step_by_hand(tiny_model_path, spec, batch)
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # Adam's first step is the sign of the gradient times the rate: where the gradient is nothing, the sign is noise.
    differences = torch.cat([(observed[name] - expected[name]).abs().flatten() for name in expected])
    assert (differences > 1e-5).double().mean() < 0.01
    assert result.metrics["value_loss"] > 0


def test_the_critic_learns_what_a_response_will_come_to(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    spec = ppo_spec(tiny_model_path, critic={"learning_rate": 5e-3, "trace": 1.0})
    batch = token_batch(rows, spec.algorithm.beta, spec.tasks.reward)
    with closing(Critic(load_policy(tiny_model_path, "float32"), spec.algorithm, spec.trainer, 1)) as critic:
        # With trace 1 and discount 1 a return is the reward to come, whatever the critic says.
        before = critic.compute_advantages(batch.reference_logprobs_BL, batch)
        for _ in range(80):
            critic.engine.backward(critic.loss(before.added_to(batch)), last=True)
            critic.step(1.0)
        value_BL = critic.values(batch).detach()
        after = critic.compute_advantages(batch.reference_logprobs_BL, batch)

    expected_BL = batch.reward_B[:, None].expand_as(value_BL)
    mask_BL = batch.response_mask_BL
    assert torch.allclose(before.advantage_BL[mask_BL], expected_BL[mask_BL], atol=1e-5)
    assert torch.allclose(value_BL[mask_BL], expected_BL[mask_BL], atol=0.1)
    assert after.advantage_BL.abs().max() < 0.1


def test_the_critic_reads_only_what_came_before_a_token(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    spec = ppo_spec(tiny_model_path)
    wrong = [row for row in rows if row.trajectory.reward < 0]
    batch = token_batch(wrong[:1], spec.algorithm.beta, spec.tasks.reward)
    last = int(batch.attention_mask_BL.sum()) - 1
    changed_BL = batch.input_ids_BL.clone()
    changed_BL[0, last] = 19 - changed_BL[0, last] % 15
    earlier_BL = batch.input_ids_BL.clone()
    earlier_BL[0, last - 1] = 19 - earlier_BL[0, last - 1] % 15
    with closing(Critic(load_policy(tiny_model_path, "float32"), spec.algorithm, spec.trainer, 1)) as critic:
        for _ in range(3):
            output = critic.compute_advantages(batch.reference_logprobs_BL, batch)
            critic.engine.backward(critic.loss(output.added_to(batch)), last=True)
            critic.step(1.0)
        with torch.no_grad():
            value, same, other = (
                critic.values(replace(batch, input_ids_BL=tokens_BL))[0, last]
                for tokens_BL in (batch.input_ids_BL, changed_BL, earlier_BL)
            )

    assert value == same
    assert value != other


@OF_STAGES
def test_a_resumed_ppo_run_continues_exactly(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], stage: int, tmp_path: Path
) -> None:
    spec = ppo_spec(tiny_model_path, zero_stage=stage, epochs=2, minibatches=2)
    with closing(Learner(ranks, spec)) as learner:
        for _ in range(2):
            assert learner.learn(minibatches(rows, spec), RATE).updates == 4
        save_checkpoint(ranks, learner, CheckpointFolder(tmp_path), TrainingProgress(step=2, updates=8), epoch=1)
        straight = learner.learn(minibatches(rows, spec), RATE)
        expected = parameters(learner)
    with closing(Learner(ranks, spec)) as learner:
        progress = load_checkpoint(ranks, learner, CheckpointFolder(tmp_path))
        resumed = learner.learn(minibatches(rows, spec), RATE)

        assert progress == TrainingProgress(step=2, updates=8)
        assert resumed == straight
        assert equal(parameters(learner), expected)


def test_a_checkpoint_without_a_critic_is_no_checkpoint_of_ppo(
    ranks: Ranks, tiny_model_path: Path, tmp_path: Path
) -> None:
    spec = toy_spec({"model": {"path": str(tiny_model_path)}})
    with closing(Learner(ranks, spec)) as learner:
        save_checkpoint(ranks, learner, CheckpointFolder(tmp_path), TrainingProgress(step=1), epoch=1)
    with (
        closing(Learner(ranks, ppo_spec(tiny_model_path))) as learner,
        pytest.raises(IntegrityError, match="other parameters"),
    ):
        load_checkpoint(ranks, learner, CheckpointFolder(tmp_path))


def test_epochs_and_minibatches_are_so_many_single_steps(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    squared = {"losses": [{"objective": "terminal_squared"}]}
    trainer = {"batch_size": 8, "micro_batch_size": 3, "learning_rate": RATE}
    spec = toy_spec(
        {
            "model": {"path": str(tiny_model_path)},
            "algorithm": squared,
            "trainer": {**trainer, "epochs": 2, "minibatches": 2},
        }
    )
    parts = minibatches(rows, spec)
    with closing(Learner(ranks, spec)) as learner:
        result = learner.learn(parts, RATE)
        at_once = parameters(learner)
    once = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"epochs": 1})})
    with closing(Learner(ranks, once)) as learner:
        single = [learner.learn([part], RATE) for part in [*parts, *parts]]
        assert equal(parameters(learner), at_once)

    assert result.updates == 4
    assert sorted(
        row.trajectory.trajectory_id for part in parts for micro_batch in part.micro_batches for row in micro_batch.rows
    ) == [row.trajectory.trajectory_id for row in rows]
    assert result.metrics["loss"] == pytest.approx(sum(each.metrics["loss"] for each in single) / 4)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_bad_token_in_a_later_minibatch_stops_the_first_update_too(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], epochs: int
) -> None:
    spec = ppo_spec(tiny_model_path, epochs=epochs, minibatches=4)
    parts = minibatches(rows, spec)
    spoiled = Trajectory()
    spoiled.CopyFrom(parts[-1].micro_batches[0].rows[0].trajectory)
    spoiled.response_token_ids[0] = 10_000_000
    micro_batch = MicroBatch(
        [replace(parts[-1].micro_batches[0].rows[0], trajectory=spoiled), *parts[-1].micro_batches[0].rows[1:]]
    )
    with closing(Learner(ranks, spec)) as learner:
        before = parameters(learner)
        result = learner.learn([*parts[:-1], Minibatch([micro_batch], parts[-1].size)], RATE)

        assert "vocabulary" in result.refused
        assert result.updates == 0
        assert equal(parameters(learner), before)


@pytest.mark.parametrize(("minibatch_count", "epochs"), [(1, 1), (2, 2)])
def test_the_tensors_of_a_micro_batch_are_built_once_per_step_and_not_kept(
    ranks: Ranks,
    tiny_model_path: Path,
    rows: list[TrainingSample],
    minibatch_count: int,
    epochs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ppo_spec(tiny_model_path, epochs=epochs, minibatches=minibatch_count)
    parts = minibatches(rows, spec)
    micro_batches = [micro_batch for part in parts for micro_batch in part.micro_batches]
    built: list[tuple[str, ...]] = []
    kept: list[weakref.ref[TokenBatch]] = []

    def counted(given: Sequence[TrainingSample], *how: Any) -> TokenBatch:
        built.append(tuple(row.trajectory.trajectory_id for row in given))
        return token_batch(given, *how)

    def watched(output: CriticOutput, batch: TokenBatch) -> TokenBatch:
        kept.append(weakref.ref(found := added_to(output, batch)))
        return found

    added_to = CriticOutput.added_to
    monkeypatch.setattr("services.trainer.learner.token_batch", counted)
    monkeypatch.setattr(CriticOutput, "added_to", watched)
    with closing(Learner(ranks, spec)) as learner:
        assert learner.learn(parts, RATE).updates == minibatch_count * epochs
        gc.collect()

        assert sorted(built) == sorted(
            tuple(row.trajectory.trajectory_id for row in micro_batch.rows) for micro_batch in micro_batches
        )
        assert len(kept) == len(micro_batches)
        assert [reference() for reference in kept] == [None] * len(kept)


def live_bytes(known: set[int]) -> int:
    """Bytes of all storages that tensors of this process hold, but for those at known addresses."""
    return sum(size for address, size in live_storages().items() if address not in known)


def live_storages() -> dict[int, int]:
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # Engines of other tests leave fake tensors behind, which have no storage and say so by RuntimeError.
        if type(each) in (Tensor, torch.nn.Parameter):
            with contextlib.suppress(RuntimeError):
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return storages


@OF_STAGES
def test_a_closed_learner_frees_policy_and_critic(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], stage: int
) -> None:
    known = set(live_storages())
    spec = ppo_spec(tiny_model_path, zero_stage=stage)
    with closing(Learner(ranks, spec)) as learner:
        learner.learn(minibatches(rows, spec), RATE)
        model_bytes = sum(tensor.nbytes for tensor in parameters(learner).values())
        # Two models, each with two moments.
        assert live_bytes(known) > 4 * model_bytes

    assert live_bytes(known) < 0.1 * model_bytes
