"""Every objective of Soft Policy Optimization (Cohen et al. 2025, 3.1) as one function: tensors in, loss_B out.

Axes: B trajectory, L padded position. Q, A and rewards are in reward units; divided by beta they are log-prob units.
Squared errors are divided by 2 beta: the gradient with respect to each log-prob is then the residual itself, and one
learning rate suits every beta. The paper's plain (Q - y)^2 is the coefficient 2 beta.
Where a batch has a beta per token (`TokenBatch.with_beta_per_token`), beta below is the trajectory's, the job's / |y|.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from spo.algorithm.q_values import advantages, cumulative_q, terminal_q
from spo.algorithm.token_batch import TokenBatch
from spo.errors import InvalidInput

# Below it the rewards of a group are equal but for rounding; reward units squared.
LEAST_VARIANCE = 1e-12


def terminal_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """(Q_T - r)^2 / (2 beta); (B,) (3.1.2, terminal Q-regression)."""
    return _squared_scale(batch, beta) * (terminal_q(logprobs_BL, batch, beta) - batch.reward_B).square()


def terminal_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """Clipped cross-entropy between Q_T / beta and r / beta; (B,), nats (3.1.1)."""
    beta_B = batch.betas(beta)
    return clipped_cross_entropy(terminal_q(logprobs_BL, batch, beta) / beta_B, batch.reward_B / beta_B, epsilon)


def reverse_q_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """sum_t (Q_t - R_t)^2 / (2 beta) with R_t = detach(r - sum_{s>t} A_s); (B,) (3.1.2, non-terminal Q-regression).

    A sum as printed in the paper: it grows with the length of the response.
    """
    q_BL = cumulative_q(logprobs_BL, batch, beta)
    error_BL = (q_BL - _reverse_q_target(logprobs_BL, batch, beta)).square()
    return _squared_scale(batch, beta) * torch.where(batch.response_mask_BL, error_BL, 0.0).sum(dim=1)


def reverse_q_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """sum_t of the clipped cross-entropy between Q_t / beta and R_t / beta; (B,), nats (3.1.2)."""
    q_BL, beta_B1 = cumulative_q(logprobs_BL, batch, beta), batch.betas(beta)[:, None]
    error_BL = clipped_cross_entropy(q_BL / beta_B1, _reverse_q_target(logprobs_BL, batch, beta) / beta_B1, epsilon)
    return torch.where(batch.response_mask_BL, error_BL, 0.0).sum(dim=1)


def advantage_sigmoid(
    logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, sigmoid_scale: float, sigmoid_unit: Literal["log_prob", "q"]
) -> Tensor:
    """Binary cross-entropy of sigmoid(k sum_t A_t / beta) against sigmoid(k (r - Qhat_0) / beta); (B,), nats (3.1.2).

    k = sigmoid_scale on log-prob units. With the unit "q" it multiplies reward units: k = beta * sigmoid_scale.
    """
    # sigmoid_scale k / beta, which multiplies reward units.
    scale_B = sigmoid_scale * (torch.ones_like(batch.reward_B) if sigmoid_unit == "q" else 1 / batch.betas(beta))
    prediction_B = scale_B * advantages(logprobs_BL, batch, beta).sum(dim=1)
    target_B = torch.sigmoid(scale_B * (batch.reward_B - batch.qhat_0_B))
    return binary_cross_entropy_with_logits(prediction_B, target_B, reduction="none")


def monte_carlo_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Mean over annotated t of (Q_t - Qhat_t)^2 / (2 beta); (B,), 0 without annotations (3.1.3).

    A mean, since how many positions a search visited says nothing about the trajectory's weight. Raises InvalidInput
    when the batch carries no annotation tensors.
    """
    target_BL, mask_BL = _annotations(batch)
    error_BL = (cumulative_q(logprobs_BL, batch, beta) - target_BL).square()
    return _squared_scale(batch, beta) * _masked_mean(error_BL, mask_BL)


def monte_carlo_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """Mean over annotated t of the clipped cross-entropy between Q_t / beta and Qhat_t / beta; (B,), nats (3.1.3).

    Unbiased in the number of rollouts, because exp(Qhat_t / beta) is. Raises as `monte_carlo_squared`.
    """
    target_BL, mask_BL = _annotations(batch)
    q_BL, beta_B1 = cumulative_q(logprobs_BL, batch, beta), batch.betas(beta)[:, None]
    error_BL = clipped_cross_entropy(q_BL / beta_B1, target_BL / beta_B1, epsilon)
    return _masked_mean(error_BL, mask_BL)


def group_centred_squared(
    logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, normalise: Literal["deviation", "none"] | None = None
) -> Tensor:
    """n / (n - 1) * (d - mean of d over the prompt's n trajectories)^2 / (2 beta) with d = Q_T - r; (B,).

    Not in the paper: the log-variance (trajectory-balance) form, in which Qhat_0 cancels. Its expectation is the
    variance of d, zero at pi* alone given full support. A trajectory alone in its group (n = 1) teaches nothing: 0.
    Where trajectories have their own beta the mean is weighted by 1 / beta: the gradient with respect to a log-prob is
    then still the centred residual. normalise "deviation": each group counts by 1 / the standard deviation of its
    rewards, as in GRPO (Shao et al. 2024), and one of equal rewards by 1; at pi* every residual is centred at 0, so no
    weight of a group moves it.
    """
    residual_B, weight_B = terminal_q(logprobs_BL, batch, beta) - batch.reward_B, 1 / batch.betas(beta)
    _, group_B, count_G = torch.unique(batch.group_B, return_inverse=True, return_counts=True)
    zero_G = residual_B.new_zeros(len(count_G))
    sum_G: Tensor = zero_G.index_add(0, group_B, weight_B * residual_B)
    mean_G: Tensor = sum_G / zero_G.index_add(0, group_B, weight_B)
    # n = 1: the centred residual is 0 whatever the factor; the clamp keeps the factor finite.
    factor_G: Tensor = count_G.to(weight_B.dtype) / (count_G - 1).clamp(min=1)
    if normalise == "deviation":
        centred_B = batch.reward_B - (zero_G.index_add(0, group_B, batch.reward_B) / count_G)[group_B]
        variance_G = zero_G.index_add(0, group_B, centred_B.square()) / (count_G - 1).clamp(min=1)
        factor_G = factor_G / torch.where(variance_G > LEAST_VARIANCE, variance_G, 1.0).sqrt()
    return 0.5 * weight_B * factor_G[group_B] * (residual_B - mean_G[group_B]).square()


def clipped_cross_entropy(prediction: Tensor, target: Tensor, epsilon: float) -> Tensor:
    """x relu(-yhat) - (1 - x) ln(1 - exp(min(yhat, -epsilon))), x = exp(min(y, 0)); elementwise, nats (3.1.1).

    prediction yhat and target y are in log-prob units. The clip holds in the forward pass only: the gradient is that at
    the clipped point, passed straight through. relu on the unclipped yhat removes any pull above 0.
    """
    target = target.clamp(max=0.0)
    # Adding yhat - yhat.detach(), exactly 0, gives the clipped value the gradient of the unclipped one.
    clipped = prediction.detach().clamp(max=-epsilon) + (prediction - prediction.detach())
    return target.exp() * torch.relu(-prediction) + torch.expm1(target) * _log1mexp(clipped)


def _squared_scale(batch: TokenBatch, beta: float) -> Tensor:
    """1 / (2 beta); (B,): then d loss / d ln pi_theta(a_t) = Q_T - r, in reward units."""
    return 0.5 / batch.betas(beta)


def _log1mexp(y: Tensor) -> Tensor:
    """ln(1 - exp(y)) for y < 0, accurate at both ends (Maechler 2012)."""
    near_zero = y > -math.log(2)
    # Where near 0, the far form sees -1: its infinity there would turn the gradient into nan.
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, y)))
    return torch.where(near_zero, torch.log(-torch.expm1(y)), far)


def _reverse_q_target(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """R_t = r - sum_{s>t} A_s, detached; (B, L), reward units."""
    advantages_BL = advantages(logprobs_BL.detach(), batch, beta)
    later_BL = advantages_BL.sum(dim=1, keepdim=True) - advantages_BL.cumsum(dim=1)
    return batch.reward_B[:, None] - later_BL


def _annotations(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    if batch.annotated_q_BL is None or batch.annotated_mask_BL is None:
        raise InvalidInput("a Monte-Carlo objective needs annotated_q_BL and annotated_mask_BL", code="no_annotations")
    # where: positions without annotation may hold anything.
    return torch.where(batch.annotated_mask_BL, batch.annotated_q_BL, 0.0), batch.annotated_mask_BL


def _masked_mean(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    return torch.where(mask_BL, values_BL, 0.0).sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1)
