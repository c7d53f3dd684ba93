"""The registry of losses: name -> its function, the settings that it reads, and what it cannot do without.

No torch here, so that a JobSpec can be checked anywhere: `losses.py` imports a row's function when it is first used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

from spo.algorithm.sources import SourceName

# value: Qhat_0 of the prompt. groups: all trajectories of a prompt in one forward. annotations: Monte-Carlo estimates
# of Q_t. critic: PPO's value model. behaviour: the sampler's log-probs.
Need = Literal["value", "groups", "annotations", "critic", "behaviour"]


@dataclass(frozen=True)
class Loss:
    """One row of the registry.

    function: "module.name" in spo.algorithm, called as (logprobs_BL, batch, beta, **settings); returns loss_B.
    settings: the fields of LossTerm that it takes as keywords.
    """

    function: str
    settings: tuple[str, ...] = ()
    needs: Collection[Need] = ()


LOSSES: dict[str, Loss] = {
    "terminal_squared": Loss("objectives.terminal_squared", needs=["value"]),
    "terminal_cross_entropy": Loss("objectives.terminal_cross_entropy", ("epsilon",), needs=["value"]),
    "reverse_q_squared": Loss("objectives.reverse_q_squared", needs=["value"]),
    "reverse_q_cross_entropy": Loss("objectives.reverse_q_cross_entropy", ("epsilon",), needs=["value"]),
    "advantage_sigmoid": Loss("objectives.advantage_sigmoid", ("sigmoid_scale", "sigmoid_unit"), needs=["value"]),
    "monte_carlo_squared": Loss("objectives.monte_carlo_squared", needs=["value", "annotations"]),
    "monte_carlo_cross_entropy": Loss(
        "objectives.monte_carlo_cross_entropy", ("epsilon",), needs=["value", "annotations"]
    ),
    "group_centred_squared": Loss("objectives.group_centred_squared", needs=["groups"]),
    "policy_gradient": Loss("policy_gradient.soft_policy_gradient", ("clip",), needs=["value", "behaviour"]),
    "supervised": Loss("policy_gradient.supervised", ("min_reference_logprob",)),
    "ppo": Loss("policy_gradient.ppo", ("clip",), needs=["critic", "behaviour"]),
    "grpo": Loss("policy_gradient.grpo", ("clip", "normalise"), needs=["groups", "behaviour"]),
}


def _registered(name: str) -> str:
    if name not in LOSSES:
        *first, last = map(repr, LOSSES)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
    return name


LossName = Annotated[
    str, AfterValidator(_registered), WithJsonSchema({"type": "string", "enum": list(LOSSES)}, mode="validation")
]


class LossTerm(BaseModel):
    """One objective on some sources; the loss is the coefficient-weighted sum of the terms."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    objective: LossName = "terminal_squared"
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    sources: tuple[SourceName, ...] | None = Field(
        default=None, max_length=16, description="Sources it applies to; default: all."
    )
    epsilon: float = Field(default=1e-3, gt=0, lt=10, description="Clip of the cross-entropy forms, log-prob units.")
    sigmoid_scale: float = Field(default=1.0, gt=0, le=1e6, description="Scale inside the sigmoid.")
    sigmoid_unit: Literal["log_prob", "q"] = Field(default="log_prob", description="What sigmoid_scale multiplies.")
    clip: float = Field(default=0.2, gt=0, lt=1, description="Clip of the importance weight of policy gradients.")
    normalise: Literal["deviation", "none"] = Field(
        default="deviation", description="What group-relative advantages are divided by."
    )
    min_reference_logprob: float | None = Field(
        default=None,
        le=0,
        ge=-1000,
        description="supervised: responses are left out whose mean log-prob per token under pi0 (nats) is below.",
    )

    def needs(self, need: Need) -> bool:
        """Whether its objective cannot do without this."""
        return need in LOSSES[self.objective].needs
