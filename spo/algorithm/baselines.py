"""The baselines as pure functions: GRPO and its relatives, PPO, preferences, teachers, the supervised loss, and
totals over a whole batch.

Axes: B trajectory, L padded position, G prompt. Log-probs in nats, rewards and advantages in reward units.

Axes: B trajectory, L padded position, P pair. Log-probs in nats, rewards in reward units.

Axes: B trajectory, L padded position. Log-probs in nats, rewards, values and advantages in reward units. A*-PO
(Brantley et al. 2025) needs nothing here: it is `objectives.terminal_squared` with coefficient 2 beta, on one
fresh on-policy sample per prompt, Qhat_0 from a temperature of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spo.algorithm.objectives import TokenBatch, advantages, terminal_q
from spo.algorithm.registry import PRESETS, Baseline, KlEstimator, LossTerm, Normalise, Surrogate
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


def teaching_rows(batch: TokenBatch, terms: Sequence[LossTerm], beta: float, *, contrast_only: bool) -> Tensor:
    """Mask over B of the rows that a forward is needed for; a group that a term compares is in it whole, or not.

    Left out are rows whose gradient is exactly 0 under every term: no term reads them, or those that do find all
    advantages 0 and add no KL and no entropy. contrast_only: terms that compare groups count as if they added none.
    """
    found_B = torch.zeros_like(batch.reward_B, dtype=torch.bool)
    compared: list[Tensor] = []
    for term in terms:
        rows_B = batch.learned_from(term.sources, in_groups=term.needs("groups"))
        if rows_B.any():
            found_B[rows_B] |= _teaches(batch.select(rows_B), term, beta, contrast_only=contrast_only)
        if term.needs("groups"):
            compared.append(rows_B)
    while True:
        before = int(found_B.sum())
        for rows_B in compared:
            found_B = found_B | (rows_B & torch.isin(batch.group_B, batch.group_B[rows_B & found_B]))
        if int(found_B.sum()) == before:
            return found_B


def _teaches(batch: TokenBatch, term: LossTerm, beta: float, *, contrast_only: bool) -> Tensor:
    """Mask over the rows of one term."""
    all_B = torch.ones_like(batch.reward_B, dtype=torch.bool)
    if not term.needs("groups"):
        return all_B
    if contrast_only or term.objective == "dpo":
        same_BB = batch.group_B[:, None] == batch.group_B[None, :]
        return (same_BB & (batch.reward_B[:, None] != batch.reward_B[None, :])).any(dim=1)
    surrogate = term.surrogate
    pulls = surrogate.kl_in == "loss" and (surrogate.kl_coefficient is None or surrogate.kl_coefficient > 0)
    if term.objective not in PRESETS or pulls or surrogate.entropy or surrogate.normalise == "batch":
        return all_B
    return (raw_advantages(batch, surrogate, beta) != 0).any(dim=1)


def dpo(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """-ln sigmoid(h_w - h_l), h = beta ln pi / pi0 of a response, over the pairs of a prompt with r_w > r_l; (B,).

    Rafailov et al. 2023, Eq. 7. A prompt's n trajectories share n times the mean over its pairs, half of each pair's
    loss at either of its two: with pairs alone (n = 2) the batch's mean is that over pairs. No pair, no loss.
    """
    h_B = advantages(logprobs_BL, batch, beta).sum(dim=1)
    same_BB = batch.group_B[:, None] == batch.group_B[None, :]
    winner_P, loser_P = (same_BB & (batch.reward_B[:, None] > batch.reward_B[None, :])).nonzero(as_tuple=True)
    loss_P = -logsigmoid(h_B[winner_P] - h_B[loser_P])
    size_B = same_BB.sum(dim=1)
    pairs_B = torch.zeros_like(h_B).index_add(0, winner_P, torch.ones_like(loss_P))
    pairs_of_group_B = (same_BB.to(h_B) @ pairs_B).clamp(min=1)
    share_P = 0.5 * (size_B / pairs_of_group_B)[winner_P] * loss_P
    return torch.zeros_like(h_B).index_add(0, winner_P, share_P).index_add(0, loser_P, share_P)


def kto(
    logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, desirable_reward: float, undesirable_weight: float
) -> Tensor:
    """1 - sigmoid(h - z) where the reward is at least desirable_reward, else weight * (1 - sigmoid(z - h)); (B,).

    Ethayarajh et al. 2024, Eq. 7 and 8, h = beta ln pi / pi0. The reference point z is the mean h of the prompt's other
    trajectories, at least 0 and detached: the paper takes responses to other prompts, which would be a forward more. A
    trajectory alone in its group has z = 0.
    """
    h_B = advantages(logprobs_BL, batch, beta).sum(dim=1)
    others_BB = (batch.group_B[:, None] == batch.group_B[None, :]).to(h_B)
    others_BB.fill_diagonal_(0.0)
    z_B = ((others_BB @ h_B.detach()) / others_BB.sum(dim=1).clamp(min=1)).clamp(min=0.0)
    desirable_B = batch.reward_B >= desirable_reward
    sign_B = torch.where(desirable_B, 1.0, -1.0).to(h_B)
    weight_B = torch.where(desirable_B, 1.0, undesirable_weight).to(h_B)
    return weight_B * torch.sigmoid(-sign_B * (h_B - z_B))


def distillation(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, clip: float) -> Tensor:
    """Reverse KL to a teacher on the student's own samples, a mean over each response's tokens; (B,).

    The reward of a token is ln pi_teacher - ln pi_theta, detached, with no look ahead (Agarwal et al. 2024; Lu and
    Thinking Machines Lab 2025), under PPO's clipped ratio to the sampler. Without a teacher of its own the job's
    reference is it, which teaches where training began from other weights, as a fork's does. beta and rewards are not
    read.
    """
    mask_BL = batch.response_mask_BL
    teacher_BL = batch.reference_logprobs_BL if batch.teacher_logprobs_BL is None else batch.teacher_logprobs_BL
    advantage_BL = torch.where(mask_BL, teacher_BL - logprobs_BL.detach(), 0.0)
    log_ratio_BL = torch.where(mask_BL, logprobs_BL - batch.sampling_logprobs_BL, 0.0)
    ratio_BL = log_ratio_BL.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    loss_BL = clipped(ratio_BL, advantage_BL, 1 - clip, 1 + clip)
    return torch.where(mask_BL, loss_BL, 0.0).sum(dim=1) / batch.response_lengths.clamp(min=1)


def clipped_surrogate(logprobs_BL: Tensor, batch: TokenBatch, advantage_BL: Tensor, *, clip: float) -> Tensor:
    """-min(w A, clip(w, 1 - clip, 1 + clip) A) with w = pi_theta / pi_behaviour; (B, L), 0 outside the response.

    The behaviour is the sampler's true distribution (`sampling_logprobs_BL`), as in 3.1.4 and Schulman et al. 2017; the
    advantage carries no gradient.
    """
    mask_BL = batch.response_mask_BL
    log_ratio_BL = torch.where(mask_BL, logprobs_BL - batch.sampling_logprobs_BL, 0.0)
    ratio_BL = log_ratio_BL.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    advantage_BL = torch.where(mask_BL, advantage_BL.detach(), 0.0)
    return clipped(ratio_BL, advantage_BL, 1 - clip, 1 + clip)


def kl_regularised_rewards(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """-beta (ln pi - ln pi0) at each response token, plus r at the last one; (B, L), detached (Eq. 1, per token).

    Summed over a trajectory: r - beta ln pi(a|x) / pi0(a|x). Raises InvalidInput on a trajectory without response.
    """
    mask_BL = batch.response_mask_BL
    if not mask_BL.any(dim=1).all():
        raise InvalidInput("a trajectory without response tokens has no place for its reward")
    penalty_BL = torch.where(mask_BL, beta * (logprobs_BL.detach() - batch.reference_logprobs_BL), 0.0)
    last_BL = mask_BL & (mask_BL.flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(last_BL, batch.reward_B[:, None], 0.0) - penalty_BL


def ppo(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, clip: float) -> Tensor:
    """Clipped surrogate of the critic's advantages, summed over the response; (B,). beta is in the advantages already.

    Raises InvalidInput when the batch carries no advantages.
    """
    if batch.critic_advantage_BL is None:
        raise InvalidInput("ppo needs the critic's advantages", code="no_critic")
    return clipped_surrogate(logprobs_BL, batch, batch.critic_advantage_BL, clip=clip).sum(dim=1)


def generalised_advantages(
    reward_BL: Tensor, value_BL: Tensor, response_mask_BL: Tensor, *, discount: float = 1.0, trace: float = 1.0
) -> tuple[Tensor, Tensor]:
    """GAE advantages and the returns the value model regresses on; (B, L) each, detached, 0 outside the response.

    value_BL[b, l] = V(prompt and tokens before l), so delta_t = r_t + discount V_{t+1} - V_t with V = 0 after the
    last token, and A_t = delta_t + discount trace A_{t+1} (Schulman et al. 2016). t + 1 is the next token in the mask:
    what an environment says in between is a part of the step, and no step of its own.
    """
    value_BL = torch.where(response_mask_BL, value_BL.detach(), 0.0)
    reward_BL = torch.where(response_mask_BL, reward_BL, 0.0)
    advantage_BL = torch.zeros_like(value_BL)
    advantage_B = next_value_B = torch.zeros_like(value_BL[:, 0])
    for position in reversed(range(value_BL.shape[1])):
        inside_B = response_mask_BL[:, position]
        delta_B = reward_BL[:, position] + discount * next_value_B - value_BL[:, position]
        advantage_B = torch.where(inside_B, delta_B + discount * trace * advantage_B, advantage_B)
        advantage_BL[:, position] = torch.where(inside_B, advantage_B, 0.0)
        next_value_B = torch.where(inside_B, value_BL[:, position], next_value_B)
    return advantage_BL, advantage_BL + value_BL


def value_loss(value_BL: Tensor, return_BL: Tensor, response_mask_BL: Tensor) -> Tensor:
    """(V - return)^2 / 2 at each response token; (B, L), 0 elsewhere."""
    # The mask comes before the square: after it, nan in the padding would still reach the gradient.
    return 0.5 * torch.where(response_mask_BL, value_BL - return_BL.detach(), 0.0).square()


def soft_policy_gradient(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, clip: float) -> Tensor:
    """The policy-gradient term that section 6 proposes to add: surrogate with A = detach(r - Q_T) at every token; (B,).

    r - Q_T = r - beta ln pi / pi0 - Qhat_0 is the return of the regularised objective L(pi) (Eq. 1) less a baseline:
    on fresh samples the gradient is that of -L(pi), and equals that of (Q_T - r)^2 / (2 beta).
    """
    advantage_B = batch.reward_B - terminal_q(logprobs_BL.detach(), batch, beta)
    return clipped_surrogate(logprobs_BL, batch, advantage_B[:, None].expand_as(logprobs_BL), clip=clip).sum(dim=1)


def kl_to_reference(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, kl: KlEstimator | None) -> Tensor:
    """The KL to pi0 of a response, the sum over its tokens of k3 or k2; (B,), nats. Neither reward nor beta is read.

    A term beside `group_centred_squared`, whose residuals are alike where a group has collapsed onto one answer: then
    nothing else pulls it back. This one does, each token by 1 - pi0 / pi (k3) or ln pi / pi0 (k2).
    """
    log_ratio_BL = torch.where(batch.response_mask_BL, logprobs_BL - batch.reference_logprobs_BL, 0.0)
    return kl_estimate(log_ratio_BL, kl or "k3").sum(dim=1)


def supervised(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, min_reference_logprob: float | None) -> Tensor:
    """-ln pi_theta(a|x) of the whole response; (B,), nats. Neither reward nor beta is read: choose trajectories before.

    Responses whose mean log pi0 per token is below `min_reference_logprob` teach nothing: what pi0 finds absurd is
    seldom a solution, even where it earned a reward.
    """
    loss_B = torch.where(batch.response_mask_BL, -logprobs_BL, 0.0).sum(dim=1)
    if min_reference_logprob is None:
        return loss_B
    reference_B = torch.where(batch.response_mask_BL, batch.reference_logprobs_BL, 0.0).sum(dim=1)
    return torch.where(reference_B >= min_reference_logprob * batch.response_lengths, loss_B, 0.0)


@dataclass(frozen=True)
class BatchTotals:
    """Sums over the trajectories that terms learn from which need them.

    moments: number, sum and sum of squares of the advantages of their tokens.
    """

    trajectories: int
    tokens: int
    moments: tuple[float, float, float]

    @classmethod
    def of(cls, batch: TokenBatch, terms: Sequence[LossTerm], beta: float) -> BatchTotals:
        """Of a part of a batch. The advantages are those of the one term that divides by them, on its sources."""
        found = torch.zeros(3, dtype=torch.float64)
        learned_B = torch.zeros_like(batch.reward_B, dtype=torch.bool)
        for term in terms:
            if not term.needs("batch"):
                continue
            rows_B = batch.learned_from(term.sources, in_groups=term.needs("groups"))
            learned_B |= rows_B
            if term.surrogate.normalise == "batch" and rows_B.any():
                part = batch.select(rows_B)
                advantage_BL = raw_advantages(part, term.surrogate, beta)
                found += advantage_moments(advantage_BL, part.response_mask_BL).cpu()
        count, total, squares = found.tolist()
        return cls(int(learned_B.sum()), int(batch.response_lengths[learned_B].sum()), (count, total, squares))

    @classmethod
    def added(cls, parts: Sequence[BatchTotals]) -> BatchTotals:
        """The totals of all parts together."""
        count, total, squares = (sum(part.moments[index] for part in parts) for index in range(3))
        trajectories = sum(part.trajectories for part in parts)
        return cls(trajectories, sum(part.tokens for part in parts), (count, total, squares))

    def told_to(self, batch: TokenBatch) -> TokenBatch:
        """The part with the whole batch's numbers in each row."""
        mean, deviation = mean_and_deviation(*self.moments)
        return replace(
            batch,
            mean_tokens_B=torch.full_like(batch.reward_B, self.tokens / max(self.trajectories, 1)),
            advantage_mean_B=torch.full_like(batch.reward_B, mean),
            advantage_deviation_B=torch.full_like(batch.reward_B, deviation),
        )
