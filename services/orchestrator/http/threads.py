"""Threads of their own for what nobody else may wait for: checks of specs, calls that last, and the door.

All other requests share the threads that come with the event loop. What lasts would take all of those, and then neither
a health check nor who asks could be looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from spo.errors import NotReady

# Checks of specs read files and start processes; one tenant takes at most half of the places.
CHECKS, CHECKS_WAITING = 4, 32
# Calls that last wait for a model, a judge or the store, up to minutes.
LASTING, LASTING_WAITING = 32, 32
DOOR = 8

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class BoundedThreads:
    """Runs few calls at a time and lets few more wait; built in the event loop that it serves."""

    def __init__(self, threads: int, most_waiting: int, refusal: NotReady) -> None:
        self._limiter = CapacityLimiter(threads)
        self._most = threads + most_waiting
        self._refusal = refusal
        # The limiter counts a task only once it waits, which is too late where many come at once.
        self._under_way = 0

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """What the call returns. Raises NotReady, the refusal, when too many wait already."""
        if self._under_way >= self._most:
            raise NotReady(self._refusal.message, code=self._refusal.code)
        self._under_way += 1
        try:
            return await anyio.to_thread.run_sync(call, limiter=self._limiter)
        finally:
            self._under_way -= 1


class SharedThreads:
    """Bounded threads of which one tenant takes at most half, so that its slow calls leave room for others'."""

    def __init__(self, threads: int, most_waiting: int, refusal: NotReady) -> None:
        self._all = BoundedThreads(threads, most_waiting, refusal)
        self._refusal = refusal
        self._threads_of_one = max(1, threads // 2)
        self._most_of_one = (threads + most_waiting) // 2
        self._gates: dict[str, CapacityLimiter] = {}
        self._under_way: Counter[str] = Counter()

    async def run(self, call: Callable[[], Answer], tenant: str) -> Answer:
        """What the call returns. Raises NotReady, the refusal, when too many, or too many of the tenant's, wait."""
        if self._under_way[tenant] >= self._most_of_one:
            raise NotReady(self._refusal.message, code=self._refusal.code)
        self._under_way[tenant] += 1
        try:
            async with self._gates.setdefault(tenant, CapacityLimiter(self._threads_of_one)):
                return await self._all.run(call)
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant], self._gates[tenant]


def threads_for_checks() -> SharedThreads:
    """For checks of specs."""
    return SharedThreads(
        CHECKS, CHECKS_WAITING, NotReady("too many specs are being checked; try again", code="checks_busy")
    )


def lasting_calls() -> BoundedThreads:
    """For calls that last, of the running event loop."""
    try:
        return _LASTING.get()
    except LookupError:
        refusal = NotReady("too many requests wait for models, judges or the store; try again", code="calls_busy")
        made = BoundedThreads(LASTING, LASTING_WAITING, refusal)
        _LASTING.set(made)
        return made


def lasting(endpoint: Callable[Given, Answer]) -> Callable[Given, Coroutine[Any, Any, Answer]]:
    """The endpoint as one whose calls last."""

    @wraps(endpoint)
    async def apart(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        return await lasting_calls().run(partial(endpoint, *args, **kwargs))

    return apart


async def at_the_door(call: Callable[[], Answer]) -> Answer:
    """What comes before and after every request, and says whether the platform is ready: never behind requests."""
    try:
        limiter = _DOOR.get()
    except LookupError:
        limiter = CapacityLimiter(DOOR)
        _DOOR.set(limiter)
    return await anyio.to_thread.run_sync(call, limiter=limiter)


_LASTING: RunVar[BoundedThreads] = RunVar("_LASTING")
_DOOR: RunVar[CapacityLimiter] = RunVar("_DOOR")
