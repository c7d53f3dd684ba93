"""Losses of preferences and teachers: DPO, KTO and on-policy distillation.

Axes: B trajectory, L padded position, P pair. Log-probs in nats, rewards in reward units.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spo.algorithm.baselines.surrogate import RATIO_LIMIT, clipped
from spo.algorithm.q_values import advantages
from spo.algorithm.token_batch import TokenBatch


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
