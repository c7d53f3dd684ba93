"""PPO's critic on one rank: a value model under an engine of its own, advantages and returns by it, and its loss.

Axes: B trajectory, L padded position, T position of a packed row, D hidden. Values, returns and advantages in reward
units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.deepspeed_engine import DeepSpeedEngine
from spo.algorithm.baselines import generalised_advantages, kl_regularised_rewards, value_loss
from spo.algorithm.objectives import TokenBatch
from spo.errors import InvalidInput
from spo.model.folder_names import whole_shape
from spo.model.logprobs import PackedRow, is_packed
from spo.spec.job_spec import AlgorithmSpec, TrainerSpec


class ValueModel(nn.Module):
    """A language model's body with a scalar head that starts at 0."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = policy.base_model
        # The width of the hidden states; that of the embedding differs in some models.
        width = whole_shape(policy.get_output_embeddings().weight)[1]
        self.head = nn.Linear(width, 1, dtype=policy.dtype)
        # At 0 the first advantages are plain returns, and no random state is drawn from.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids_BL: Tensor, attention_mask_BL: Tensor) -> Tensor:
        """value_BL, float32: at l the value of the prompt and the tokens before l; 0 at first positions."""
        if is_packed(self.body):
            row = PackedRow.of(attention_mask_BL)
            value_1T = self._values(input_ids=row.pack(input_ids_BL), **row.model_inputs())
            # The value before a sequence's first token would be read from the sequence before it.
            return row.unpack(value_1T.masked_fill(row.position_ids_1T == 0, 0.0))
        mask_BL = attention_mask_BL.long()
        position_ids_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)
        return self._values(input_ids=input_ids_BL, attention_mask=mask_BL, position_ids=position_ids_BL)

    def _values(self, **given: object) -> Tensor:
        hidden_BLD = self.body(**given, use_cache=False).last_hidden_state
        value_BL = self.head(hidden_BLD[:, :-1]).squeeze(-1).float()
        return nn.functional.pad(value_BL, (1, 0))


@dataclass(frozen=True)
class CriticOutput:
    """Advantage of each response token, and the return that its value is regressed on; 0 outside the response.

    mask_BL: the response tokens of trajectories that PPO learns from.
    """

    advantage_BL: Tensor
    return_BL: Tensor
    mask_BL: Tensor

    def moments(self) -> Tensor:
        """Number, sum and sum of squares of the advantages in the mask; float64, on the CPU."""
        advantages = self.advantage_BL[self.mask_BL].double()
        return torch.stack([self.mask_BL.sum().double(), advantages.sum(), advantages.square().sum()]).cpu()

    def added_to(self, batch: TokenBatch) -> TokenBatch:
        """The batch with these advantages and returns."""
        return replace(batch, critic_advantage_BL=self.advantage_BL, critic_return_BL=self.return_BL)

    def normalised(self, moments: Sequence[Tensor]) -> CriticOutput:
        """Advantages less their mean, over their standard deviation, both of the whole batch: its `moments` summed."""
        count, total, squares = torch.stack(list(moments)).sum(dim=0).tolist()
        mean = total / max(count, 1)
        deviation = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
        # Equal advantages differ by rounding only; dividing by that would blow it up.
        scaled_BL = (self.advantage_BL - mean) / max(deviation, 1e-6)
        return replace(self, advantage_BL=torch.where(self.mask_BL, scaled_BL, 0.0))


class Critic:
    """The value model of one run on this rank. All ranks call every method together."""

    def __init__(self, policy: PreTrainedModel, algorithm: AlgorithmSpec, trainer: TrainerSpec, passes: int) -> None:
        """policy: a copy of pi0 for the critic alone. passes: micro-batches per update.

        Raises InvalidInput without `algorithm.critic`.
        """
        if algorithm.critic is None:
            raise InvalidInput("the job has no critic", code="no_critic")
        self._spec = algorithm.critic
        self._beta = algorithm.beta
        # Off-policy returns would mislead it: it learns from the trajectories that PPO learns from.
        self._terms = [term for term in algorithm.losses if term.needs("critic")]
        own = trainer.model_copy(update={"learning_rate": self._spec.learning_rate})
        device = next(policy.parameters()).device
        self.engine = DeepSpeedEngine(ValueModel(policy).to(device), own, passes)

    @torch.no_grad()
    def compute_advantages(self, logprobs_BL: Tensor, batch: TokenBatch) -> CriticOutput:
        """Advantages and returns under the policy and values of this moment (GAE on the KL-regularised reward).

        Raises InvalidInput when a value is not finite.
        """
        value_BL = self.values(batch)
        if not torch.isfinite(value_BL[batch.response_mask_BL]).all():
            raise InvalidInput("a value of the critic is not finite", code="not_finite")
        advantage_BL, return_BL = generalised_advantages(
            kl_regularised_rewards(logprobs_BL, batch, self._beta),
            value_BL,
            batch.response_mask_BL,
            discount=self._spec.discount,
            trace=self._spec.trace,
        )
        return CriticOutput(advantage_BL, return_BL, batch.response_mask_BL & self._rows(batch)[:, None])

    def normalised(self, output: CriticOutput, moments: Sequence[Tensor]) -> CriticOutput:
        """The output as the job wants it; moments: of all micro-batches of the batch, those of other ranks included."""
        return output if self._spec.normalise == "none" else output.normalised(moments)

    def loss(self, batch: TokenBatch) -> Tensor:
        """Half the squared error of V: its mean over a trajectory's tokens, summed over PPO's trajectories, over B.

        Raises InvalidInput when it is not finite, or when the batch carries no returns.
        """
        if batch.critic_return_BL is None:
            raise InvalidInput("the critic learns from returns, which the batch lacks", code="no_critic")
        loss_BL = value_loss(self.values(batch), batch.critic_return_BL, batch.response_mask_BL)
        loss_B = loss_BL.sum(dim=1) / batch.response_lengths.clamp(min=1)
        loss = torch.where(self._rows(batch), loss_B, 0.0).mean()
        if not torch.isfinite(loss):
            raise InvalidInput("the critic's loss is not finite", code="not_finite")
        return loss

    def values(self, batch: TokenBatch) -> Tensor:
        """V before each token; (B, L)."""
        value_BL: Tensor = self.engine.model(batch.input_ids_BL, batch.attention_mask_BL)
        return value_BL

    def _rows(self, batch: TokenBatch) -> Tensor:
        """Mask over B of the trajectories that PPO learns from."""
        return torch.stack([batch.learned_from(term.sources) for term in self._terms]).any(dim=0)

    def step(self, warm_up: float) -> float | None:
        """Update at warm_up (0..1) times the critic's learning rate; the gradient norm, None when nothing was done."""
        return self.engine.step(self._spec.learning_rate * warm_up)

    def close(self) -> None:
        """Free the value model and its optimiser."""
        self.engine.close()
