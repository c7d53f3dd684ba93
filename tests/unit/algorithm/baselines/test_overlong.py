"""Responses that are too long: the published slope, and that leaving them out changes no other gradient."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from spo.algorithm.baselines import BatchTotals
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LOSSES, LossTerm, OverlongSpec
from tests.property.test_padding import draw_batch


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0), (12, 0), (13, 0.25), (14, 0.5), (16, 1), (20, 1)])
def test_the_punishment_rises_over_the_buffer_to_the_whole_scale_at_the_limit(tokens: int, lost: float) -> None:
    assert OverlongSpec(kind="shape", buffer_tokens=4).penalty(tokens, limit=16) == lost


def _learned_gradient(
    objective: str, normalise: str | None, logprobs_BL: torch.Tensor, batch: TokenBatch
) -> torch.Tensor:
    """Of the loss with respect to each log-prob, through the whole batch's numbers as a trainer adds them."""
    term = LossTerm(objective=objective, normalise=normalise)
    logprobs_BL = logprobs_BL.clone().requires_grad_()
    whole = BatchTotals.of(batch, [term], 0.3).told_to(batch)
    loss, _ = spo_loss(logprobs_BL, whole, [term], 0.3)
    loss.backward()
    assert logprobs_BL.grad is not None
    direct_BL = logprobs_BL.detach().clone().requires_grad_()
    spo_loss(direct_BL, batch, [term], 0.3)[0].backward()
    torch.testing.assert_close(direct_BL.grad, logprobs_BL.grad)
    return logprobs_BL.grad


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=8, max_size=8))
@pytest.mark.parametrize(
    ("objective", "normalise"),
    [*((name, None) for name in LOSSES), ("rloo", "batch"), ("group_centred_squared", "deviation")],
)
def test_what_is_left_out_has_no_gradient_and_changes_nobody_elses(
    objective: str, normalise: str | None, seed: int, kept: list[bool]
) -> None:
    logprobs_BL, batch = draw_batch(8, 5, seed)
    kept_B = torch.tensor(kept)
    found_BL = _learned_gradient(objective, normalise, logprobs_BL, replace(batch, learned_B=kept_B))

    # Everything about what is left out is another thing: its length, log-probs, reward and value.
    other_logprobs_BL, other = draw_batch(8, 5, seed + 2)
    mixed = {
        entry.name: torch.where(kept_B if mine.dim() == 1 else kept_B[:, None], mine, getattr(other, entry.name))
        for entry in fields(batch)
        if (mine := getattr(batch, entry.name)) is not None and entry.name != "group_B"
    }
    changed = replace(batch, **mixed, learned_B=kept_B)
    changed_BL = _learned_gradient(
        objective, normalise, torch.where(kept_B[:, None], logprobs_BL, other_logprobs_BL), changed
    )

    assert not found_BL[~kept_B].any()
    torch.testing.assert_close(found_BL, changed_BL)
    # As if it had never been sampled, but for the size of the batch; a lone rest of a group teaches nothing there.
    if not any(kept) or LossTerm(objective=objective).needs("groups"):
        return
    alone_BL = _learned_gradient(objective, normalise, logprobs_BL[kept_B], batch.select(kept_B))
    torch.testing.assert_close(found_BL[kept_B], alone_BL * sum(kept) / 8)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "rloo", "dapo", "group_centred_squared", "dpo", "kto"])
def test_a_group_is_compared_without_what_is_left_out(objective: str) -> None:
    logprobs_BL, batch = draw_batch(7, 5, seed=3)
    batch = replace(batch, group_B=torch.tensor([0, 0, 0, 1, 1, 2, 2]), source_B=torch.ones(7, dtype=torch.long))
    kept_B = torch.tensor([True, False, True, True, True, True, False])
    found_BL = _learned_gradient(objective, None, logprobs_BL, replace(batch, learned_B=kept_B))

    alone_BL = _learned_gradient(objective, None, logprobs_BL[[0, 2, 3, 4]], batch.select(torch.tensor([0, 2, 3, 4])))
    torch.testing.assert_close(found_BL[[0, 2, 3, 4]], alone_BL * 4 / 7)
    assert not found_BL[5:].any()


@pytest.mark.parametrize("filtered_tokens", [4, 40, 400])
def test_the_length_of_what_is_left_out_divides_nothing_in_dapos_mean(filtered_tokens: int) -> None:
    lengths = torch.tensor([4, 4, filtered_tokens, filtered_tokens])
    mask_BL = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    zeros_BL = torch.where(mask_BL, -1.0, 0.0)
    batch = TokenBatch(
        input_ids_BL=mask_BL.long(),
        attention_mask_BL=mask_BL,
        response_mask_BL=mask_BL,
        reference_logprobs_BL=zeros_BL,
        sampling_logprobs_BL=zeros_BL,
        reward_B=torch.tensor([0.0, -1.0, 0.0, -1.0]),
        qhat_0_B=torch.zeros(4),
        source_B=torch.ones(4, dtype=torch.long),
        group_B=torch.tensor([0, 0, 1, 1]),
        learned_B=torch.tensor([True, True, False, False]),
    )
    found_BL = _learned_gradient("dapo", None, zeros_BL, batch)
    assert found_BL[:2].abs().sum().item() == pytest.approx(2**-1.5, rel=1e-3)
