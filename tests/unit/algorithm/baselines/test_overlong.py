"""Responses that are too long: the published slope, and what leaving them out does to a loss and its gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spo.algorithm.baselines.overlong import OverlongSpec
from spo.algorithm.losses import spo_loss, trajectory_losses
from spo.algorithm.registry import LossTerm
from tests.property.test_padding import draw_batch


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0), (12, 0), (13, 0.25), (14, 0.5), (16, 1), (20, 1)])
def test_the_punishment_rises_over_the_buffer_to_the_whole_scale_at_the_limit(tokens: int, lost: float) -> None:
    assert OverlongSpec(kind="shape", buffer_tokens=4).penalty(tokens, limit=16) == lost


def test_what_is_left_out_has_no_gradient_and_stays_in_its_groups_mean() -> None:
    logprobs_BL, batch = draw_batch(6, 5, seed=3)
    term = LossTerm(objective="dr_grpo")
    losses_B = trajectory_losses(logprobs_BL, batch, term, 0.3)
    kept_B = torch.tensor([True, False, True, True, False, True])
    logprobs_BL.requires_grad_()

    loss, _ = spo_loss(logprobs_BL, replace(batch, learned_B=kept_B), [term], 0.3)
    loss.backward()

    assert logprobs_BL.grad is not None
    assert not logprobs_BL.grad[~kept_B].any()
    torch.testing.assert_close(loss, losses_B[kept_B].sum() / 6)
