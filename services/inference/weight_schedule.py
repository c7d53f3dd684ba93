"""Which weight version the engine serves next: a pure function, so that fairness can be tested without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.inference.weights import Weights


@dataclass(frozen=True)
class ScheduleDecision:
    """Admit waiting groups of the loaded version, or load another one, or (neither) let the running ones finish."""

    admit: bool = False
    load: Weights | None = None


def next_decision(
    loaded: Weights,
    newest: Weights,
    waiting: Sequence[Weights],
    *,
    running: bool,
    running_may_switch: bool,
    turn_is_up: bool,
) -> ScheduleDecision:
    """Decide from the versions that waiting groups ask for, oldest group first.

    The loaded version is served for one turn, and longer while the oldest group asks for it. Then the running groups
    finish, and the version of the oldest group is loaded. So no group waits for ever, and versions are swapped at most
    once per turn. With no group waiting, a newly announced version is loaded as soon as no group runs.
    running_may_switch: running groups may go on under `newest`.
    """
    requested = waiting[0] if waiting else newest
    if loaded in waiting and (requested == loaded or not turn_is_up):
        return ScheduleDecision(admit=True)
    if requested == loaded or (running and not (running_may_switch and requested == newest)):
        return ScheduleDecision()
    return ScheduleDecision(load=requested)
