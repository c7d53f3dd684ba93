"""Where the padding is, how much of it and what stands in it must not change any loss or gradient."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LOSSES, LossTerm

rows_and_widths = st.tuples(st.integers(2, 6), st.integers(1, 8))


def draw_batch(rows: int, width: int, seed: int) -> tuple[torch.Tensor, TokenBatch]:
    """Groups of two or three rows, each of one source: GRPO refuses rows that are alone."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    length_B = (uniform(rows) * (width + 1)).long()
    position_BL = torch.arange(width)[None, :].expand(rows, width)
    response_mask_BL = position_BL >= width - length_B[:, None]
    group_B = (torch.arange(rows) // 2).clamp(max=rows // 2 - 1)
    batch = TokenBatch(
        input_ids_BL=torch.ones(rows, width, dtype=torch.long),
        attention_mask_BL=torch.ones(rows, width, dtype=torch.bool),
        response_mask_BL=response_mask_BL,
        reference_logprobs_BL=-3 * uniform(rows, width),
        sampling_logprobs_BL=-3 * uniform(rows, width),
        reward_B=-uniform(rows),
        qhat_0_B=-uniform(rows),
        source_B=1 + (uniform(rows) * 5).long()[group_B],
        group_B=group_B,
        annotated_q_BL=-uniform(rows, width),
        annotated_mask_BL=response_mask_BL & (uniform(rows, width) < 0.5),
        critic_advantage_BL=uniform(rows, width) - 0.5,
        critic_return_BL=-uniform(rows, width),
    )
    return -3 * uniform(rows, width), batch.with_beta_per_token() if seed % 2 else batch


def pad(tensor: Any, left: int, right: int) -> Any:
    """Wider by garbage: nan in numbers, False in masks, 0 in token ids."""
    if tensor is None or tensor.dim() == 1:
        return tensor
    garbage = math.nan if tensor.is_floating_point() else 0
    return torch.nn.functional.pad(tensor, (left, right), value=garbage)


@settings(max_examples=60, deadline=None)
@given(rows_and_widths, st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 5))
def test_padding_changes_no_loss_and_receives_no_gradient(
    shape: tuple[int, int], seed: int, left: int, right: int
) -> None:
    logprobs_BL, batch = draw_batch(*shape, seed=seed)
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors: dict[str, Any] = {
        name: None if tensor is None else pad(tensor, left, right) for name, tensor in given.items()
    }
    padded = TokenBatch(**tensors)
    for objective in LOSSES:
        terms = [
            LossTerm(objective=objective),
            LossTerm(objective=objective, coefficient=2.0, sources=("online", "human")),
        ]
        narrow_BL = logprobs_BL.clone().requires_grad_()
        wide_BL = pad(logprobs_BL, left, right).requires_grad_()

        narrow, _ = spo_loss(narrow_BL, batch, terms, beta=0.3)
        wide, _ = spo_loss(wide_BL, padded, terms, beta=0.3)
        narrow.backward()
        wide.backward()

        torch.testing.assert_close(wide, narrow, atol=1e-12, rtol=1e-12)
        assert wide_BL.grad is not None
        assert narrow_BL.grad is not None
        inner = slice(left, left + shape[1])
        torch.testing.assert_close(wide_BL.grad[:, inner], narrow_BL.grad, atol=1e-12, rtol=1e-12)
        assert not wide_BL.grad[~padded.response_mask_BL].any()


@settings(max_examples=30, deadline=None)
@given(rows_and_widths, st.integers(0, 2**31))
def test_the_order_of_trajectories_does_not_matter(shape: tuple[int, int], seed: int) -> None:
    logprobs_BL, batch = draw_batch(*shape, seed=seed)
    command = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    terms = [LossTerm(objective=objective) for objective in LOSSES]
    straight, _ = spo_loss(logprobs_BL, batch, terms, beta=0.3)
    shuffled, _ = spo_loss(logprobs_BL[command], batch.select(command), terms, beta=0.3)
    torch.testing.assert_close(shuffled, straight, atol=1e-10, rtol=1e-10)
