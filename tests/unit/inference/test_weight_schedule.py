"""Which weight version has the engine next, played through without an engine."""

from __future__ import annotations

import random

import pytest

from services.inference.engine_thread import ScheduleDecision, next_decision
from services.inference.weights import Weights

OLD, NEW, OTHER = (Weights("run", version, "", ()) for version in (1, 2, 3))


@pytest.mark.parametrize(
    ("waiting", "running", "turn_is_up", "expected"),
    [
        ([], False, True, ScheduleDecision()),
        ([OLD], False, True, ScheduleDecision(admit=True)),
        ([OLD], True, True, ScheduleDecision(admit=True)),
        ([NEW], False, False, ScheduleDecision(load=NEW)),
        ([NEW], True, True, ScheduleDecision()),
        ([NEW, OLD], True, False, ScheduleDecision(admit=True)),
        ([NEW, OLD], True, True, ScheduleDecision()),
        ([NEW, OLD], False, True, ScheduleDecision(load=NEW)),
        ([OLD, NEW], True, True, ScheduleDecision(admit=True)),
    ],
)
def test_the_loaded_version_goes_on_until_its_turn_is_up_and_another_waits(
    waiting: list[Weights], running: bool, turn_is_up: bool, expected: ScheduleDecision
) -> None:
    decision = next_decision(OLD, OLD, waiting, running=running, running_may_switch=False, turn_is_up=turn_is_up)
    assert decision == expected


def test_an_announced_version_is_loaded_as_soon_as_nothing_runs() -> None:
    assert next_decision(OLD, NEW, [], running=True, running_may_switch=False, turn_is_up=True) == ScheduleDecision()
    assert next_decision(OLD, NEW, [], running=False, running_may_switch=False, turn_is_up=False) == ScheduleDecision(
        load=NEW
    )


def test_running_groups_switch_only_to_the_newest_version_and_only_when_they_may() -> None:
    assert next_decision(OLD, NEW, [], running=True, running_may_switch=True, turn_is_up=False) == ScheduleDecision(
        load=NEW
    )
    assert (
        next_decision(OLD, NEW, [OTHER], running=True, running_may_switch=True, turn_is_up=True) == ScheduleDecision()
    )


def test_every_group_is_served_whatever_the_order_of_versions() -> None:
    """A small engine in the test: each tick finishes what runs; a turn lasts three ticks."""
    rng = random.Random(0)
    for _ in range(200):
        waiting = [rng.choice([OLD, NEW, OTHER]) for _ in range(rng.randrange(1, 30))]
        loaded, running, ticks_left, loads = OLD, 0, 3, 0
        total = len(waiting)
        for _ in range(10 * total):
            decision = next_decision(
                loaded, OLD, waiting, running=running > 0, running_may_switch=False, turn_is_up=ticks_left <= 0
            )
            if decision.load:
                assert running == 0
                loaded, ticks_left, loads = decision.load, 3, loads + 1
            elif decision.admit:
                waiting.remove(loaded)
                running += 1
            else:
                running = 0
            ticks_left -= 1
            if not waiting and not running:
                break
        assert not waiting
        # Not one load per group: groups of a version are served together.
        assert loads <= total
