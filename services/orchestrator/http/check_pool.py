"""Threads of their own for checks of specs, which read files and start processes: no other request waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from spo.errors import NotReady

THREADS = 2
MOST_WAITING = 16

Answer = TypeVar("Answer")


class CheckPool:
    """Runs few checks at a time and lets few more wait; built in the event loop that it serves."""

    def __init__(self) -> None:
        self._limiter = CapacityLimiter(THREADS)
        # The limiter counts a task only once it waits, which is too late where many come at once.
        self._under_way = 0

    async def run(self, check: Callable[[], Answer]) -> Answer:
        """What the check returns. Raises NotReady (code "checks_busy") when too many wait already."""
        if self._under_way >= THREADS + MOST_WAITING:
            raise NotReady("too many specs are being checked; try again", code="checks_busy")
        self._under_way += 1
        try:
            return await anyio.to_thread.run_sync(check, limiter=self._limiter)
        finally:
            self._under_way -= 1
