"""Wakes whoever waits for experience of a run when the run's counters move: one round trip for all runs waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger

log = get_logger("run_changes")

POLL_SECONDS = 0.1


class RunChanges:
    """The counters of the runs that somebody waits for, read in one thread that ends when nobody waits."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._waiting: Counter[str] = Counter()
        self._counters: dict[str, list[bytes | None]] = {}
        self._moves: Counter[str] = Counter()
        self._reader: threading.Thread | None = None

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Read this run's counters while the body runs."""
        with self._changed:
            self._waiting[run_id] += 1
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="run-changes", daemon=True)
                self._reader.start()
        try:
            yield
        finally:
            with self._changed:
                self._waiting[run_id] -= 1
                if not self._waiting[run_id]:
                    del self._waiting[run_id], self._moves[run_id]
                    self._counters.pop(run_id, None)

    def moves(self, run_id: str) -> int:
        """How often the counters of a watched run were seen to change."""
        with self._changed:
            return self._moves[run_id]

    def wait_beyond(self, run_id: str, moves: int, timeout_seconds: float) -> None:
        """Return when a watched run's counters have changed more often than this, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._moves[run_id] != moves, timeout_seconds)

    def _read(self) -> None:
        while True:
            with self._changed:
                run_ids = list(self._waiting)
                if not run_ids:
                    self._reader = None
                    return
            try:
                with self._client.pipeline(transaction=False) as pipe:
                    for run_id in run_ids:
                        pipe.hmget(redis_keys.replay_counters(run_id), ["number", "drawn", "policy_version"])
                    self._note(dict(zip(run_ids, pipe.execute(), strict=True)))
            except redis.RedisError as error:
                # Those who wait ask again by themselves, and then meet the same error.
                log.debug("cannot read the counters of runs", reason=str(error)[:200])
            time.sleep(POLL_SECONDS)

    def _note(self, read: dict[str, list[bytes | None]]) -> None:
        with self._changed:
            for run_id, counters in read.items():
                if run_id in self._waiting and self._counters.get(run_id) != counters:
                    self._counters[run_id] = counters
                    self._moves[run_id] += 1
            self._changed.notify_all()
