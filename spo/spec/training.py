"""The trainer, its guard, and the evaluation of what it made."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spo.spec.section import MOST_COUNT, Section, Share, Temperature, TopP
from spo.spec.violations import impossible


class TrainerSpec(Section):
    """Optimiser, batch and schedule of the trainer."""

    steps: int = Field(
        default=500,
        ge=0,
        le=100_000_000,
        description="0: nothing is trained; the job ends when its prompts have values, as `spo tasks probe` does.",
    )
    batch_size: int = Field(default=128, ge=1, le=1_000_000, description="Trajectories per step, all ranks together.")
    epochs: int = Field(default=1, ge=1, le=100, description="Passes over each batch.")
    minibatches: int = Field(default=1, ge=1, le=1000, description="Optimiser steps per pass over a batch.")
    max_tokens_per_micro_batch: int = Field(
        default=16_384,
        ge=1,
        le=MOST_COUNT,
        description="Tokens of one forward on one rank, padding included; a longer trajectory is a forward of its own.",
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Most trajectories of one forward; by default only tokens count."
    )
    packing: bool = Field(
        default=True, description="No padding in a forward, where that is right for the model; value-estimation alike."
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Layers run twice instead of keeping what they computed; by default from 50 million parameters on.",
    )
    learning_rate: float = Field(
        default=1e-6, gt=0, le=1, description="Of all weights; an adapter wants ten times as much."
    )
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the rate falls after the warm-up, until the last step."
    )
    learning_rate_floor: Share = Field(default=0.0, description="Share of the rate that a falling one ends at.")
    scale_rate_by_effective_samples: bool = Field(
        default=False,
        description="Times the root of the effective sample share of the importance weights ln pi / pi_sampler.",
    )
    adam_betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Of matrices; norms and biases have none.")
    warmup_steps: int = Field(default=10, ge=0, le=MOST_COUNT)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6)
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        default="none",
        description="What the CPU's memory holds in place of the device's: master weights and moments (stage 1 to 3), "
        "or parameters too (stage 3).",
    )
    update_interval: int = Field(
        default=10, ge=1, le=MOST_COUNT, description="Steps between weight pushes to inference."
    )
    checkpoint_interval: int = Field(default=50, ge=1, le=MOST_COUNT, description="Steps between checkpoints.")
    reference: Literal["cached", "in_trainer"] = "cached"


class CollapseGuardSpec(Section):
    """Alarms that precede a collapse, compared over windows of steps; what to do when one sounds."""

    policy: Literal["off", "warn", "pause"] = "warn"
    window: int = Field(default=10, ge=2, le=10_000, description="Steps that are averaged.")
    log_ratio_nats: float = Field(default=4.0, gt=0, le=1e6)
    grad_norm: float = Field(default=20.0, gt=0, le=1e9)
    response_length_factor: float = Field(default=2.0, gt=1, le=1e6)
    truncated_share_rise: Share = 0.1
    reward_fall: float = Field(default=0.1, gt=0, le=1e6)


class EvaluationSpec(Section):
    """pass@k on held-out problems (the paper: 20 samples, temperature 0.4, top-p 0.95)."""

    interval_steps: int = Field(default=20, ge=1, le=MOST_COUNT)
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    ks: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(default=(1, 10), min_length=1, max_length=64)

    @model_validator(mode="after")
    def enough_samples(self) -> Self:
        if max(self.ks) > self.samples:
            raise impossible(("ks", f"pass@{max(self.ks)} needs at least {max(self.ks)} samples, not {self.samples}"))
        return self
