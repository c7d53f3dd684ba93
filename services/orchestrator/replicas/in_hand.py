"""Prompt groups that each replica of a run should have in hand: the dispatcher learns it, heartbeats say it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from services.orchestrator.replicas.registry import LiveReplica

COUNT_SECONDS = 2.0


class GroupsInHand:
    """Ready replicas by run, and the groups that the replay buffer's limiter has for each of them. Thread-safe."""

    def __init__(self, live: Callable[[], Sequence[LiveReplica]], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._groups: dict[str, int] = {}
        self._ready: tuple[float, Counter[str]] = (float("-inf"), Counter())
        self._lock = threading.Lock()

    def ready_replicas(self, run_id: str) -> int:
        """Inference replicas that serve a run, as of COUNT_SECONDS ago at most."""
        with self._lock:
            counted_at, ready = self._ready
            if self._clock() - counted_at > COUNT_SECONDS:
                ready = Counter(
                    replica.run_id
                    for replica in self._live()
                    if replica.pool == "inference" and replica.run_id and not replica.draining
                )
                self._ready = self._clock(), ready
        return ready[run_id]

    def learn(self, run_id: str, groups: int) -> None:
        """Note what the limiter has for each replica of the run; 0: no limit."""
        self._groups[run_id] = groups

    def forget(self, run_id: str) -> None:
        """The run is dispatched no more."""
        self._groups.pop(run_id, None)

    def of(self, run_id: str) -> int:
        """Groups for each replica of the run; 0: no limit is known."""
        return self._groups.get(run_id, 0)
