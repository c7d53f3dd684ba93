"""The input of every objective: a batch of judged token sequences.

Axes: B trajectory in the batch, L position in the padded sequence (prompt, response and padding).
Units: log-probabilities in nats, rewards and Q in reward units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from spo.algorithm.sources import SOURCE_CODES, SourceName


@dataclass(frozen=True)
class TokenBatch:
    """Judged trajectories as padded tensors; built by the trainer from protobuf, read by every objective.

    Sequences may be padded on either side. Position l speaks about token l itself: `reference_logprobs_BL[b, l]` is
    log pi0(token l | tokens before l), and so are the policy's log-probs handed in beside the batch. Values outside
    `response_mask_BL` are never read, except `input_ids_BL` by the model.

    response_mask_BL: True exactly at the tokens that the policy sampled (an end-of-sequence token is one of them). In a
    conversation the environment's tokens lie between them: the mask need not be contiguous, and t counts its tokens.
    sampling_logprobs_BL: log-prob under the behaviour policy as sampled; 0 where unknown (human solutions).
    reward_B, qhat_0_B: terminal reward (<= 0) and estimated soft value of the prompt, reward units.
    qhat_0_error_B: standard error of qhat_0_B, reward units; 0 where it is exact or unknown.
    source_B: SOURCE_CODES. group_B: index of the trajectory's prompt within the batch, >= 0.
    annotated_q_BL: where `annotated_mask_BL`, within the response mask, the Monte-Carlo estimate of Q_t after token l,
    reward units.
    beta_scale_B: what a job's beta is multiplied by for each trajectory; None: 1 for all. See `with_beta_per_token`.
    critic_advantage_BL, critic_return_BL: of each response token by PPO's critic: the generalised advantage, and the
    return that its value is regressed on; reward units.
    learned_B: False where a trajectory teaches nothing: no loss reads it, and no other trajectory's gradient depends on
    it, except that every term still divides by B. None: all teach.
    proximal_logprobs_BL: the policy's log-probs before the first update on the batch, where a loss corrects for what
    the sampler's differ from them; None: the policy's own.
    teacher_logprobs_BL: log-prob under the model that terms of distillation imitate; None: the reference teaches.
    mean_tokens_B, advantage_mean_B, advantage_deviation_B: of the whole batch that this is a part of, the same in every
    row: response tokens per trajectory, and moments of the advantages of its tokens; None: this is the whole.
    """

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    response_mask_BL: Tensor
    reference_logprobs_BL: Tensor
    sampling_logprobs_BL: Tensor
    reward_B: Tensor
    qhat_0_B: Tensor
    source_B: Tensor
    group_B: Tensor
    annotated_q_BL: Tensor | None = None
    annotated_mask_BL: Tensor | None = None
    beta_scale_B: Tensor | None = None
    critic_advantage_BL: Tensor | None = None
    critic_return_BL: Tensor | None = None
    learned_B: Tensor | None = None
    proximal_logprobs_BL: Tensor | None = None
    teacher_logprobs_BL: Tensor | None = None
    mean_tokens_B: Tensor | None = None
    advantage_mean_B: Tensor | None = None
    advantage_deviation_B: Tensor | None = None
    qhat_0_error_B: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of trajectories B."""
        return self.reward_B.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """Tokens of each trajectory that are learned from; (B,)."""
        return self.response_mask_BL.sum(dim=1)

    def betas(self, beta: float) -> Tensor:
        """The temperature of each trajectory under a job's beta; (B,), reward units."""
        return beta * (torch.ones_like(self.reward_B) if self.beta_scale_B is None else self.beta_scale_B)

    def with_beta_per_token(self) -> TokenBatch:
        """The same batch with beta / |y| as the temperature of a response of |y| tokens (Apertus 2025, 4.3).

        Q_T = r then means a mean log-ratio of (r - Qhat_0) / beta nats per token, however long the response is.
        """
        return replace(self, beta_scale_B=1 / self.response_lengths.clamp(min=1).to(self.reward_B.dtype))

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor | slice) -> TokenBatch:
        """The trajectories at `rows` (boolean mask, indices or slice), same padding."""
        return self._map(lambda tensor: tensor[rows])

    def rows_from(self, sources: tuple[SourceName, ...] | None) -> Tensor:
        """Mask over B of the trajectories whose source is named; None names all."""
        if sources is None:
            return torch.ones_like(self.source_B, dtype=torch.bool)
        codes = torch.tensor([SOURCE_CODES[name] for name in sources], device=self.source_B.device)
        return torch.isin(self.source_B, codes)

    def learned_from(self, sources: tuple[SourceName, ...] | None, *, in_groups: bool = False) -> Tensor:
        """Mask over B of the trajectories of these sources that teach: `rows_from` without what `learned_B` leaves out.

        in_groups: trajectories are compared within their prompt's group; one whose companions were all left out has
        nothing to be compared with, and teaches nothing either.
        """
        rows_B = self.rows_from(sources)
        if self.learned_B is None:
            return rows_B
        learned_B = rows_B & self.learned_B
        if not in_groups:
            return learned_B
        same_BB = self.group_B[:, None] == self.group_B[None, :]
        before_B, after_B = ((same_BB & chosen_B[None, :]).sum(dim=1) for chosen_B in (rows_B, learned_B))
        return learned_B & ((after_B > 1) | (before_B == after_B))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        tensors: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})
