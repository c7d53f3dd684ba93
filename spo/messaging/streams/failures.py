"""What becomes of an entry whose handling failed, and how a failure that lasts is told: to the log, and to the job.

InvalidInput                        dead letter: nobody will ever be able to handle it
NotFound with code unknown_run      dropped: its run is deleted
anything else                       tried again, for ever: somebody is away, full, broken or being repaired
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass
from enum import StrEnum

import redis

from spo import redis_keys
from spo.errors import InvalidInput, NotFound, SpoError
from spo.messaging.connection import refuses_writes
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.scripts import NOTE_TROUBLE
from spo.observability.logs import get_logger

log = get_logger("streams")

SAY_SECONDS = 30.0
# A trouble that was not repeated for so long is over.
TROUBLE_SECONDS = 60.0
NOTE_SECONDS = 5.0
MAX_REASON = 500


class Fate(StrEnum):
    """What becomes of an entry whose handling failed."""

    DEAD_LETTER = "dead letter"
    DROP = "drop"
    RETRY = "retry"


def fate_of(error: Exception) -> Fate:
    """What becomes of an entry after this error of its handler."""
    if isinstance(error, InvalidInput):
        return Fate.DEAD_LETTER
    if isinstance(error, NotFound) and error.code == "unknown_run":
        return Fate.DROP
    return Fate.RETRY


def reason_of(error: Exception) -> str:
    """An error as people read it: one line, not too long."""
    text = str(error) if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_REASON]


class Outage:
    """A failure that lasts: one line when it begins, one each SAY_SECONDS with a count, one when it is over."""

    def __init__(self, what: str, **facts: str) -> None:
        self.what = what
        self.facts = facts
        self._lock = threading.Lock()
        self._reason = ""
        self._failures = 0
        self._began = self._said = self._failed = 0.0

    @property
    def reason(self) -> str:
        """Why, while it lasts; else ""."""
        return self._reason

    def failed(self, error: Exception) -> None:
        """Note a failure. Only one that nobody foresaw shows where it came from, and once."""
        now = time.monotonic()
        with self._lock:
            self._failed = now
            begins = not self._reason
            self._reason = reason_of(error)
            if begins:
                self._began = self._said = now
                self._failures = 0
            self._failures += 1
            failures, due = self._failures, now - self._said >= SAY_SECONDS
            if due:
                self._said = now
        if begins and not isinstance(error, SpoError | redis.RedisError):
            log.exception(self.what, **self.facts, reason=self._reason, exc_info=error)
        elif begins:
            log.warning(self.what, **self.facts, reason=self._reason)
        elif due:
            lasted = round(now - self._began)
            log.warning(
                f"{self.what}, still", **self.facts, reason=self._reason, failures=failures, lasted_seconds=lasted
            )

    def over(self, begun: float = math.inf) -> None:
        """Say that it is over, where it was one: something worked that was begun then, in monotonic seconds.

        What was under way at the last failure, in another thread, says nothing.
        """
        if not self._reason or begun < self._failed:
            return
        with self._lock:
            was, self._reason = self._reason, ""
        if was:
            lasted = round(time.monotonic() - self._began, 1)
            log.info(f"{self.what}: over", **self.facts, failures=self._failures, lasted_seconds=lasted)


@dataclass(frozen=True)
class Trouble:
    """What keeps a run's work from being handled at a place: a stream, or a service of the platform."""

    place: str
    reason: str
    since_unix_ms: int
    at_unix_ms: int


class TroubleNotes:
    """Writes down why a run waits, so that its job can say so; each place at most every NOTE_SECONDS."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._noted: dict[tuple[str, str], float] = {}

    def note(self, run_id: str, place: str, reason: str) -> None:
        """Note it; the notes of a run vanish when they are not repeated."""
        now = time.monotonic()
        if not run_id or now - self._noted.get((run_id, place), float("-inf")) < NOTE_SECONDS:
            return
        if len(self._noted) > 1000:
            self._noted.clear()
        self._noted[run_id, place] = now
        try:
            keys = redis_keys.run_troubles(run_id), redis_keys.run_spec(run_id)
            self.client.eval(NOTE_TROUBLE, len(keys), *keys, place, reason[:MAX_REASON], int(TROUBLE_SECONDS * 1000))
        except redis.RedisError as error:
            # Said in the log already; a server that is full is told by the orchestrator's own alarm.
            log.warning("a wait reason was not noted", run=run_id, reason=str(error), full=refuses_writes(error))


def troubles_of(client: RedisClient, run_id: str, now_unix_ms: int) -> list[Trouble]:
    """What keeps the run waiting right now, by place."""
    found = []
    for place, raw in sorted(client.hgetall(redis_keys.run_troubles(run_id)).items()):
        trouble = Trouble(place.decode(), **json.loads(raw))
        if now_unix_ms - trouble.at_unix_ms <= TROUBLE_SECONDS * 1000:
            found.append(trouble)
    return found
