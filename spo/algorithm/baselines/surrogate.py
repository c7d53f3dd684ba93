"""GRPO and its relatives as one function of a `Surrogate`: advantages, ratios, clipping, KL, means over tokens.

Axes: B trajectory, L padded position, G prompt. Log-probs in nats, rewards and advantages in reward units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spo.algorithm.baselines.presets import Baseline, KlEstimator, Normalise, Surrogate
from spo.algorithm.token_batch import TokenBatch
from spo.errors import InvalidInput

# Nats. Beyond e^20 a ratio says nothing any more, but its square leaves float32; its gradient there is 0.
RATIO_LIMIT = 20.0
# Equal rewards differ by rounding only; dividing by that would blow it up.
LEAST_DEVIATION = 1e-6


def surrogate_loss(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, surrogate: Surrogate) -> Tensor:
    """The loss of each trajectory, whose mean is that of the batch; (B,).

    Raises InvalidInput (code "lone_group") where a prompt's baseline needs more than one trajectory.
    """
    mask_BL = batch.response_mask_BL
    advantage_BL = normalised_advantages(batch, surrogate, beta)
    old_BL = batch.sampling_logprobs_BL
    if surrogate.correction != "none":
        old_BL = logprobs_BL.detach() if batch.proximal_logprobs_BL is None else batch.proximal_logprobs_BL
    ratio_BL = importance_ratio(logprobs_BL, old_BL, mask_BL, surrogate)
    limits = 1 - surrogate.clip_low, 1 + surrogate.clip_high
    if surrogate.weight_only:
        # Masked before the product: nan in the padding would reach the gradient.
        loss_BL = -ratio_BL.clamp(*limits).detach() * advantage_BL * torch.where(mask_BL, logprobs_BL, 0.0)
    else:
        loss_BL = clipped(ratio_BL, advantage_BL, *limits)
    if surrogate.correction != "none":
        loss_BL = loss_BL * mismatch_weights(old_BL, batch, surrogate)
    loss_BL = loss_BL + _regularisers(logprobs_BL, batch, surrogate, beta)
    return aggregated(torch.where(mask_BL, loss_BL, 0.0), batch, surrogate)


def clipped(ratio_BL: Tensor, advantage_BL: Tensor, low: float, high: float) -> Tensor:
    """-min(w A, clip(w, low, high) A), elementwise (Schulman et al. 2017, Eq. 7)."""
    return -torch.minimum(ratio_BL * advantage_BL, ratio_BL.clamp(low, high) * advantage_BL)


def importance_ratio(logprobs_BL: Tensor, old_BL: Tensor, mask_BL: Tensor, surrogate: Surrogate) -> Tensor:
    """pi_theta / pi_old at each response token, of the token or of its whole response; (B, L), 1 elsewhere.

    The sequence's is exp of the mean log-ratio over its tokens (Zheng et al. 2025, Eq. 7), the product exp of the sum.
    """
    log_ratio_BL = torch.where(mask_BL, logprobs_BL - old_BL, 0.0)
    if surrogate.ratio != "token":
        log_ratio_B = log_ratio_BL.sum(dim=1)
        if surrogate.ratio == "sequence":
            log_ratio_B = log_ratio_B / mask_BL.sum(dim=1).clamp(min=1)
        log_ratio_BL = torch.where(mask_BL, log_ratio_B[:, None], 0.0)
    return log_ratio_BL.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()


def mismatch_weights(proximal_BL: Tensor, batch: TokenBatch, surrogate: Surrogate) -> Tensor:
    """w = pi_proximal / pi_sampler at each response token, corrected; (B, L), no gradient.

    pi_proximal is the trainer's policy before the first update on the batch. truncate: min(w, C) (TIS, Yao et al.
    2025). mask: w where alpha <= w <= beta, else 0 (IcePop, Ling Team 2025).
    """
    difference_BL = torch.where(batch.response_mask_BL, proximal_BL - batch.sampling_logprobs_BL, 0.0).detach()
    weight_BL = difference_BL.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    low, high = surrogate.limits
    if surrogate.correction == "mask":
        return torch.where((weight_BL >= low) & (weight_BL <= high), weight_BL, 0.0)
    return weight_BL.clamp(low, high)


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(pi_theta || pi0) from log_ratio = ln pi_theta - ln pi0 of samples of pi_theta, nats, with gradient.

    k1 = x, k2 = x^2 / 2, k3 = e^-x - 1 + x (Schulman 2020). As a loss, on samples of pi_theta, k1 has a gradient of
    mean 0, k2 that of the KL, and k3 that of the KL the other way round. Beyond the limit k3's value and gradient are
    those at the limit: it still pulls back and is never infinite.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    near = (-log_ratio).clamp(max=RATIO_LIMIT).detach() + (log_ratio.detach() - log_ratio)
    return torch.expm1(near) - near


def normalised_advantages(batch: TokenBatch, surrogate: Surrogate, beta: float) -> Tensor:
    """A of each response token, detached; (B, L), 0 elsewhere."""
    advantage_BL = raw_advantages(batch, surrogate, beta)
    if surrogate.normalise != "batch":
        return advantage_BL
    if batch.advantage_mean_B is None or batch.advantage_deviation_B is None:
        # This is the whole batch.
        count, total, squares = advantage_moments(advantage_BL, batch.response_mask_BL).tolist()
        mean, deviation = mean_and_deviation(count, total, squares)
        scaled_BL = (advantage_BL - mean) / deviation
    else:
        scaled_BL = (advantage_BL - batch.advantage_mean_B[:, None]) / batch.advantage_deviation_B[:, None]
    return torch.where(batch.response_mask_BL, scaled_BL, 0.0)


def raw_advantages(batch: TokenBatch, surrogate: Surrogate, beta: float) -> Tensor:
    """Rewards, less the KL where it belongs to them, less the baseline; (B, L), 0 outside the response.

    Without a baseline a token's is the return from it on, r - c * sum_{s >= t} k_s; with one the whole response is one
    action, of reward r - c * sum_t k_t. The KL there is that of the sampler's log-probs.
    """
    mask_BL = batch.response_mask_BL
    later_BL = torch.zeros_like(batch.sampling_logprobs_BL)
    coefficient = beta if surrogate.kl_coefficient is None else surrogate.kl_coefficient
    if surrogate.kl_in == "reward" and coefficient:
        log_ratio_BL = torch.where(mask_BL, batch.sampling_logprobs_BL - batch.reference_logprobs_BL, 0.0)
        kl_BL = coefficient * kl_estimate(log_ratio_BL, surrogate.kl)
        later_BL = kl_BL.flip(1).cumsum(dim=1).flip(1)
    if surrogate.baseline == "none":
        return torch.where(mask_BL, batch.reward_B[:, None] - later_BL, 0.0)
    # The first position holds the sum over all of them.
    reward_B = batch.reward_B - later_BL[:, 0]
    advantage_B = group_advantages(reward_B, batch.group_B, surrogate.baseline, surrogate.normalise)
    return torch.where(mask_BL, advantage_B[:, None], 0.0)


def group_advantages(reward_B: Tensor, group_B: Tensor, baseline: Baseline, normalise: Normalise) -> Tensor:
    """r less the mean of the prompt's rewards, or of its other ones; over their standard deviation if asked; (B,).

    Shao et al. 2024; the deviation left out: Liu et al. 2025; leave-one-out: Ahmadian et al. 2024. A group of equal
    rewards gives 0. Raises InvalidInput when a prompt has one trajectory: alone it has nothing to be compared with.
    """
    _, group_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    if (count_G < 2).any():
        raise InvalidInput("group-relative advantages need at least two trajectories of each prompt", code="lone_group")
    zero_G = reward_B.new_zeros(len(count_G))
    mean_G: Tensor = zero_G.index_add(0, group_B, reward_B) / count_G
    centred_B = reward_B - mean_G[group_B]
    if baseline == "leave_one_out":
        # r - (n mean - r) / (n - 1) is n / (n - 1) times r - mean.
        count_G = count_G.to(reward_B)
        centred_B = centred_B * (count_G / (count_G - 1))[group_B]
    if normalise != "deviation":
        return centred_B
    deviation_G: Tensor = (zero_G.index_add(0, group_B, centred_B.square()) / (count_G - 1)).sqrt()
    scale_G = torch.where(deviation_G > LEAST_DEVIATION, 1 / deviation_G.clamp(min=LEAST_DEVIATION), 0.0)
    return scale_G[group_B] * centred_B


def aggregated(loss_BL: Tensor, batch: TokenBatch, surrogate: Surrogate) -> Tensor:
    """Each trajectory's loss of its tokens', such that the mean over the batch is the one that is asked for; (B,)."""
    sum_B = loss_BL.sum(dim=1)
    if surrogate.aggregation == "sum":
        return sum_B
    if surrogate.aggregation == "sequence":
        return sum_B / batch.response_lengths.clamp(min=1)
    mean_tokens_B = batch.mean_tokens_B
    if mean_tokens_B is None:
        mean_tokens_B = batch.response_lengths.to(loss_BL).mean().expand_as(sum_B)
    return sum_B / mean_tokens_B.clamp(min=LEAST_DEVIATION)


def advantage_moments(advantage_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Number, sum and sum of squares in the mask; (3,), float64. Those of parts of a batch add up."""
    inside = advantage_BL[mask_BL].double()
    return torch.stack([mask_BL.sum().double(), inside.sum(), inside.square().sum()])


def mean_and_deviation(count: float, total: float, squares: float) -> tuple[float, float]:
    """Of numbers with these moments; the deviation is at least what is no rounding."""
    mean = total / max(count, 1.0)
    return mean, max(max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5, LEAST_DEVIATION)


def _regularisers(logprobs_BL: Tensor, batch: TokenBatch, surrogate: Surrogate, beta: float) -> Tensor:
    """The KL in the loss and the entropy bonus of each response token; (B, L).

    The bonus is c (ln pi)^2 / 2, whose gradient on samples of pi_theta has the mean -c times that of the entropy: it is
    k2 to the uniform distribution.
    """
    mask_BL = batch.response_mask_BL
    found_BL = torch.zeros_like(logprobs_BL)
    coefficient = beta if surrogate.kl_coefficient is None else surrogate.kl_coefficient
    if surrogate.kl_in == "loss" and coefficient:
        log_ratio_BL = torch.where(mask_BL, logprobs_BL - batch.reference_logprobs_BL, 0.0)
        found_BL = found_BL + coefficient * kl_estimate(log_ratio_BL, surrogate.kl)
    if surrogate.entropy:
        found_BL = found_BL + surrogate.entropy * 0.5 * torch.where(mask_BL, logprobs_BL, 0.0).square()
    return found_BL
