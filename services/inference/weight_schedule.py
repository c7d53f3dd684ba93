"""Which weight version has the engine next: a pure decision, so that fairness can be tested without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.inference.weights import Weights


@dataclass(frozen=True)
class Turn:
    """Admit waiting groups of the loaded version, or load another one, or (neither) let the running ones finish."""

    admit: bool = False
    load: Weights | None = None


def next_turn(
    loaded: Weights,
    newest: Weights,
    waiting: Sequence[Weights],
    *,
    running: bool,
    running_may_switch: bool,
    turn_is_up: bool,
) -> Turn:
    """Decide from the versions that waiting groups want, oldest group first.

    The loaded version keeps the engine while it has work and nobody older waits for another version longer than a
    turn; then running groups finish and the oldest waiting group's version is loaded. Nothing waits for ever, and a
    version is swapped at most once per turn. With nothing waiting, a newly announced version is loaded as soon as no
    group runs. running_may_switch: running groups may go on under `newest`.
    """
    wanted = waiting[0] if waiting else newest
    if loaded in waiting and (wanted == loaded or not turn_is_up):
        return Turn(admit=True)
    if wanted == loaded or (running and not (running_may_switch and wanted == newest)):
        return Turn()
    return Turn(load=wanted)
