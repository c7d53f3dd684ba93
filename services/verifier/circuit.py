"""A service that fails time after time is left alone for a while, so that what waits for it costs nobody anything."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from services.verifier.guarded_post import BadAnswer, ServiceAway, ServiceFailed

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryRule:
    """How often something is tried, and what ends that."""

    attempts: int
    backoff_seconds: float
    failures_to_open: int
    rest_seconds: float
    most_seconds: float = 15.0

    def pause(self, attempt: int) -> float:
        """Seconds before the next attempt: twice as long each time, and never the same for all."""
        return float(min(self.most_seconds, self.backoff_seconds * 2**attempt) * random.uniform(0.5, 1.0))


@dataclass
class Circuit:
    """Of one service: closed while it works; open after failures in a row; then one call tries whether it is back."""

    patience: RetryRule
    _failures: int = field(default=0, init=False)
    _opened_at: float = field(default=0.0, init=False)
    _reason: str = field(default="", init=False)

    async def call(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask, and again after a failure. Raises what the last attempt raised, ServiceAway while it is open."""
        for attempt in range(self.patience.attempts):
            self._require_closed()
            try:
                answer = await ask()
            except (ServiceAway, ServiceFailed) as error:
                self._failed(error.message)
                if attempt + 1 == self.patience.attempts:
                    raise
            except BadAnswer:
                # It is there, and answers others as it should.
                self._failures = 0
                if attempt + 1 == self.patience.attempts:
                    raise
            else:
                self._failures = 0
                return answer
            await asyncio.sleep(self.patience.pause(attempt))
        raise AssertionError("unreachable: attempts are at least 1")

    def _require_closed(self) -> None:
        if self._failures < self.patience.failures_to_open:
            return
        left = self._opened_at + self.patience.rest_seconds - time.monotonic()
        if left > 0:
            raise ServiceAway(f"left alone for {left:.0f} s after {self._failures} failures; the last: {self._reason}")
        # Whoever comes meanwhile waits for the outcome of this one call.
        self._opened_at = time.monotonic()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._reason = reason
        self._opened_at = time.monotonic()


class Circuits:
    """One per address."""

    def __init__(self, patience: RetryRule, most: int = 1000) -> None:
        self._patience = patience
        self._most = most
        self._known: dict[str, Circuit] = {}

    def of(self, address: str) -> Circuit:
        """The circuit of an address."""
        if len(self._known) >= self._most:
            self._known.clear()
        return self._known.setdefault(address, Circuit(self._patience))
