"""What is minimised: the loss terms, beta, the critic of PPO, the refresh of the reference."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from spo.algorithm.registry import LossTerm
from spo.spec.section import MOST_COUNT, Section, Share

PAPER_BETA = 1 / math.log(100_000)
# A prompt that pi0 solves once in 100 samples lies halfway between the rewards. At the paper's beta the squared loss
# collapsed in every seed of decision 0003, at this one in none.
DEFAULT_BETA = 1 / math.log(100)


class CriticSpec(Section):
    """The value model of PPO (3.1.4): pi0's body with a scalar head, its own optimiser and engine."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    trace: Share = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    discount: Share = 1.0
    normalise: Literal["deviation", "none"] = Field(
        default="deviation",
        description="Advantages less their mean over the batch, divided by their standard deviation; or as they are.",
    )


class ReferenceRefreshSpec(Section):
    """Make the current policy the new reference from time to time (section 6), with Qhat_0 estimated anew."""

    interval_steps: int = Field(ge=1, le=MOST_COUNT)
    samples: int = Field(default=16, ge=1, le=100_000, description="Samples of the new reference per prompt.")


class AlgorithmSpec(Section):
    """The objective: temperature beta in reward units, and the loss terms."""

    beta: float = Field(default=DEFAULT_BETA, gt=0, le=100, description="KL temperature, reward units.")
    value_beta: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Temperature of the values alone, Qhat_0 and Qhat_t; default: beta. OAPL and A*-PO take a high one "
        "here, so that values stay near the mean reward, and a low `beta` for the regression (arXiv 2602.19362).",
    )
    losses: tuple[LossTerm, ...] = Field(default=(LossTerm(),), min_length=1, max_length=16)
    critic: CriticSpec | None = Field(default=None, description="PPO needs one; nothing else has one.")
    reference_refresh: ReferenceRefreshSpec | None = None

    @property
    def temperature_of_values(self) -> float:
        """The beta under which success rates become values, reward units."""
        return self.beta if self.value_beta is None else self.value_beta

    @property
    def needs_groups(self) -> bool:
        """Whether a term compares the trajectories of a prompt with each other."""
        return any(term.needs("groups") for term in self.losses)

    @property
    def needs_behaviour(self) -> bool:
        """Whether a term weighs by the sampler's log-probs."""
        return any(term.needs("behaviour") for term in self.losses)
