"""The trainer, its guard, and the evaluation of what it made."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spo.spec.section import Section, Share, Temperature
from spo.spec.violations import impossible


class TrainerSpec(Section):
    """Optimiser, batch and schedule of the trainer."""

    steps: int = Field(default=100, ge=1, le=100_000_000)
    batch_size: int = Field(default=64, ge=1, le=1_000_000, description="Trajectories per step, all ranks together.")
    epochs: int = Field(default=1, ge=1, le=100, description="Passes over each batch.")
    minibatches: int = Field(default=1, ge=1, le=1000, description="Optimiser steps per pass over a batch.")
    micro_batch_size: int = Field(default=64, ge=1, le=1_000_000, description="Trajectories per forward, one rank.")
    packing: bool = Field(default=False, description="Short sequences of a forward share rows, in place of padding.")
    learning_rate: float = Field(default=4e-4, gt=0, le=1)
    adam_betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    update_interval: int = Field(default=10, ge=1, description="Steps between weight pushes to inference.")
    checkpoint_interval: int = Field(default=50, ge=1, description="Steps between checkpoints.")
    reference: Literal["cached", "in_trainer"] = "cached"


class CollapseGuardSpec(Section):
    """Alarms that precede a collapse, compared over windows of steps; what to do when one sounds."""

    policy: Literal["off", "warn", "pause"] = "warn"
    window: int = Field(default=10, ge=2, le=10_000, description="Steps that are averaged.")
    log_ratio_nats: float = Field(default=4.0, gt=0)
    grad_norm: float = Field(default=20.0, gt=0)
    response_length_factor: float = Field(default=2.0, gt=1)
    truncated_share_rise: Share = 0.1
    reward_fall: float = Field(default=0.1, gt=0)


class EvaluationSpec(Section):
    """pass@k on held-out problems (the paper: 20 samples, temperature 0.4, top-p 0.95)."""

    interval_steps: int = Field(default=20, ge=1)
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: float = Field(default=0.95, gt=0, le=1)
    ks: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 10), min_length=1)

    @model_validator(mode="after")
    def enough_samples(self) -> Self:
        if max(self.ks) > self.samples:
            raise impossible(("ks", f"pass@{max(self.ks)} needs at least {max(self.ks)} samples, not {self.samples}"))
        return self
