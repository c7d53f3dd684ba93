"""The loss of a job: the coefficient-weighted sum of its terms, each on the trajectories of its sources.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from spo.algorithm.q_values import check_usable
from spo.algorithm.registry import LOSSES, LossTerm
from spo.algorithm.token_batch import TokenBatch
from spo.errors import InvalidInput


def spo_loss(
    logprobs_BL: Tensor, batch: TokenBatch, terms: Sequence[LossTerm], beta: float, value_noise: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss = sum over terms of coefficient * (sum of its trajectories' losses) / B, and each term's part in it.

    logprobs_BL: ln pi_theta of each token, nats, float32 or float64, aligned with the batch. Every term divides by the
    size of the whole batch, so splitting a batch into equal micro-batches or ranks and averaging changes nothing
    (except for losses that need groups, which must stay together). What `learned_B` leaves out is no part of any term
    but still counts in B. Diagnostics are named `loss/<objective>` and
    sum to the loss. value_noise, reward units: terms that read Qhat_0 count by `value_weights`. Raises InvalidInput on
    non-finite numbers, beta <= 0, an empty batch, or an objective whose data is missing.
    """
    if batch.size == 0:
        raise InvalidInput("the batch is empty")
    check_usable(logprobs_BL, batch, beta)
    # An empty sum that still reaches every parameter: each rank must run the same backward, whatever sources it drew.
    total = logprobs_BL[batch.response_mask_BL].sum() * 0.0
    # A term without trajectories reports 0, so that averaging over micro-batches stays right.
    diagnostics = {f"loss/{term.objective}": 0.0 for term in terms}
    for term in terms:
        rows_B = batch.learned_from(term.sources, in_groups=term.needs("groups"))
        if not rows_B.any():
            continue
        chosen = batch.select(rows_B)
        loss_B = trajectory_losses(logprobs_BL[rows_B], chosen, term, beta)
        if value_noise is not None and term.needs("value"):
            loss_B = loss_B * value_weights(chosen, value_noise)
        part = term.coefficient * loss_B.sum() / batch.size
        diagnostics[f"loss/{term.objective}"] += part.item()
        total = total + part
    if not torch.isfinite(total):
        raise InvalidInput("the loss is not finite", code="not_finite")
    return total, diagnostics


def value_weights(batch: TokenBatch, noise: float) -> Tensor:
    """noise^2 / (noise^2 + error^2) with `error` that of Qhat_0; (B,), 1 where it is exact.

    The residual Q_T - r holds the error of Qhat_0 beside what else departs from zero; by Gauss and Markov each prompt
    counts by the inverse of the sum of both variances. The weight is one for all trajectories of a prompt, so a prompt
    that is known exactly keeps its optimum whatever its weight.
    """
    if batch.qhat_0_error_B is None:
        return torch.ones_like(batch.reward_B)
    return noise**2 / (noise**2 + batch.qhat_0_error_B.square())


def trajectory_losses(logprobs_BL: Tensor, batch: TokenBatch, term: LossTerm, beta: float) -> Tensor:
    """The loss of each trajectory under one term, before its coefficient; (B,). Sources are not looked at."""
    return loss_function(term.objective)(logprobs_BL, batch, beta, **term.settings())


def loss_function(name: str) -> Callable[..., Tensor]:
    """The function of a registered loss. KeyError on an unknown name."""
    module, _, function = LOSSES[name].function.rpartition(".")
    found: Callable[..., Tensor] = getattr(import_module(f"spo.algorithm.{module}"), function)
    return found
