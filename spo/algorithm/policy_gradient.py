"""Policy-gradient baselines and the supervised loss, as pure functions (Cohen et al. 2025, 3.1.4 and 6).

Axes: B trajectory, L padded position. Log-probs in nats, rewards, values and advantages in reward units. A*-PO
(Brantley et al. 2025) needs nothing here: it is `objectives.terminal_squared` with coefficient 2 beta, on one
fresh on-policy sample per prompt, Qhat_0 from a temperature of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spo.algorithm.baselines.surrogate import RATIO_LIMIT, clipped
from spo.algorithm.q_values import terminal_q
from spo.algorithm.token_batch import TokenBatch
from spo.errors import InvalidInput


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
