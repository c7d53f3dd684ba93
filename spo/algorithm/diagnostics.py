"""Numbers of one batch that tell whether a run is healthy; no gradients.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spo.algorithm.q_values import terminal_q
from spo.algorithm.token_batch import TokenBatch

LARGE_RESIDUAL = 0.5


@torch.no_grad()
def batch_diagnostics(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> dict[str, float]:
    """Means over the batch's trajectories, so that equal micro-batches may be averaged.

    log_ratio_nats: sum_t (ln pi_theta - ln pi0). On fresh on-policy samples its mean is KL(pi_theta || pi0), unbiased;
    on any batch, above 4 every collapse seen so far had begun.
    kl_to_reference_nats: the same KL by the non-negative estimator sum_t (ln pi_theta - ln pi0)^2 / 2 (k2 of Schulman
    2020), right to second order. Not his k3: pi0 / pi_theta of one token that the policy has since pushed down
    outweighs a whole batch of replayed samples.
    q_above_zero_nats: max(Q_T / beta, 0). ln p(o = 1) cannot exceed 0, so growth here is error, not learning.
    log_ratio_per_token_nats: the mean of ln pi_theta - ln pi0 over a response's tokens.
    q_terminal, reward, residual (Q_T - r), residual_abs: reward units. residual_positive, residual_negative: the parts
    max(residual, 0) and max(-residual, 0): Q too high pushes the response down, Q too low up. residual_large: share of
    |residual| above half a reward unit, the distance between right and wrong halved.
    token_nll_nats: -ln pi_theta per response token of the batch, averaged per trajectory.
    response_tokens: mean length.
    """
    mask_BL = batch.response_mask_BL
    log_ratio_BL = torch.where(mask_BL, logprobs_BL - batch.reference_logprobs_BL, 0.0)
    nll_B = torch.where(mask_BL, -logprobs_BL, 0.0).sum(dim=1) / batch.response_lengths.clamp(min=1)
    q_B = terminal_q(logprobs_BL, batch, beta)
    residual_B = residuals(logprobs_BL, batch, beta)
    means = {
        "log_ratio_nats": log_ratio_BL.sum(dim=1),
        "kl_to_reference_nats": 0.5 * log_ratio_BL.square().sum(dim=1),
        "q_above_zero_nats": torch.relu(q_B) / batch.betas(beta),
        "q_terminal": q_B,
        "reward": batch.reward_B,
        "log_ratio_per_token_nats": log_ratio_BL.sum(dim=1) / batch.response_lengths.clamp(min=1),
        "residual": residual_B,
        "residual_abs": residual_B.abs(),
        "residual_positive": torch.relu(residual_B),
        "residual_negative": torch.relu(-residual_B),
        "residual_large": (residual_B.abs() > LARGE_RESIDUAL).to(logprobs_BL.dtype),
        "token_nll_nats": nll_B,
        "response_tokens": batch.response_lengths.to(logprobs_BL.dtype),
    }
    return {name: values_B.mean().item() for name, values_B in means.items()}


@torch.no_grad()
def residuals(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Q_T - r of each response; (B,), reward units."""
    residual_B: Tensor = terminal_q(logprobs_BL, batch, beta) - batch.reward_B
    return residual_B


@torch.no_grad()
def sampler_log_weights(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    """ln pi_theta(a|x) / pi_sampler(a|x) of each whole response; (B,), nats. Read it where the sampler is known."""
    difference_BL = torch.where(batch.response_mask_BL, logprobs_BL - batch.sampling_logprobs_BL, 0.0)
    return difference_BL.sum(dim=1)


def effective_sample_share(log_weights: Sequence[float]) -> float:
    """(sum w)^2 / (n sum w^2) of importance weights w: 1 where all are equal, 1 / n where one rules (Kong 1992).

    Of what share of the samples the variance is, were they the policy's own. 1 without samples.
    """
    largest = max(log_weights, default=0.0)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights)) if weights else 1.0
