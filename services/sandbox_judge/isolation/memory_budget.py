"""Lanes and memory of a judge within its pod: how many programs run at once, and that their limits together fit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from services.sandbox_judge.executor import JudgeFault, RunLimits
from services.sandbox_judge.isolation.machine import Machine
from services.sandbox_judge.isolation.memory_cgroup import OVERHEAD_BYTES
from spo.observability.logs import get_logger

log = get_logger("memory")

# What the judge itself and its idle zygotes take.
RESERVED_BYTES = 384 << 20
LANE_BYTES = RunLimits().memory_bytes + OVERHEAD_BYTES
# Longer than any program may run; lanes are freed by limits of time.
WAIT_SECONDS = 600.0


def lanes(configured: int, machine: Machine) -> int:
    """Programs run at once: as configured, or one per usable core as far as the memory of all of them fits."""
    budget = program_memory(machine)
    by_memory = machine.cores if budget is None else max(1, budget // LANE_BYTES)
    found = configured or min(machine.cores, by_memory)
    if found > by_memory:
        log.warning("lanes wait for memory: the pod's limit does not hold so many", lanes=found, fitting=by_memory)
    elif not configured and found < machine.cores:
        log.warning("fewer lanes than cores: memory is short", lanes=found, cores=machine.cores)
    return found


def program_memory(machine: Machine) -> int | None:
    """Bytes that programs may use together, None where nothing limits them."""
    return None if machine.memory_bytes is None else max(0, machine.memory_bytes - RESERVED_BYTES)


class MemoryBudget:
    """Lets programs begin as long as their limits together fit; one that alone does not fit runs alone."""

    def __init__(self, total_bytes: int | None) -> None:
        self._total = total_bytes
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, memory_bytes: int, *, waits: bool) -> Iterator[None]:
        """Take so much until the end of the block; `waits` false: at once, for whoever holds some already.

        Raises JudgeFault when nobody gives any back.
        """
        wanted = memory_bytes + OVERHEAD_BYTES
        with self._changed:
            if waits and not self._changed.wait_for(lambda: self._fits(wanted), WAIT_SECONDS):
                raise JudgeFault("no memory became free for the program; the judge's pod is too small")
            self._taken += wanted
        try:
            yield
        finally:
            with self._changed:
                self._taken -= wanted
                self._changed.notify_all()

    def _fits(self, wanted: int) -> bool:
        return self._total is None or not self._taken or self._taken + wanted <= self._total
