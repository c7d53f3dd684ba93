"""The loss of a job: the coefficient-weighted sum of its terms, each on the trajectories of its sources.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spo.algorithm import objectives, policy_gradient
from spo.algorithm.q_values import check_usable
from spo.algorithm.types import LossTerm, ObjectiveName, TokenBatch
from spo.errors import InvalidInput


def spo_loss(
    logprobs_BL: Tensor, batch: TokenBatch, terms: Sequence[LossTerm], beta: float
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss = sum over terms of coefficient * (sum of its trajectories' losses) / B, and each term's part in it.

    logprobs_BL: ln pi_theta of each token, nats, float32 or float64, aligned with the batch. Every term divides by the
    size of the whole batch, so splitting a batch into equal micro-batches or ranks and averaging changes nothing
    (except for group_centred_squared, whose groups must stay together). Diagnostics are named `loss/<objective>` and
    sum to the loss. Raises InvalidInput on non-finite numbers, beta <= 0, an empty batch, or an objective whose
    data is missing.
    """
    if batch.size == 0:
        raise InvalidInput("the batch is empty")
    check_usable(logprobs_BL, batch, beta)
    # An empty sum that still reaches every parameter: each rank must run the same backward, whatever sources it drew.
    total = logprobs_BL[batch.response_mask_BL].sum() * 0.0
    # A term without trajectories reports 0, so that averaging over micro-batches stays right.
    diagnostics = {f"loss/{term.objective}": 0.0 for term in terms}
    for term in terms:
        rows_B = batch.rows_from(term.sources)
        if not rows_B.any():
            continue
        loss_B = trajectory_losses(logprobs_BL[rows_B], batch.select(rows_B), term, beta)
        part = term.coefficient * loss_B.sum() / batch.size
        diagnostics[f"loss/{term.objective}"] += part.item()
        total = total + part
    if not torch.isfinite(total):
        raise InvalidInput("the loss is not finite", code="not_finite")
    return total, diagnostics


def trajectory_losses(logprobs_BL: Tensor, batch: TokenBatch, term: LossTerm, beta: float) -> Tensor:
    """The loss of each trajectory under one term, before its coefficient; (B,). Sources are not looked at."""
    return LOSSES[term.objective](logprobs_BL, batch, term, beta)


def _sigmoid_scale(term: LossTerm, beta: float) -> float:
    """A factor s on reward units is s * beta on log-prob units."""
    return term.sigmoid_scale * (beta if term.sigmoid_unit == "q" else 1.0)


def _grpo(logprobs_BL: Tensor, batch: TokenBatch, term: LossTerm, beta: float) -> Tensor:
    advantage_B = policy_gradient.group_relative_advantages(batch, normalise=term.normalise)
    return policy_gradient.grpo_loss(logprobs_BL, batch, advantage_B, clip=term.clip, kl_coefficient=beta)


def _ppo(logprobs_BL: Tensor, batch: TokenBatch, term: LossTerm, beta: float) -> Tensor:
    if batch.critic_advantage_BL is None:
        raise InvalidInput("ppo needs the critic's advantages", code="no_critic")
    return policy_gradient.clipped_surrogate(logprobs_BL, batch, batch.critic_advantage_BL, clip=term.clip).sum(dim=1)


LOSSES: dict[ObjectiveName, Callable[[Tensor, TokenBatch, LossTerm, float], Tensor]] = {
    "terminal_squared": lambda logprobs, batch, term, beta: objectives.terminal_squared(
        logprobs, batch, beta, scale=objectives.gradient_scale(beta)
    ),
    "terminal_cross_entropy": lambda logprobs, batch, term, beta: objectives.terminal_cross_entropy(
        logprobs, batch, beta, epsilon=term.epsilon
    ),
    "reverse_q_squared": lambda logprobs, batch, term, beta: objectives.reverse_q_squared(
        logprobs, batch, beta, scale=objectives.gradient_scale(beta)
    ),
    "reverse_q_cross_entropy": lambda logprobs, batch, term, beta: objectives.reverse_q_cross_entropy(
        logprobs, batch, beta, epsilon=term.epsilon
    ),
    "advantage_sigmoid": lambda logprobs, batch, term, beta: objectives.advantage_sigmoid(
        logprobs, batch, beta, sigmoid_scale=_sigmoid_scale(term, beta)
    ),
    "monte_carlo_squared": lambda logprobs, batch, term, beta: objectives.monte_carlo_squared(
        logprobs, batch, beta, scale=objectives.gradient_scale(beta)
    ),
    "monte_carlo_cross_entropy": lambda logprobs, batch, term, beta: objectives.monte_carlo_cross_entropy(
        logprobs, batch, beta, epsilon=term.epsilon
    ),
    "group_centred_squared": lambda logprobs, batch, term, beta: objectives.group_centred_squared(
        logprobs, batch, beta, scale=objectives.gradient_scale(beta)
    ),
    "policy_gradient": lambda logprobs, batch, term, beta: policy_gradient.soft_policy_gradient(
        logprobs, batch, beta, clip=term.clip
    ),
    "supervised": lambda logprobs, batch, term, beta: policy_gradient.supervised_nll(
        logprobs, batch, min_reference_logprob=term.min_reference_logprob
    ),
    "ppo": _ppo,
    "grpo": _grpo,
}
