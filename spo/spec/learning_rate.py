"""The learning rate of a step: a linear warm-up, then constant or falling to a floor."""

from __future__ import annotations

import math

from spo.spec.training import TrainerSpec

# An adapter learns at about ten times the rate of all weights, for which 1e-6 is usual (docs/defaults.md).
LEAST_OF_ADAPTERS = 1e-5


def learning_rate_at(step: int, trainer: TrainerSpec) -> float:
    """The rate of a step, counted from 1; the paper warms up for 200 steps and stays constant."""
    if step <= trainer.warmup_steps:
        return trainer.learning_rate * step / trainer.warmup_steps
    # The first step after the warm-up has the whole rate, and the one after the last step would have the floor.
    fallen = min(1.0, (step - 1 - trainer.warmup_steps) / max(1, trainer.steps - trainer.warmup_steps))
    match trainer.learning_rate_schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - fallen
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * fallen))
    floor = trainer.learning_rate_floor
    return trainer.learning_rate * (floor + (1.0 - floor) * left)
