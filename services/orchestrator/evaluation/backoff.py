"""How long what has failed waits before it is tried again, by name; forgotten by a restart."""

from __future__ import annotations

import threading
import time

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
MOST_NAMES = 10_000


class Backoff:
    """Doubles the pause with each failure in a row; safe from several threads."""

    def __init__(self, first_seconds: float = FIRST_SECONDS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self.first_seconds = first_seconds
        self.longest_seconds = longest_seconds
        self._lock = threading.Lock()
        self._failures: dict[str, tuple[int, float]] = {}

    def is_over(self, name: str) -> bool:
        """Whether it may be tried now."""
        with self._lock:
            _, until = self._failures.get(name, (0, 0.0))
        return time.monotonic() >= until

    def fail(self, name: str) -> float:
        """Note a failure; returns the pause in seconds."""
        with self._lock:
            failures, _ = self._failures.pop(name, (0, 0.0))
            seconds = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures, 30))
            self._failures[name] = (failures + 1, time.monotonic() + seconds)
            while len(self._failures) > MOST_NAMES:
                del self._failures[next(iter(self._failures))]
        return seconds

    def clear(self, name: str) -> None:
        """Forget the failures of what worked."""
        with self._lock:
            self._failures.pop(name, None)
