"""Fairness between the runs that share a stream: the entries of each run wait, are handled and fail by themselves.

One thread reads; each run has a lane of entries in this process and threads of its own to handle them. What does not
fit into a full lane is given back, so that a run with ten thousand entries hides no other's ten, and taken back by its
id once there is room, unless another replica has it by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from spo.errors import NotFound
from spo.messaging.streams.consumer import Consumer
from spo.messaging.streams.delivery import Handler, deliver
from spo.messaging.streams.entries import Entry
from spo.observability.logs import get_logger

log = get_logger("streams")

# Runs that are handled at a time; more take turns.
MAX_LANES = 16
# How much of one run waits in this process: so many calls of the handler per thread, and so many bytes. More would
# only be memory, and keep it from other replicas.
CALLS_AHEAD = 4
LANE_BYTES = 32 << 20
# Ids of entries of one run that were given back.
MAX_GIVEN_BACK = 20_000
READ_ENTRIES = 64
RETRY_SECONDS = 1.0


@dataclass(eq=False)
class RunLane:
    """Entries of one run that wait here, those that were given back, and how many threads work on others of it."""

    most: int
    waiting: deque[Entry] = field(default_factory=deque)
    waiting_bytes: int = 0
    given_back: dict[str, None] = field(default_factory=dict)
    threads: int = 0

    @property
    def room(self) -> int:
        """How many more entries may wait here."""
        return 0 if self.waiting_bytes >= LANE_BYTES else max(0, self.most - len(self.waiting))

    def add(self, entry: Entry) -> None:
        self.waiting.append(entry)
        self.waiting_bytes += len(entry.payload)
        self.given_back.pop(entry.entry_id, None)

    def take(self, count: int) -> list[Entry]:
        """The oldest entries, at most so many."""
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.waiting_bytes -= sum(len(entry.payload) for entry in taken)
        return taken

    def wanted_back(self) -> list[str]:
        """Ids of the oldest entries given back that there is room for; they count as given back no more."""
        ids = list(self.given_back)[: self.room] if len(self.waiting) <= self.most // 2 else []
        for entry_id in ids:
            del self.given_back[entry_id]
        return ids


class RunLanes:
    """Feeds the entries of a shared stream to a handler as `consume` does, by run: `threads` of each run at a time.

    A call of the handler gets at most `count` entries, all of one run; calls come from several threads.
    """

    def __init__(self, consumer: Consumer, handler: Handler, *, threads: int = 1, count: int = 1) -> None:
        self.consumer = consumer
        self.handler = handler
        self.threads = threads
        self.count = count
        self._lock = threading.Lock()
        self._lanes: dict[str, RunLane] = {}
        self._held: dict[str, Entry] = {}

    def run(self, stop: threading.Event) -> None:
        """Read and handle until stop, then finish what is being handled and give back what waits."""
        stopped = threading.Event()
        alive = threading.Thread(target=self._keep_alive, args=(stopped,), name="lanes-alive", daemon=True)
        alive.start()
        try:
            with ThreadPoolExecutor(MAX_LANES * self.threads, thread_name_prefix="lane") as pool:
                while not stop.is_set():
                    self._read(pool, stop)
                self._give_back()
        finally:
            stopped.set()
            alive.join()

    def _read(self, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        try:
            entries = self.consumer.read(max(self.count, READ_ENTRIES))
            if entries and entries[0].alone:
                self._hold(entries)
                self._deliver(entries)
                return
            full = [entry for entry in entries if not self._queue(entry, pool, stop)]
            # Whoever finds them silent for long enough may have them.
            self.consumer.release(full, after_seconds=self.consumer.reclaim_after_seconds)
            self._note_given_back(full)
        except (redis.RedisError, NotFound):
            # The consumer has said what it was.
            stop.wait(RETRY_SECONDS)

    def _queue(self, entry: Entry, pool: ThreadPoolExecutor, stop: threading.Event) -> bool:
        """Let an entry wait in its lane; False when that is full."""
        with self._lock:
            lane = self._lanes.setdefault(entry.run_id, RunLane(CALLS_AHEAD * self.threads * self.count))
            if not lane.room:
                return False
            # One that comes again after a failure of its delivery is held already.
            self._held[entry.entry_id] = entry
            lane.add(entry)
            if lane.threads < self.threads:
                lane.threads += 1
                pool.submit(self._work, entry.run_id, pool, stop)
        return True

    def _note_given_back(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                lane = self._lanes.get(entry.run_id)
                if lane and len(lane.given_back) < MAX_GIVEN_BACK:
                    lane.given_back[entry.entry_id] = None

    def _work(self, run_id: str, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Handle some entries of a run, and queue up for more behind the other runs."""
        entries = self._take(run_id, stop)
        if entries:
            self._deliver(entries)
        with self._lock:
            lane = self._lanes[run_id]
            if (entries or lane.waiting or lane.given_back) and not stop.is_set():
                with suppress(RuntimeError):
                    # Else the pool is closed: the process stops, and what waits is given back.
                    pool.submit(self._work, run_id, pool, stop)
                    return
            lane.threads -= 1
            if not lane.threads and not lane.waiting:
                del self._lanes[run_id]

    def _take(self, run_id: str, stop: threading.Event) -> list[Entry]:
        """The next entries of a run; a lane that runs empty is filled with what was given back."""
        with self._lock:
            lane = self._lanes[run_id]
            ids = [] if stop.is_set() else lane.wanted_back()
        try:
            found = self.consumer.take_back(ids)
        except redis.RedisError:
            # They come by themselves, later.
            found = []
        with self._lock:
            for entry in found:
                self._held[entry.entry_id] = entry
                lane.add(entry)
            return [] if stop.is_set() else lane.take(self.count)

    def _hold(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._held.update({entry.entry_id: entry for entry in entries})

    def _deliver(self, entries: Sequence[Entry]) -> None:
        try:
            deliver(self.consumer, self.handler, entries)
        except redis.RedisError as error:
            self.consumer.interrupted(entries, error)
        except Exception:
            # `deliver` lets errors decide on entries; this one is its own.
            log.exception("entries were not delivered", stream=self.consumer.stream)
        finally:
            with self._lock:
                for entry in entries:
                    self._held.pop(entry.entry_id, None)

    def _give_back(self) -> None:
        with self._lock:
            waiting = [entry for lane in self._lanes.values() for entry in lane.take(len(lane.waiting))]
            for entry in waiting:
                self._held.pop(entry.entry_id, None)
        try:
            self.consumer.release(waiting)
        except redis.RedisError as error:
            log.warning("entries were not given back; others take them over later", reason=str(error))

    def _keep_alive(self, stopped: threading.Event) -> None:
        while not stopped.wait(self.consumer.reclaim_after_seconds / 4):
            with self._lock:
                held = list(self._held.values())
            try:
                self.consumer.keep_alive(held)
            except redis.RedisError as error:
                log.warning("keep-alive failed; will try again", stream=self.consumer.stream, reason=str(error))
