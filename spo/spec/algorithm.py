"""What is minimised: the loss terms, beta, the critic of PPO, the anchor that moves."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from spo.algorithm.baselines.overlong import OverlongSpec
from spo.algorithm.registry import LOSSES, LossTerm
from spo.spec.section import MOST_COUNT, LocalPath, Section, Share

PAPER_BETA = 1 / math.log(100_000)
# A prompt that pi0 solves once in 100 samples lies halfway between the rewards. At the paper's beta the squared loss
# collapsed in every seed of decision 0003, at this one in none.
DEFAULT_BETA = 1 / math.log(100)
# Nats of log-ratio that a token is asked for in runs that live, ours and published ones; docs/values.md.
LIVING_NATS_PER_TOKEN = (0.01, 0.14)
# It has the gradient of the squared regression.
SOFT_POLICY_GRADIENT = "policy_gradient.soft_policy_gradient"


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
    """Move the anchor: a later policy takes pi0's place from time to time (section 6), with Qhat_0 of its own.

    samples: one reference at a time, for every trajectory; each prompt's value is estimated anew, and the trainer
    computes the log-probs. rollouts: each published version is the anchor of the rollouts that it makes (OAPL, arXiv
    2602.19362): the sampler's log-probs are the anchor's, a group's rewards give its Qhat_0, and an old trajectory
    keeps the numbers of its own anchor. Nothing more is sampled or computed.
    """

    interval_steps: int = Field(ge=1, le=MOST_COUNT)
    values: Literal["samples", "rollouts"] = Field(
        default="samples", description="Where Qhat_0 under the new anchor comes from: new samples, or each group's own."
    )
    samples: int = Field(default=16, ge=1, le=100_000, description="values samples: how many per prompt.")


class TeacherSpec(Section):
    """Who teaches terms of distillation: a second model, frozen in the trainer beside what is trained."""

    path: LocalPath = Field(
        description="Folder of the model, safetensors only; its tokenizer must know the tokens of model.path's by the "
        "same ids."
    )


class AlgorithmSpec(Section):
    """The objective: temperature beta in reward units, and the loss terms."""

    beta: float = Field(default=DEFAULT_BETA, gt=0, le=100, description="KL temperature, reward units.")
    beta_per: Literal["sequence", "token"] = Field(
        default="sequence",
        description="token: a response of |y| tokens has the temperature beta / |y|, so that a residual of 0 is a mean "
        "log-ratio of (r - Qhat_0) / beta nats per token whatever the length (QRPO in Apertus, arXiv 2509.14233). "
        "Values have one temperature all the same: value_beta.",
    )
    value_beta: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Temperature of the values alone, Qhat_0 and Qhat_t; default: beta. OAPL and A*-PO take a high one "
        "here, so that values stay near the mean reward, and a low `beta` for the regression (arXiv 2602.19362).",
    )
    value_noise: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Residuals count by n^2 / (n^2 + e^2), where e is the standard error of the prompt's Qhat_0 and n "
        "is this, reward units: beta says that an error of one nat in a response's log-ratio halves the weight. "
        "Default: all count alike.",
    )
    losses: tuple[LossTerm, ...] = Field(default=(LossTerm(),), min_length=1, max_length=16)
    critic: CriticSpec | None = Field(default=None, description="PPO needs one; nothing else has one.")
    teacher: TeacherSpec | None = Field(
        default=None, description="Of terms of distillation; default: the job's reference teaches them."
    )
    reference_refresh: ReferenceRefreshSpec | None = None
    overlong: OverlongSpec | None = Field(default=None, description="What losses make of responses that are too long.")

    @property
    def temperature_of_values(self) -> float:
        """The beta under which success rates become values, reward units."""
        return self.beta if self.value_beta is None else self.value_beta

    @property
    def refreshes_by_samples(self) -> bool:
        """Whether a version takes the place of pi0 for all trajectories once it has values of its own."""
        return self.reference_refresh is not None and self.reference_refresh.values == "samples"

    @property
    def anchors_by_rollouts(self) -> bool:
        """Whether each published version is the anchor of the rollouts that it makes."""
        return self.reference_refresh is not None and self.reference_refresh.values == "rollouts"

    @property
    def regresses_log_ratios(self) -> bool:
        """Whether beta is the temperature of a log-ratio that some term regresses, and no coefficient of a KL."""
        functions = [LOSSES[term.objective].function for term in self.losses]
        return any(name.startswith("objectives.") or name == SOFT_POLICY_GRADIENT for name in functions)

    def nats_per_token(self, tokens: float, span: float) -> float:
        """What a residual of `span` reward units asks each of a response's tokens for, nats of log-ratio."""
        return span / self.beta / (1 if self.beta_per == "token" else tokens)

    @property
    def needs_groups(self) -> bool:
        """Whether a term compares the trajectories of a prompt with each other."""
        return any(term.needs("groups") for term in self.losses)

    @property
    def model_paths(self) -> dict[str, str]:
        """Folders of models beside the one that is trained, by their pointers in a job spec."""
        return {"/algorithm/teacher/path": self.teacher.path} if self.teacher else {}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term imitates a teacher."""
        return any(term.needs("teacher") for term in self.losses)

    @property
    def needs_behaviour(self) -> bool:
        """Whether a term weighs by the sampler's log-probs."""
        return any(term.needs("behaviour") for term in self.losses)
