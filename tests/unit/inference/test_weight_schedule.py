"""Which weight version has the engine next, played through without an engine."""

from __future__ import annotations

import math
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


def share_of_undisturbed(mode: str, mean: float, longest: int, every: float, load_seconds: float) -> float:
    """Tokens per second of an engine of an H100's pace beside one that is never given a version, on a virtual clock.

    64 groups of 8 samples with lengths drawn from a log-normal distribution, 256 places in the engine.
    """

    def rate(every: float) -> float:
        draw, places = random.Random(0), 256
        clock, next_version, turn_ends, made, loaded, newest = 0.0, every, 0.0, 0.0, 0, 0
        groups: dict[int, int] = {}
        running: list[list[float]] = []  # tokens left, its group
        started = 0
        while clock < 1500.0:
            while clock >= next_version:
                newest, next_version = newest + 1, next_version + every
            waiting = 64 - len(groups)
            versions = Weights("run", loaded, "", ()), Weights("run", newest, "", ())
            decision = next_decision(
                *versions,
                [versions[1]] * waiting,
                running=bool(running),
                running_may_switch=mode != "finish",
                turn_is_up=clock >= turn_ends,
            )
            if decision.load is not None:
                loaded = decision.load.version
                clock += load_seconds
                turn_ends = clock + max(1.0, 20 * load_seconds)
                continue
            while decision.admit and waiting and len(running) < places:
                started, waiting = started + 1, waiting - 1
                groups[started] = 8
                lengths = (draw.lognormvariate(math.log(mean) - 0.5, 1.0) for _ in range(8))
                running += [[max(1.0, min(longest, length)), started] for length in lengths]
            # Weights are read once a pass: few sequences are hardly faster than many.
            pace = 1 / (0.012 + 0.010 * min(len(running), places) / places)
            made += pace * len(running)
            clock += 1.0
            for sequence in running:
                sequence[0] -= pace
                if sequence[0] <= 0:
                    groups[int(sequence[1])] -= 1
                    if not groups[int(sequence[1])]:
                        del groups[int(sequence[1])]
            running = [sequence for sequence in running if sequence[0] > 0]
        return made / clock

    return rate(every) / rate(math.inf)


@pytest.mark.parametrize(("mean", "longest"), [(500, 1024), (2000, 8192), (4000, 16_384), (8000, 32_768)])
@pytest.mark.parametrize(("every", "load_seconds"), [(104.0, 5.0), (60.0, 2.0)])
def test_engines_that_keep_their_cache_lose_only_the_load(
    mean: float, longest: int, every: float, load_seconds: float
) -> None:
    kept = share_of_undisturbed("keep_cache", mean, longest, every, load_seconds)
    assert kept >= 0.95
    assert kept == pytest.approx(every / (every + load_seconds), abs=0.03)


def test_engines_that_finish_first_drain_at_each_version() -> None:
    assert share_of_undisturbed("finish", 8000, 32_768, 104.0, 5.0) < 0.7
