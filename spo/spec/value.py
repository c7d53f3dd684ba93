"""How pi0 is examined: Qhat_0 of each prompt, and pivotal tokens."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from spo.spec.section import MOST_COUNT, Section, Share, Temperature, TopP
from spo.spec.violations import impossible


class SequentialSpec(Section):
    """Sample in rounds and stop where the 95 % interval of Qhat_0 is narrow enough; `samples` stays the most.

    Qhat_0 is then a posterior mean: where the data decides when to stop, no frequency is unbiased.
    """

    interval_width: float = Field(default=0.3, gt=0, le=100, description="Target width of the interval, reward units.")
    prior: Literal["prompts", "jeffreys"] = Field(
        default="prompts",
        description="What is expected of a prompt before its samples: what the other prompts and pi0's likelihood of "
        "human solutions tell (empirical Bayes), or nothing.",
    )
    first_samples: int = Field(default=8, ge=1, le=100_000, description="Samples every prompt gets.")
    round_samples: int = Field(default=8, ge=1, le=100_000, description="Samples of each further round.")


class PivotalSpec(Section):
    """Pivotal Token Search (3.1.3): bisect correct trajectories by rollouts of pi0 from their prefixes."""

    rollouts: int = Field(default=8, ge=2, le=10_000, description="Rollouts of pi0 from each visited prefix.")
    threshold: float = Field(default=0.2, gt=0, le=1, description="Change of the success rate that is bisected.")
    trajectories_per_prompt: int = Field(default=2, ge=1, le=10_000)
    positions_per_trajectory: int = Field(default=8, ge=2, le=10_000, description="Most prefixes per trajectory.")
    budget_rollouts: int = Field(default=100_000, ge=1, le=MOST_COUNT, description="Most rollouts of the whole job.")
    when: Literal["before_training", "idle"] = "before_training"
    sources: tuple[Literal["reference", "human"], ...] = Field(
        default=("reference", "human"), min_length=1, max_length=2
    )
    keep_rollouts: bool = Field(
        default=False, description="Keep the rollouts too, as trajectories of source `reference`; rolls all out anew."
    )


class ValueSpec(Section):
    """How Qhat_0 is found for each training prompt (paper 3.1.3: 800 samples of pi0)."""

    samples: int = Field(default=32, ge=1, le=100_000, description="Samples of pi0 per prompt that count.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    extra_samples: int = Field(default=0, ge=0, le=100_000, description="Further samples, offline data only.")
    extra_temperature: tuple[Temperature, Temperature] = (0.1, 0.8)
    extra_top_p: TopP = 0.95
    sequential: SequentialSpec | None = Field(default=None, description="Stop early where enough is known.")
    unsolved: Literal["keep", "floor", "drop", "retry_hotter"] = Field(
        default="floor",
        description="Prompts with no success: floor at the paper's formula (-1), keep at the posterior mean, drop from "
        "training, or sample again hotter (offline data only; the value stays that of pi0).",
    )
    retry_temperature: Temperature = Field(default=1.4, description="Temperature of retry_hotter.")
    retry_samples: int = Field(default=64, ge=1, le=100_000)
    pivotal: PivotalSpec | None = Field(default=None, description="Search pivotal tokens in correct trajectories.")
    start: Literal["first_batch", "all"] | None = Field(
        default=None,
        description="Train once as many prompts have a value as a batch holds groups, while the others are estimated "
        "beside it and values are refined; or when all have their final value, so that a repeated job reads the same. "
        "Default: first_batch with `sequential` and a live source, where all prompts soon have a value, else all.",
    )
    start_share: Share = Field(
        default=0.0,
        description="Where training starts early: at least this share of the prompts has a value before training.",
    )

    @model_validator(mode="after")
    def range_is_ordered(self) -> Self:
        if self.extra_temperature[0] > self.extra_temperature[1]:
            raise impossible(("extra_temperature", "the range must be [low, high]"))
        return self
