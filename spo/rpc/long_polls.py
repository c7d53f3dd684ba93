"""Handlers that wait for something on behalf of a client: never so many that no thread is left for quick answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spo.errors import NotReady

# Threads of a server that no long poll takes.
ANSWERING_THREADS = 64


class LongPolls:
    """The places of one server for handlers that wait; a waiting thread costs memory, no CPU."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = threading.BoundedSemaphore(places)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place while the body waits. Raises NotReady (code "too_many_waiting") at once when all are taken."""
        if not self._free.acquire(blocking=False):
            raise NotReady(f"{self._places} others already wait here; ask again soon", code="too_many_waiting")
        try:
            yield
        finally:
            self._free.release()
