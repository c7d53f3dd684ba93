"""What a forward may leave out, rows whose gradient is 0; and a KL where a group has collapsed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from spo.algorithm.baselines import BatchTotals, teaching_rows
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LOSSES, LossTerm
from tests.property.test_padding import draw_batch

BETA = 0.3
eight = st.lists(st.booleans(), min_size=8, max_size=8)
NO_KL = {"kl_coefficient": 0.0}


def gradient(logprobs_BL: torch.Tensor, batch: TokenBatch, terms: list[LossTerm]) -> torch.Tensor:
    logprobs_BL = logprobs_BL.clone().requires_grad_()
    spo_loss(logprobs_BL, batch, terms, BETA)[0].backward()
    assert logprobs_BL.grad is not None
    return logprobs_BL.grad


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), eight, eight)
@pytest.mark.parametrize("objective", LOSSES)
def test_a_batch_without_the_rows_that_teach_nothing_has_the_same_gradient(
    objective: str, seed: int, right: list[bool], whole: list[bool]
) -> None:
    logprobs_BL, drawn = draw_batch(8, 5, seed)
    batch = replace(drawn, reward_B=torch.tensor(right).double() - 1, learned_B=torch.tensor(whole))
    terms = [
        LossTerm(objective=objective, sources=("online", "human"), **(NO_KL if objective == "grpo" else {})),
        LossTerm(objective="supervised", sources=("reference",)),
    ]
    batch = BatchTotals.of(batch, terms, BETA).told_to(batch)
    kept_B = teaching_rows(batch, terms, BETA, contrast_only=False)
    found_BL = gradient(logprobs_BL, batch, terms)

    assert not found_BL[~kept_B].any()
    if kept_B.any():
        part_BL = gradient(logprobs_BL[kept_B], batch.select(kept_B), terms)
        torch.testing.assert_close(part_BL * int(kept_B.sum()) / 8, found_BL[kept_B])


# Groups: equal wrong ones, equal right ones, a mixed one, and two rows from memory of the first one's prompt.
@pytest.mark.parametrize(
    ("term", "exact", "by_contrast"),
    [
        ({"objective": "grpo", **NO_KL}, "....##", "....##"),
        ({"objective": "grpo"}, "######", "....##"),
        ({"objective": "grpo", **NO_KL, "entropy_coefficient": 0.1}, "######", "....##"),
        ({"objective": "dr_grpo"}, "....##", "....##"),
        ({"objective": "dapo"}, "....##", "....##"),
        ({"objective": "rloo"}, "######", "....##"),
        ({"objective": "reinforce_plus_plus_baseline"}, "######", "....##"),
        ({"objective": "group_centred_squared"}, "######", "....##"),
        ({"objective": "dpo"}, "....##", "....##"),
        ({"objective": "terminal_squared"}, "######", "######"),
    ],
)
def test_which_rows_teach(term: dict[str, Any], exact: str, by_contrast: str) -> None:
    _, batch = draw_batch(8, 5, 4)
    batch = replace(
        batch,
        response_mask_BL=torch.ones_like(batch.response_mask_BL),
        reward_B=torch.tensor([-1.0, -1, 0, 0, 0, -1, 0, 0], dtype=torch.float64),
        group_B=torch.tensor([0, 0, 1, 1, 2, 2, 0, 0]),
        source_B=torch.tensor([1] * 6 + [7] * 2),
    )
    online = LossTerm(**term, sources=("online",))
    for contrast_only, expected in ((False, exact), (True, by_contrast)):
        found = teaching_rows(batch, [online], BETA, contrast_only=contrast_only).tolist()
        assert "".join(".#"[kept] for kept in found) == expected + ".."
        # Who is learned from by another term is in the forward, and takes no member of a compared group with it.
        memory = LossTerm(objective="supervised", sources=("memory",))
        found = teaching_rows(batch, [online, memory], BETA, contrast_only=contrast_only).tolist()
        assert "".join(".#"[kept] for kept in found) == expected + "##"


@pytest.mark.parametrize(("kl", "pull"), [("k2", 1.99), ("k3", 0.863), (None, 0.863)])
def test_a_kl_beside_the_centred_loss_pulls_a_collapsed_group_back(kl: str | None, pull: float) -> None:
    _, batch = draw_batch(8, 5, 4)
    reference_BL, logprobs_BL = (torch.full((8, 5), nats, dtype=torch.float64) for nats in (-2.0, -0.01))
    batch = replace(
        batch,
        response_mask_BL=torch.ones_like(batch.response_mask_BL),
        reference_logprobs_BL=reference_BL,
        qhat_0_B=torch.full((8,), -0.5, dtype=torch.float64),
        reward_B=torch.full((8,), -1.0, dtype=torch.float64),
        group_B=torch.zeros(8, dtype=torch.long),
        beta_scale_B=None,
    )
    centred = LossTerm(objective="group_centred_squared")
    assert gradient(logprobs_BL, batch, [centred]).abs().max() < 1e-12

    beside = LossTerm(objective="kl_to_reference", kl=kl, coefficient=0.03)
    found_BL = gradient(logprobs_BL, batch, [centred, beside])
    torch.testing.assert_close(found_BL, torch.full((8, 5), 0.03 * pull / 8, dtype=torch.float64), rtol=1e-3, atol=0.0)


def test_a_kl_without_force_is_refused() -> None:
    with pytest.raises(ValidationError, match="k1"):
        LossTerm(objective="kl_to_reference", kl="k1")
