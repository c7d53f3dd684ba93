"""What is minimised: the loss terms, beta, the critic of PPO, the refresh of the reference."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from spo.spec.section import Section, Share, SourceName

Objective = Literal[
    "terminal_squared",
    "terminal_cross_entropy",
    "reverse_q_squared",
    "reverse_q_cross_entropy",
    "advantage_sigmoid",
    "monte_carlo_squared",
    "monte_carlo_cross_entropy",
    "group_centred_squared",
    "policy_gradient",
    "supervised",
    "ppo",
    "grpo",
]
# What an objective cannot do without.
NEEDS_VALUE = frozenset(
    {
        "terminal_squared",
        "terminal_cross_entropy",
        "reverse_q_squared",
        "reverse_q_cross_entropy",
        "advantage_sigmoid",
        "monte_carlo_squared",
        "monte_carlo_cross_entropy",
        "policy_gradient",
    }
)
NEEDS_GROUPS = frozenset({"group_centred_squared", "grpo"})
NEEDS_BEHAVIOUR = frozenset({"policy_gradient", "ppo", "grpo"})
NEEDS_ANNOTATIONS = frozenset({"monte_carlo_squared", "monte_carlo_cross_entropy"})

PAPER_BETA = 1 / math.log(100_000)


class LossTerm(Section):
    """One objective on some sources; the loss is the coefficient-weighted sum of the terms."""

    objective: Objective = "terminal_squared"
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    sources: tuple[SourceName, ...] | None = Field(default=None, description="Sources it applies to; default: all.")
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
        description="supervised: responses less likely under pi0, mean nats per token, are not imitated.",
    )


class CriticSpec(Section):
    """The value model of PPO (3.1.4): pi0's body with a scalar head, its own optimiser and engine."""

    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    trace: Share = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    discount: Share = 1.0
    normalise: Literal["deviation", "none"] = Field(
        default="deviation",
        description="Advantages less their mean over the batch, divided by their standard deviation; or as they are.",
    )


class ReferenceRefreshSpec(Section):
    """Make the current policy the new reference from time to time (section 6), with Qhat_0 estimated anew."""

    interval_steps: int = Field(ge=1)
    samples: int = Field(default=16, ge=1, le=100_000, description="Samples of the new reference per prompt.")


class AlgorithmSpec(Section):
    """The objective: temperature beta in reward units, and the loss terms."""

    beta: float = Field(default=PAPER_BETA, gt=0, le=100, description="KL temperature, reward units.")
    losses: tuple[LossTerm, ...] = Field(default=(LossTerm(),), min_length=1, max_length=16)
    critic: CriticSpec | None = Field(default=None, description="PPO needs one; nothing else has one.")
    reference_refresh: ReferenceRefreshSpec | None = None

    @property
    def needs_groups(self) -> bool:
        """Whether a term compares the trajectories of a prompt with each other."""
        return any(term.objective in NEEDS_GROUPS for term in self.losses)

    @property
    def needs_behaviour(self) -> bool:
        """Whether a term weighs by the sampler's log-probs."""
        return any(term.objective in NEEDS_BEHAVIOUR for term in self.losses)
