"""Completions under way, those that wait for a replica among them: what serving asks of the pool."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class ServingTraffic:
    """Counted in this process, since one orchestrator leads. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._most: Counter[str] = Counter()

    @contextmanager
    def completion(self, run_id: str) -> Iterator[None]:
        """Count a completion of a run while the body runs."""
        with self._lock:
            self._under_way[run_id] += 1
            self._most[run_id] = max(self._most[run_id], self._under_way[run_id])
        try:
            yield
        finally:
            with self._lock:
                self._under_way[run_id] -= 1
                if not self._under_way[run_id]:
                    del self._under_way[run_id]

    def take_most(self) -> Mapping[str, int]:
        """By run the most completions at once since this was asked last."""
        with self._lock:
            most, self._most = self._most, Counter(self._under_way)
            return most
