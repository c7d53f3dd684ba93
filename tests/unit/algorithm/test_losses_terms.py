"""How the terms of a loss combine, where the gradient goes, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from spo.algorithm.baselines import BatchTotals
from spo.algorithm.objectives import (
    Rounding,
    TokenBatch,
    check_starts_at_reference,
    clipped_cross_entropy,
    loss_function,
    spo_loss,
    trajectory_losses,
)
from spo.algorithm.registry import LOSSES, SOURCE_CODES, LossTerm, Need, SourceName
from spo.errors import InvalidInput
from spo.v1.prompt_pb2 import Source

BETA = 0.2


def make_batch(rows: int = 8, width: int = 5, seed: int = 0) -> tuple[torch.Tensor, TokenBatch]:
    """Online rows first, then human ones; groups of two; every second position annotated."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs_BL() -> torch.Tensor:
        return -3 * torch.rand(rows, width, generator=generator)

    sources = [SOURCE_CODES["online" if row < rows // 2 else "human"] for row in range(rows)]
    annotated_mask_BL = torch.zeros(rows, width, dtype=torch.bool)
    annotated_mask_BL[:, ::2] = True
    batch = TokenBatch(
        input_ids_BL=torch.zeros(rows, width, dtype=torch.long),
        attention_mask_BL=torch.ones(rows, width, dtype=torch.bool),
        response_mask_BL=torch.ones(rows, width, dtype=torch.bool),
        reference_logprobs_BL=logprobs_BL(),
        sampling_logprobs_BL=torch.zeros(rows, width),
        reward_B=-torch.rand(rows, generator=generator).round(),
        qhat_0_B=-torch.rand(rows, generator=generator),
        source_B=torch.tensor(sources),
        group_B=torch.arange(rows) // 2,
        annotated_q_BL=-torch.rand(rows, width, generator=generator),
        annotated_mask_BL=annotated_mask_BL,
        critic_advantage_BL=torch.rand(rows, width, generator=generator) - 0.5,
    )
    return logprobs_BL().requires_grad_(), batch


def gradient_of(prediction: float, target: float, epsilon: float) -> float:
    yhat = torch.tensor(prediction, dtype=torch.float64, requires_grad=True)
    clipped_cross_entropy(yhat, torch.tensor(target, dtype=torch.float64), epsilon).backward()
    assert yhat.grad is not None
    return yhat.grad.item()


def test_terms_add_up_with_their_coefficients_and_only_on_their_sources() -> None:
    logprobs_BL, batch = make_batch()
    online = LossTerm(objective="terminal_cross_entropy", coefficient=2.0, sources=("online",))
    both = LossTerm(objective="terminal_squared", coefficient=0.5, sources=("human", "online"))

    loss, diagnostics = spo_loss(logprobs_BL, batch, [online, both], BETA)

    online_B = trajectory_losses(logprobs_BL, batch, online, BETA)
    both_B = trajectory_losses(logprobs_BL, batch, both, BETA)
    torch.testing.assert_close(loss, (2.0 * online_B[:4].sum() + 0.5 * both_B.sum()) / 8)
    assert diagnostics["loss/terminal_cross_entropy"] == pytest.approx(2.0 * online_B[:4].sum().item() / 8)
    assert sum(diagnostics.values()) == pytest.approx(loss.item())


@pytest.mark.parametrize("objective", LOSSES)
def test_equal_micro_batches_average_to_the_whole_batch(objective: str) -> None:
    logprobs_BL, batch = make_batch()
    terms = [LossTerm(objective=objective, sources=("online",)), LossTerm(objective=objective, coefficient=0.3)]
    batch = BatchTotals.of(batch, terms, BETA).told_to(batch)

    whole, _ = spo_loss(logprobs_BL, batch, terms, BETA)
    parts = [
        spo_loss(logprobs_BL[rows], batch.select(rows), terms, BETA)[0]
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8))
    ]

    torch.testing.assert_close(sum(parts) / 4, whole)


def test_sources_that_are_absent_still_give_a_loss_with_a_zero_gradient() -> None:
    logprobs_BL, batch = make_batch()
    loss, diagnostics = spo_loss(
        logprobs_BL, batch, [LossTerm(objective="terminal_squared", sources=("annotated",))], BETA
    )
    loss.backward()
    assert loss.item() == 0
    assert diagnostics == {"loss/terminal_squared": 0.0}
    torch.testing.assert_close(logprobs_BL.grad, torch.zeros_like(logprobs_BL))


def test_the_squared_loss_pulls_each_log_prob_by_the_residual_whatever_beta_is() -> None:
    for beta in (0.05, 1.0):
        logprobs_BL, batch = make_batch()
        trajectory_losses(logprobs_BL, batch, LossTerm(objective="terminal_squared"), beta).sum().backward()
        log_ratio_B = (logprobs_BL - batch.reference_logprobs_BL).sum(dim=1)
        residual_B = batch.qhat_0_B + beta * log_ratio_B - batch.reward_B
        torch.testing.assert_close(logprobs_BL.grad, residual_B.detach()[:, None].expand(8, 5))


def test_a_coefficient_of_two_beta_is_the_papers_plain_squared_error() -> None:
    logprobs_BL, batch = make_batch()
    q_B = batch.qhat_0_B + BETA * (logprobs_BL - batch.reference_logprobs_BL).sum(dim=1)
    loss, _ = spo_loss(logprobs_BL, batch, [LossTerm(coefficient=2 * BETA)], BETA)
    torch.testing.assert_close(loss, ((q_B - batch.reward_B) ** 2).mean())


def test_above_the_clip_the_gradient_is_that_at_the_clip_passed_straight_through() -> None:
    target, epsilon = math.log(0.25), 0.1
    at_the_clip = 0.75 * math.exp(-epsilon) / (1 - math.exp(-epsilon))
    for prediction in (0.01, 3.0, 500.0):  # above zero relu is flat: only the pull downwards is left
        assert gradient_of(prediction, target, epsilon) == pytest.approx(at_the_clip)
    # Between -epsilon and 0 the positive term still pulls up.
    assert gradient_of(-0.05, target, epsilon) == pytest.approx(at_the_clip - 0.25)


def test_a_right_answer_above_zero_is_left_alone() -> None:
    assert gradient_of(2.0, 0.0, 1e-3) == 0
    assert gradient_of(2.0, 0.7, 1e-3) == 0  # the target is clipped to 0 as well


def test_below_the_clip_the_cross_entropy_is_smallest_where_prediction_equals_target() -> None:
    for target in (-11.5, -2.0, -0.2):
        assert gradient_of(target, target, 1e-3) == pytest.approx(0, abs=1e-12)
        assert gradient_of(target - 0.1, target, 1e-3) < 0 < gradient_of(target + 0.1, target, 1e-3)


@pytest.mark.parametrize("objective", LOSSES)
@pytest.mark.parametrize("size", [-1e4, -80.0, 80.0, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(objective: str, size: float) -> None:
    logprobs_BL, batch = make_batch()
    logprobs_BL = (batch.reference_logprobs_BL + size).requires_grad_()
    spo_loss(logprobs_BL, batch, [LossTerm(objective=objective, epsilon=1e-9)], 1 / math.log(1e5))[0].backward()
    assert torch.isfinite(logprobs_BL.grad).all()


def test_reverse_q_gives_earlier_tokens_larger_gradients() -> None:
    logprobs_BL, batch = make_batch(rows=1)
    trajectory_losses(logprobs_BL, batch, LossTerm(objective="reverse_q_squared"), BETA).sum().backward()
    last = logprobs_BL.grad[0, -1]
    torch.testing.assert_close(logprobs_BL.grad[0], last * torch.arange(5, 0, -1))


def test_a_trajectory_alone_in_its_group_teaches_the_centred_form_nothing() -> None:
    logprobs_BL, batch = make_batch()
    batch = replace(batch, group_B=torch.tensor([0, 0, 7, 9, 9, 9, 4, 4]))
    loss_B = trajectory_losses(logprobs_BL, batch, LossTerm(objective="group_centred_squared"), BETA)
    assert loss_B[2] == 0
    assert (loss_B[[0, 1, 3, 4, 5, 6, 7]] > 0).all()


def test_the_centred_form_does_not_see_qhat_0() -> None:
    logprobs_BL, batch = make_batch()
    shifted = replace(batch, qhat_0_B=batch.qhat_0_B.mean() + batch.group_B.float())
    even = replace(batch, qhat_0_B=torch.zeros(8))
    term = LossTerm(objective="group_centred_squared")
    torch.testing.assert_close(
        trajectory_losses(logprobs_BL, shifted, term, BETA), trajectory_losses(logprobs_BL, even, term, BETA)
    )


def test_non_finite_numbers_are_refused_with_the_rows_they_stand_in() -> None:
    logprobs_BL, batch = make_batch()
    broken_BL = logprobs_BL.detach().clone()
    broken_BL[1, 2] = math.inf
    batch.reward_B[4] = math.nan
    assert batch.annotated_q_BL is not None
    batch.annotated_q_BL[5, 0] = math.nan
    with pytest.raises(InvalidInput) as refused:
        spo_loss(broken_BL, batch, [LossTerm(objective="terminal_squared")], BETA)
    assert refused.value.code == "not_finite"
    assert {v.pointer for v in refused.value.violations} == {"/logprobs/1", "/reward/4", "/annotated_q/5"}


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_beta_is_refused(beta: float) -> None:
    logprobs_BL, batch = make_batch()
    with pytest.raises(InvalidInput, match="beta"):
        spo_loss(logprobs_BL, batch, [LossTerm(objective="terminal_squared")], beta)


def test_half_precision_log_probs_are_refused() -> None:
    logprobs_BL, batch = make_batch()
    with pytest.raises(InvalidInput, match="bfloat16"):
        spo_loss(logprobs_BL.bfloat16(), batch, [LossTerm(objective="terminal_squared")], BETA)


def test_an_empty_batch_is_refused() -> None:
    logprobs_BL, batch = make_batch()
    with pytest.raises(InvalidInput, match="empty"):
        spo_loss(logprobs_BL[:0], batch.select(slice(0, 0)), [LossTerm(objective="terminal_squared")], BETA)


@pytest.mark.parametrize("objective", ["monte_carlo_squared", "monte_carlo_cross_entropy"])
def test_monte_carlo_targets_without_annotations_are_refused(objective: str) -> None:
    logprobs_BL, batch = make_batch()
    bare = replace(batch, annotated_q_BL=None, annotated_mask_BL=None)
    with pytest.raises(InvalidInput, match="annotated"):
        spo_loss(logprobs_BL, bare, [LossTerm(objective=objective)], BETA)


def test_a_first_batch_that_is_not_the_reference_names_the_trajectories_that_are_off() -> None:
    _, batch = make_batch()
    logprobs_BL = batch.reference_logprobs_BL.clone()
    check_starts_at_reference(logprobs_BL, batch, BETA, Rounding("none", 0.0))
    logprobs_BL[3, 1] += 0.5
    words = r"up to 0\.5 nats at a token and 0\.5 in the sum over \d+ tokens, where float32 explains"
    with pytest.raises(InvalidInput, match=words) as refused:
        check_starts_at_reference(logprobs_BL, batch, BETA, Rounding.of_one_forward(torch.float32))
    assert [v.pointer for v in refused.value.violations] == ["/logprobs/3"]


def test_sources_agree_with_the_wire() -> None:
    assert set(SOURCE_CODES) == set(get_args(SourceName))
    assert {f"SOURCE_{name.upper()}": code for name, code in SOURCE_CODES.items()} == {
        name: code for name, code in Source.items() if code != 0
    }


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_of_the_registry_names_a_function_and_exactly_the_settings_that_it_takes(name: str) -> None:
    parameters = signature(loss_function(name)).parameters.values()
    assert [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY] == ["logprobs_BL", "batch", "beta"]
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert keywords == set(LOSSES[name].settings) <= {*LossTerm.model_fields, "surrogate"}
    assert set(LOSSES[name].needs) <= set(get_args(Need))


def test_a_name_without_a_row_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"'terminal_squared', .*'grpo'.* or '"):
        LossTerm(objective="terminal_cubed")
