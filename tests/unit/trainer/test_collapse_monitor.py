"""The trainer's guard: one word per alarm, silence where nothing is known, a fresh start after a pause."""

from __future__ import annotations

import pytest

from services.trainer.batches import CollapseMonitor
from spo.spec.job_spec import CollapseGuardSpec

HEALTHY = {
    "log_ratio/online": 1.0,
    "grad_norm": 2.0,
    "response_length/online": 20.0,
    "truncated/online": 0.0,
    "reward/online": -0.5,
    "loss": 0.3,
}
COLLAPSING = HEALTHY | {"log_ratio/online": 9.0, "response_length/online": 44.0}


def watched(guard: CollapseMonitor, steps: list[dict[str, float]]) -> dict[int, dict[str, str]]:
    """Alarms by the step with which they began."""
    found = {step: guard.check(step, metrics) for step, metrics in enumerate(steps, start=1)}
    return {step: alarms for step, alarms in found.items() if alarms}


def test_an_alarm_is_told_once_when_it_begins_and_again_after_it_was_over() -> None:
    steps = [HEALTHY] * 4 + [COLLAPSING] * 4 + [HEALTHY] * 4 + [COLLAPSING] * 4
    heard = watched(CollapseMonitor(CollapseGuardSpec(window=2)), steps)
    assert {step: sorted(alarms) for step, alarms in heard.items()} == {
        5: ["log_ratio"],
        6: ["response_length"],
        13: ["log_ratio"],
        14: ["response_length"],
    }
    assert heard[5]["log_ratio"].startswith("the policy gives the batch 5.0 nats more than pi0")


def test_switched_off_it_says_nothing() -> None:
    assert watched(CollapseMonitor(CollapseGuardSpec(policy="off", window=2)), [COLLAPSING] * 10) == {}


def test_without_online_trajectories_only_the_gradient_can_alarm() -> None:
    bare = {"grad_norm": 2.0, "loss": 0.3, "log_ratio": 30.0}
    steps = [bare] * 4 + [bare | {"grad_norm": 60.0}] * 2
    assert {
        step: list(alarms) for step, alarms in watched(CollapseMonitor(CollapseGuardSpec(window=2)), steps).items()
    } == {5: ["grad_norm"]}


def test_after_a_pause_it_needs_a_whole_window_before_it_alarms_again() -> None:
    guard = CollapseMonitor(CollapseGuardSpec(policy="pause", window=3))
    assert guard.pauses
    assert list(watched(guard, [COLLAPSING] * 3)) == [3]
    guard.rearm()
    assert watched(guard, [COLLAPSING] * 2) == {}
    assert list(guard.check(6, COLLAPSING)) == ["log_ratio"]


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_only_the_policy_pause_pauses(policy: str) -> None:
    assert not CollapseMonitor(CollapseGuardSpec.model_validate({"policy": policy})).pauses
