"""Coroutines between the tests' process and the response's, each in the loop of its own side.

Those of the response are in one loop, which goes on for as long as the tests' side says: a turn. So they meet at their
own locks, queues and events, sleep at one time, and can be cancelled. A coroutine of the tests that the response awaits
is started in the tests' loop after the turn, and what it comes to is told before one of the next.

Few tests await anything: `asyncio` is imported when it is first needed, and not in each process of the judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from services.sandbox_judge.jail.wire import Foreign, Malformed, Uncarriable

if TYPE_CHECKING:
    import asyncio

    from services.sandbox_judge.jail.proxies import Remote

# The tests' loop stands still for so many seconds at most, all turns that are due together.
_LONGEST_TURN = 0.02
_FIRST_TURN = 0.0005


class ResponseLoop:
    """The response's side: its loop, and what in it has something to do with the tests."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[Foreign]] = {}
        self._asked: dict[int, asyncio.Future[Foreign]] = {}
        self._wanted: list[int] = []
        self._dropped: list[int] = []
        self._call: asyncio.Future[None] | None = None

    def turn(self, target: Foreign, seconds: float) -> tuple[object, ...]:
        """Go on until an awaitable is done, one of the tests' is wanted, or the time is over.

        Returns whether it is done and what it came to, and by number which of the tests' are wanted, which no longer.
        """
        import asyncio

        async def awaited() -> Foreign:
            return await target

        if id(target) not in self._tasks:
            self._tasks[id(target)] = self.loop.create_task(awaited())
        task, self._call = self._tasks[id(target)], self.loop.create_future()
        waiting = asyncio.wait([task, self._call], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.loop.run_until_complete(waiting)
        wanted, dropped = tuple(self._wanted), tuple(self._dropped)
        self._wanted.clear()
        self._dropped.clear()
        return (task.done(), task.result() if task.done() else None, wanted, dropped)

    def within(self, work: Callable[[], Foreign]) -> Foreign:
        """What a function comes to that is called while a loop runs, and may ask for it: as `create_task` does."""
        from asyncio import _get_running_loop, _set_running_loop

        if _get_running_loop() is not None:
            return work()
        _set_running_loop(self.loop)
        try:
            return work()
        finally:
            _set_running_loop(None)

    def cancel(self, target: object) -> None:
        """Cancel it; what comes of that is seen at its next turn."""
        self._tasks[id(target)].cancel()

    async def tests_own(self, number: int) -> Foreign:
        """What a coroutine of the tests comes to."""
        import asyncio

        future = self._asked[number] = self.loop.create_future()
        self._wanted.append(number)
        if self._call is not None and not self._call.done():
            self._call.set_result(None)
        try:
            return await future
        except asyncio.CancelledError:
            self._dropped.append(number)
            raise

    def settle(self, number: int, outcome: str, value: Foreign) -> None:
        """A coroutine of the tests has come to this."""
        future = self._asked.pop(number)
        if not future.done():
            (future.set_result if outcome == "return" else future.set_exception)(value)


class TestsCoroutines:
    """The tests' side: who waits there for the response, and their own coroutines that it awaits."""

    def __init__(self, sender: Remote) -> None:
        self._sender = sender
        self._waiting = 0
        self._started: dict[int, asyncio.Task[None]] = {}

    async def awaited(self, target: object) -> Foreign:
        """What an awaitable of the response comes to."""
        import asyncio

        self._waiting += 1
        longest, is_cancelled = 0.0, False
        try:
            while not (turn := self._turn(target, longest / self._waiting))[0]:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    is_cancelled = True
                    self._sender.request("cancel", target)
                longest = min(2 * longest + _FIRST_TURN, _LONGEST_TURN)
            return turn[1]
        except asyncio.CancelledError as error:
            if is_cancelled or "CancelledError" in self._sender.source.code:
                raise
            # Whoever runs many coroutines takes no notice of one that is cancelled.
            raise RuntimeError("the response is cancelled, and not by its tests") from error
        except BaseException as error:
            # The response has let it through.
            self._sender.untried[:] = [each for each in self._sender.untried if each is not error]
            raise
        finally:
            self._waiting -= 1

    async def next_of(self, iterator: object) -> Foreign:
        """The next of an asynchronous iterator of the response. Raises StopAsyncIteration behind the last."""
        self._sender.count_draw()
        try:
            return await self._sender.request("dunder", "__anext__", iterator, ())
        except RuntimeError as error:
            if isinstance(error.__cause__, StopAsyncIteration):
                raise error.__cause__ from None
            raise

    async def left(self, context: object, kind: object, error: object) -> Foreign:
        """Whether an asynchronous context of the response has caught what ended it."""
        self._sender.saw(error)
        if is_caught := await self._sender.request("dunder", "__aexit__", context, (kind, error, None)):
            self._sender.swallowed(error)
        return is_caught

    def _turn(self, target: object, seconds: float) -> tuple[Foreign, ...]:
        import asyncio

        turn = self._sender.request("turn", target, seconds)
        if type(turn) is not tuple or len(turn) != 4 or type(turn[0]) is not bool:
            raise Malformed("no turn")
        is_done, _, wanted, dropped = turn
        for number in wanted:
            coroutine = self._sender.handed("await", number)
            if number not in self._started and not is_done:
                self._started[number] = asyncio.ensure_future(self._settle(number, coroutine))
        for number in dropped:
            if number in self._started:
                self._started[number].cancel()
        return turn

    async def _settle(self, number: int, coroutine: Foreign) -> None:
        try:
            outcome, value = "return", await coroutine
        except Exception as error:
            self._sender.saw(error)
            if self._sender.source.is_missed(error):
                self._sender.untried.append(error)
            outcome, value = "raise", error
        try:
            self._sender.request("settle", number, outcome, value)
        except Uncarriable as error:
            self._sender.request("settle", number, "raise", error)


def running_loop() -> object:
    """The loop that runs in this thread; None where none does, as where nobody has imported asyncio."""
    asyncio: Foreign = sys.modules.get("asyncio")
    return asyncio._get_running_loop() if asyncio is not None else None


def run_apart(coroutine: Coroutine[Foreign, Foreign, Foreign]) -> Foreign:
    """What a coroutine of the tests comes to that the response runs by itself: in a thread, since this one may be in a
    loop that waits for it."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
