"""This process as a holder of entries: whether it has shown that it works, and who of its threads must be by itself."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from spo.messaging.streams.failures import Outage

WAIT_SECONDS = 1.0


class HoldsEntries(Protocol):
    """A consumer, as its process knows it."""

    def give_back(self) -> None: ...


@dataclass(eq=False)
class StreamHolder:
    """What the consumers of one process share.

    proven: an entry was finished since the process started. A replica that dies whatever it takes never gets there, and
    its deaths say little about what it held.
    """

    proven: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _busy: int = field(default=0, init=False)
    _lone: bool = field(default=False, init=False)
    _reading: dict[str, Outage] = field(default_factory=dict, init=False)
    _handling: dict[str, Outage] = field(default_factory=dict, init=False)
    _consumers: weakref.WeakSet[HoldsEntries] = field(default_factory=weakref.WeakSet, init=False)

    def joined_by(self, consumer: HoldsEntries) -> None:
        """A consumer of this process."""
        with self._changed:
            self._consumers.add(consumer)

    def give_back(self) -> None:
        """The process was asked to stop, and ends with entries in hand: that is no death of theirs."""
        with self._changed:
            consumers = list(self._consumers)
        for consumer in consumers:
            consumer.give_back()

    @contextmanager
    def among_others(self) -> Iterator[None]:
        """Handle entries beside those of other threads; waits while one must be handled alone."""
        with self._changed:
            while self._lone:
                self._changed.wait(WAIT_SECONDS)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, while_waiting: Callable[[], object]) -> Iterator[None]:
        """Handle one entry while no other thread handles any; `while_waiting` is called until that is so."""
        with self._changed:
            while self._lone:
                self._changed.wait(WAIT_SECONDS)
                while_waiting()
            self._lone = True
        try:
            while not self._is_idle():
                while_waiting()
            yield
        finally:
            with self._changed:
                self._lone = False
                self._changed.notify_all()

    def reading(self, stream: str) -> Outage:
        """The trouble of reading a stream, the same for all threads that read it."""
        with self._changed:
            return self._reading.setdefault(stream, Outage("a stream cannot be read", stream=stream))

    def handling(self, stream: str) -> Outage:
        """The trouble of handling entries of a stream, the same for all threads that do."""
        with self._changed:
            return self._handling.setdefault(stream, Outage("entries cannot be handled", stream=stream))

    def obstacle(self) -> str:
        """Why some stream of this process cannot be read; "" when all can."""
        with self._changed:
            reasons = ((name, outage.reason) for name, outage in self._reading.items())
            return next((f"cannot read {name}: {reason}" for name, reason in reasons if reason), "")

    def forget(self, stream: str) -> None:
        """The process reads the stream no more."""
        with self._changed:
            self._reading.pop(stream, None)
            self._handling.pop(stream, None)

    def _is_idle(self) -> bool:
        with self._changed:
            return not self._busy or self._changed.wait_for(lambda: not self._busy, WAIT_SECONDS)


THIS_PROCESS = StreamHolder()
