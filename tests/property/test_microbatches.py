"""However a batch is cut over ranks and passes, the sum is the whole: loss and gradient of every objective."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from services.trainer.batches import (
    ForwardLimits,
    MicroBatch,
    TrainingSample,
    annotated_targets,
    cut,
    faults,
    length_of,
    token_batch,
)
from spo.algorithm.baselines import BatchTotals
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LOSSES, LossTerm
from spo.algorithm.values import q_from_successes
from spo.spec.job_spec import RewardSpec
from spo.v1.prompt_pb2 import Source
from spo.v1.trajectory_pb2 import Annotation, Trajectory

BETA = 0.3

group_sizes = st.lists(st.integers(2, 5), min_size=1, max_size=6)
# Trajectories have 2 to 10 tokens.
limits_of_all_kinds = st.builds(ForwardLimits, st.integers(1, 60), st.none() | st.integers(1, 8), st.booleans())


def draw_rows(sizes: Sequence[int], seed: int) -> list[TrainingSample]:
    """Groups of these sizes, mixed up; each group's trajectories come from one source or from several."""
    draw = random.Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        for index in range(size):
            length = draw.randint(1, 6)
            trajectory = Trajectory(
                trajectory_id=f"{group}-{index}",
                prompt_id=f"prompt_{group}",
                source=draw.choice([1, 2, 5]),  # type: ignore[arg-type]
                prompt_token_ids=[1] * draw.randint(1, 4),
                response_token_ids=[2] * length,
                reference_logprobs=[draw.uniform(-3, 0) for _ in range(length)],
                sampling_logprobs=[draw.uniform(-3, 0) for _ in range(length)],
                reward=draw.choice([0.0, -1.0]),
                annotations=[
                    Annotation(position=draw.randint(0, length), rollouts=8, successes=draw.randint(0, 8))
                    for _ in range(draw.randint(0, 2))
                ],
            )
            rows.append(TrainingSample(trajectory, draw.uniform(-1, 0), group))
    draw.shuffle(rows)
    return rows


def in_double(batch: TokenBatch) -> TokenBatch:
    """The same numbers in float64: what is left of a difference is then no rounding."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    floats = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}
    return replace(batch, **{name: tensor.double() for name, tensor in floats.items()})


def loss_and_gradient(
    micro_batches: Sequence[MicroBatch], policy: dict[str, list[float]], terms: Sequence[LossTerm]
) -> tuple[float, dict[str, Tensor]]:
    """As the learner adds them up: each piece's mean loss by its weight; gradients by trajectory."""
    total = sum(micro_batch.weight for micro_batch in micro_batches)
    loss_sum = 0.0
    gradients: dict[str, Tensor] = {}
    batches = [in_double(token_batch(micro_batch.rows, BETA, RewardSpec())) for micro_batch in micro_batches]
    parts = [batch for batch, micro_batch in zip(batches, micro_batches, strict=True) if not micro_batch.idle]
    totals = BatchTotals.added([BatchTotals.of(part, terms, BETA) for part in parts])
    for micro_batch, own in zip(micro_batches, batches, strict=True):
        batch = totals.told_to(own)
        logprobs_BL = torch.zeros(batch.input_ids_BL.shape, dtype=torch.float64)
        advantage_BL = torch.zeros(batch.input_ids_BL.shape, dtype=torch.float64)
        for index, row in enumerate(micro_batch.rows):
            values = torch.tensor(policy[row.trajectory.trajectory_id], dtype=torch.float64)
            logprobs_BL[index, batch.response_mask_BL[index]] = values
            advantage_BL[index, batch.response_mask_BL[index]] = values + 1.5
        logprobs_BL.requires_grad_()
        loss, _ = spo_loss(logprobs_BL, replace(batch, critic_advantage_BL=advantage_BL), terms, BETA)
        (loss * micro_batch.weight / total).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item() * micro_batch.weight / total
        assert logprobs_BL.grad is not None
        if micro_batch.weight:
            for index, row in enumerate(micro_batch.rows):
                gradients[row.trajectory.trajectory_id] = logprobs_BL.grad[index, batch.response_mask_BL[index]]
    return loss_sum, gradients


@settings(max_examples=15, deadline=None)
@given(group_sizes, st.integers(0, 2**31), st.integers(1, 4), limits_of_all_kinds)
def test_any_cut_gives_the_loss_and_the_gradient_of_the_whole_batch(
    sizes: list[int], seed: int, world_size: int, limits: ForwardLimits
) -> None:
    rows = draw_rows(sizes, seed)
    draw = random.Random(seed)
    policy = {
        row.trajectory.trajectory_id: [draw.uniform(-3, 0) for _ in row.trajectory.response_token_ids] for row in rows
    }
    for objective in LOSSES:
        terms = [LossTerm(objective=objective)]
        whole_groups = "groups" in LOSSES[objective].needs
        shares = cut(rows, world_size, limits, whole_groups=whole_groups)

        loss, gradients = loss_and_gradient([micro_batch for share in shares for micro_batch in share], policy, terms)

        whole_loss, whole_gradients = loss_and_gradient([MicroBatch(rows)], policy, terms)
        assert loss == pytest.approx(whole_loss, abs=1e-9)
        assert gradients.keys() == whole_gradients.keys()
        for trajectory_id, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole_gradients[trajectory_id], atol=1e-9, rtol=1e-9)


@settings(max_examples=150, deadline=None)
@given(group_sizes, st.integers(0, 2**31), st.integers(1, 5), limits_of_all_kinds, st.booleans())
def test_forwards_are_within_their_limits_and_every_rank_makes_equally_many(
    sizes: list[int], seed: int, world_size: int, limits: ForwardLimits, whole_groups: bool
) -> None:
    rows = draw_rows(sizes, seed)
    shares = cut(rows, world_size, limits, whole_groups=whole_groups)

    assert len({len(share) for share in shares}) == 1
    micro_batches = [micro_batch for share in shares for micro_batch in share]
    counted = [
        row.trajectory.trajectory_id
        for micro_batch in micro_batches
        if not micro_batch.idle
        for row in micro_batch.rows
    ]
    assert sorted(counted) == sorted(row.trajectory.trajectory_id for row in rows)
    for micro_batch in micro_batches:
        present = Counter(row.group for row in micro_batch.rows)
        if whole_groups:
            assert all(count == sizes[group] for group, count in present.items())
        units = len(present) if whole_groups else len(micro_batch.rows)
        assert units == 1 or tokens_of(micro_batch, limits) <= limits.tokens
        assert units == 1 or limits.rows is None or len(micro_batch.rows) <= limits.rows


def tokens_of(micro_batch: MicroBatch, limits: ForwardLimits) -> int:
    lengths = [length_of(row) for row in micro_batch.rows]
    return sum(lengths) if limits.packed else len(lengths) * max(lengths)


@settings(max_examples=60, deadline=None)
@given(group_sizes, st.integers(0, 2**31), limits_of_all_kinds)
def test_one_rank_makes_no_pass_that_the_one_before_had_room_for(
    sizes: list[int], seed: int, limits: ForwardLimits
) -> None:
    (share,) = cut(draw_rows(sizes, seed), 1, limits, whole_groups=False)

    for one, following in pairwise(share):
        both = MicroBatch([*one.rows, following.rows[0]])
        assert tokens_of(both, limits) > limits.tokens or len(both.rows) > (limits.rows or len(both.rows))


def test_groups_of_one_size_are_shared_out_equally_and_without_idle_passes() -> None:
    shares = cut(draw_rows([4] * 16, seed=1), 4, ForwardLimits(1000, 8), whole_groups=True)
    assert [[micro_batch.weight for micro_batch in share] for share in shares] == [[8, 8]] * 4


def test_without_groups_the_shares_are_equal_and_similar_in_length() -> None:
    rows = draw_rows([4] * 8, seed=2)
    shares = cut(rows, 4, ForwardLimits(1000, 3), whole_groups=False)
    assert [[micro_batch.weight for micro_batch in share] for share in shares] == [[3, 3, 2]] * 4
    tokens = [sum(length_of(row) for micro_batch in share for row in micro_batch.rows) for share in shares]
    assert max(tokens) - min(tokens) <= 2
    assert cut([], 2, ForwardLimits(1000), whole_groups=True) == [[], []]


def test_an_annotation_becomes_the_target_of_the_last_token_of_its_prefix() -> None:
    trajectory = Trajectory(
        trajectory_id="t",
        prompt_token_ids=[1, 1, 1],
        response_token_ids=[2, 2, 2, 2],
        reward=0.0,
        reference_logprobs=[-1.0] * 4,
        annotations=[
            Annotation(position=0, rollouts=8, successes=1),
            Annotation(position=2, rollouts=8, successes=3),
            Annotation(position=2, rollouts=8, successes=5),
            Annotation(position=4, rollouts=8, successes=8),
        ],
    )
    bare = Trajectory(prompt_token_ids=[1], response_token_ids=[2], reward=-1.0, reference_logprobs=[-1.0])
    batch = token_batch([TrainingSample(trajectory, -0.5, 0), TrainingSample(bare, -0.5, 1)], BETA, RewardSpec())

    assert batch.annotated_mask_BL is not None
    assert batch.annotated_q_BL is not None
    assert batch.annotated_mask_BL.nonzero().tolist() == [[0, 4], [0, 6]]
    assert batch.annotated_q_BL[0, 4].item() == pytest.approx(q_from_successes(8, 16, BETA))
    assert batch.annotated_q_BL[0, 6].item() == 0.0


def test_annotations_are_worth_what_the_jobs_reward_says() -> None:
    trajectory = Trajectory(annotations=[Annotation(position=1, rollouts=4, successes=0)])
    assert annotated_targets(trajectory, BETA, RewardSpec(scale=2.0, shift=-2.5)) == {1: pytest.approx(-2.5)}


@pytest.mark.parametrize(("position", "rollouts", "successes"), [(5, 8, 1), (-1, 8, 1), (1, 0, 0), (1, 8, 9)])
def test_an_impossible_annotation_makes_a_batch_unusable(position: int, rollouts: int, successes: int) -> None:
    trajectory = Trajectory(
        trajectory_id="t",
        prompt_token_ids=[1],
        response_token_ids=[2] * 4,
        reward=0.0,
        reference_logprobs=[-1.0] * 4,
        annotations=[Annotation(position=position, rollouts=rollouts, successes=successes)],
    )
    found = faults([TrainingSample(trajectory, -0.5, 0)], cached_reference=True, behaviour=False)
    assert found == {"t": "an annotation is impossible"}


@pytest.mark.parametrize(
    ("sampling", "source", "behaviour", "fault"),
    [
        ([-1.0] * 4, 1, True, {}),
        ([], 1, False, {}),
        ([], 3, True, {}),
        ([], 1, True, {"t": "0 sampling log-probs for 4 tokens"}),
        ([-1.0] * 3, 3, False, {"t": "3 sampling log-probs for 4 tokens"}),
        ([-1.0, -1.0, -float("inf"), -1.0], 1, False, {"t": "a sampling log-prob is not finite"}),
    ],
)
def test_sampling_log_probs_are_whole_finite_and_there_where_a_loss_weighs_by_them(
    sampling: list[float], source: Source.ValueType, behaviour: bool, fault: dict[str, str]
) -> None:
    trajectory = Trajectory(
        trajectory_id="t",
        source=source,
        prompt_token_ids=[1],
        response_token_ids=[2] * 4,
        reward=0.0,
        reference_logprobs=[-1.0] * 4,
        sampling_logprobs=sampling,
    )
    assert faults([TrainingSample(trajectory, -0.5, 0)], cached_reference=True, behaviour=behaviour) == fault
