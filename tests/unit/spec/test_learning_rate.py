"""Learning rates step by step, beside transformers' own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from spo.spec.section import TrainerSpec, learning_rate_at

STEPS, WARMUP = 100, 10


@pytest.mark.parametrize(
    ("schedule", "floor", "theirs", "options"),
    [
        ("constant", 0.0, "constant_with_warmup", {}),
        ("linear", 0.0, "linear", {}),
        ("cosine", 0.0, "cosine", {}),
        ("cosine", 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_after_the_warm_up_the_rates_are_those_of_transformers(
    schedule: Any, floor: float, theirs: str, options: dict[str, float]
) -> None:
    spec = TrainerSpec(
        steps=STEPS, warmup_steps=WARMUP, learning_rate_schedule=schedule, learning_rate_floor=floor, learning_rate=1.0
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(theirs, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=options)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    found = [learning_rate_at(step, spec) for step in range(1, STEPS + 1)]

    assert found[WARMUP:] == pytest.approx(expected[WARMUP:], abs=1e-9)
    assert found[:WARMUP] == pytest.approx([step / WARMUP for step in range(1, WARMUP + 1)])


def test_without_a_warm_up_the_first_step_has_the_whole_rate_and_a_longer_run_stays_at_the_floor() -> None:
    spec = TrainerSpec(
        steps=4, warmup_steps=0, learning_rate_schedule="linear", learning_rate_floor=0.2, learning_rate=0.5
    )
    assert [learning_rate_at(step, spec) for step in (1, 3, 5, 50)] == pytest.approx([0.5, 0.3, 0.1, 0.1])
