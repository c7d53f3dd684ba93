"""Observations between actions: every number is that of the same responses with the observations dropped."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spo.algorithm.baselines import generalised_advantages, kl_regularised_rewards, value_loss
from spo.algorithm.objectives import Difference, Rounding, TokenBatch, batch_diagnostics, cumulative_q, spo_loss
from spo.algorithm.registry import LOSSES, LossTerm
from tests.property.test_padding import draw_batch

BETA = 0.3
# Rows, of at most so many actions each, and between two of them as many observation tokens as the last number.
conversations = st.tuples(st.integers(2, 6), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**31))


def spread(tensor: Tensor, place_BL: Tensor, width: int, garbage: float | bool) -> Tensor:
    """The columns of a tensor at their places in wider rows, which hold garbage elsewhere."""
    if tensor.dim() == 1:
        return tensor
    wide = torch.full((len(tensor), width), garbage, dtype=tensor.dtype)
    return wide.scatter(1, place_BL, tensor)


def interleaved(batch: TokenBatch, most: int, seed: int) -> tuple[TokenBatch, Tensor, int]:
    """The batch with up to `most` tokens of an environment before each of its own, full of nan; their new places."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = batch.response_mask_BL.shape
    gap_BL = torch.randint(0, most + 1, (rows, width), generator=generator)
    place_BL = torch.arange(width) + gap_BL.cumsum(dim=1)
    wide = int(place_BL.max()) + 1 + most
    tensors: dict[str, Any] = {}
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if tensor is None:
            continue
        tensors[field.name] = spread(tensor, place_BL, wide, math.nan if tensor.is_floating_point() else False)
    # The model reads what the environment says.
    tensors["attention_mask_BL"] = torch.ones_like(tensors["attention_mask_BL"])
    return TokenBatch(**tensors), place_BL, wide


@settings(max_examples=40, deadline=None)
@given(conversations)
def test_every_objective_is_that_of_the_actions_alone(drawn: tuple[int, int, int, int]) -> None:
    rows, width, most, seed = drawn
    logprobs_BL, dense = draw_batch(rows, width, seed)
    spoken, place_BL, wide = interleaved(dense, most, seed)
    for objective in LOSSES:
        terms = [LossTerm(objective=objective), LossTerm(objective=objective, coefficient=2.0, sources=("online",))]
        alone_BL = logprobs_BL.clone().requires_grad_()
        within_BL = spread(logprobs_BL, place_BL, wide, math.nan).requires_grad_()

        alone, _ = spo_loss(alone_BL, dense, terms, BETA)
        within, _ = spo_loss(within_BL, spoken, terms, BETA)
        alone.backward()
        within.backward()

        torch.testing.assert_close(within, alone, atol=1e-12, rtol=1e-12)
        assert within_BL.grad is not None
        torch.testing.assert_close(within_BL.grad.gather(1, place_BL), alone_BL.grad, atol=1e-12, rtol=1e-12)
        assert not within_BL.grad[~spoken.response_mask_BL].any(), objective


@settings(max_examples=40, deadline=None)
@given(conversations, st.floats(-50, 0))
def test_what_is_said_of_observations_changes_nothing(drawn: tuple[int, int, int, int], other: float) -> None:
    rows, width, most, seed = drawn
    logprobs_BL, dense = draw_batch(rows, width, seed)
    spoken, place_BL, wide = interleaved(dense, most, seed)
    terms = [LossTerm(objective=objective) for objective in LOSSES]
    found = []
    for said in (0.0, other):
        told_BL = torch.where(spoken.response_mask_BL, spoken.reference_logprobs_BL, said)
        told = replace(spoken, reference_logprobs_BL=told_BL, sampling_logprobs_BL=told_BL)
        ours_BL = spread(logprobs_BL, place_BL, wide, said)
        loss, parts = spo_loss(ours_BL, told, terms, BETA)
        found.append((loss.item(), parts, batch_diagnostics(ours_BL, told, BETA), cumulative_q(ours_BL, told, BETA)))
    (loss, parts, measured, q_BL), (other_loss, other_parts, other_measured, other_q_BL) = found
    assert (loss, parts, measured) == (other_loss, other_parts, other_measured)
    assert torch.equal(q_BL, other_q_BL)


@settings(max_examples=40, deadline=None)
@given(conversations, st.floats(0.5, 1), st.floats(0, 1))
def test_the_critic_steps_from_action_to_action(
    drawn: tuple[int, int, int, int], discount: float, trace: float
) -> None:
    rows, width, most, seed = drawn
    logprobs_BL, dense = draw_batch(rows, width, seed)
    first_BL = torch.arange(width) == 0
    dense = replace(dense, response_mask_BL=dense.response_mask_BL | first_BL.expand_as(dense.response_mask_BL))
    value_BL = dense.annotated_q_BL
    assert value_BL is not None
    spoken, place_BL, wide = interleaved(dense, most, seed)
    found = []
    for batch, ours_BL, values_BL in (
        (dense, logprobs_BL, value_BL),
        (spoken, spread(logprobs_BL, place_BL, wide, math.nan), spread(value_BL, place_BL, wide, math.nan)),
    ):
        reward_BL = kl_regularised_rewards(ours_BL, batch, BETA)
        advantage_BL, return_BL = generalised_advantages(
            reward_BL, values_BL, batch.response_mask_BL, discount=discount, trace=trace
        )
        assert not advantage_BL[~batch.response_mask_BL].any()
        found.append((reward_BL, advantage_BL, return_BL, value_loss(values_BL, return_BL, batch.response_mask_BL)))
    for alone_BL, within_BL in zip(*found, strict=True):
        torch.testing.assert_close(within_BL.gather(1, place_BL), alone_BL, atol=1e-12, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(conversations)
def test_what_is_measured_of_a_batch_counts_actions_alone(drawn: tuple[int, int, int, int]) -> None:
    rows, width, most, seed = drawn
    logprobs_BL, dense = draw_batch(rows, width, seed)
    spoken, place_BL, wide = interleaved(dense, most, seed)
    within_BL = spread(logprobs_BL, place_BL, wide, math.nan)

    assert torch.equal(spoken.response_lengths, dense.response_lengths)
    alone, within = batch_diagnostics(logprobs_BL, dense, BETA), batch_diagnostics(within_BL, spoken, BETA)
    torch.testing.assert_close(torch.tensor(list(within.values())), torch.tensor(list(alone.values())))
    rounding = Rounding("float32", 1e-6)
    differences = [
        Difference.between(ours_BL, batch.sampling_logprobs_BL, batch.response_mask_BL, rounding)
        for ours_BL, batch in ((logprobs_BL, dense), (within_BL, spoken))
    ]
    assert differences[0].tokens == differences[1].tokens
    torch.testing.assert_close(differences[1].excess_B, differences[0].excess_B)
