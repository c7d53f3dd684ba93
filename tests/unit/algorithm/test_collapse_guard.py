"""Each alarm sounds for its own sign, with the reason, and a healthy run is left in peace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spo.algorithm.collapse_guard import CollapseLimits, StepHealth, collapse_alarms

HEALTHY = StepHealth(
    log_ratio_nats=1.0, grad_norm=3.0, response_tokens=20.0, truncated_share=0.0, reward=-0.5, loss=0.4
)
LIMITS = CollapseLimits()


def run_that_turns(**changes: float) -> list[StepHealth]:
    return [HEALTHY] * LIMITS.window + [replace(HEALTHY, **changes)] * LIMITS.window


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"log_ratio_nats": 4.5}, "log_ratio", "4.5 nats"),
        ({"grad_norm": 25.0}, "grad_norm", "from 3.0 to 25.0"),
        ({"response_tokens": 44.0}, "response_length", "2.20 times"),
        ({"response_tokens": 8.0}, "response_length", "0.40 times"),
        ({"truncated_share": 0.3}, "truncation", "from 0% to 30%"),
        ({"reward": -0.8, "loss": 0.9}, "reward", "from -0.50 to -0.80"),
    ],
)
def test_a_sign_of_collapse_sounds_its_alarm_alone(changes: dict[str, float], name: str, said: str) -> None:
    alarms = collapse_alarms(run_that_turns(**changes), 20.0, LIMITS)
    assert list(alarms) == [name]
    assert said in alarms[name]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"log_ratio_nats": 3.9},
        {"grad_norm": 19.0},
        {"truncated_share": 0.05},
        {"reward": -0.8, "loss": 0.3},  # a falling reward with a falling loss: harder prompts, not collapse
        {"reward": -0.1, "loss": 0.9},
    ],
)
def test_a_healthy_run_is_left_in_peace(changes: dict[str, float]) -> None:
    assert collapse_alarms(run_that_turns(**changes), 20.0, LIMITS) == {}


def test_a_high_but_falling_gradient_norm_is_no_alarm() -> None:
    history = [replace(HEALTHY, grad_norm=40.0)] * 10 + [replace(HEALTHY, grad_norm=25.0)] * 10
    assert collapse_alarms(history, 20.0, LIMITS) == {}


def test_one_bad_step_is_no_alarm_and_no_window_no_verdict() -> None:
    assert collapse_alarms([*[HEALTHY] * 19, replace(HEALTHY, log_ratio_nats=20.0)], 20.0, LIMITS) == {}
    assert collapse_alarms([replace(HEALTHY, log_ratio_nats=50.0)] * 9, 20.0, LIMITS) == {}
