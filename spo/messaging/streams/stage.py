"""The stage of a pipeline: a member of a consumer group reads entries, hands them to a handler, each run in a lane
of its own, and forwards or finishes them. `StageRunner` is the one loop that does so, of every service.

Fairness between the runs that share a stream: the entries of each run wait, are handled and fail separately. One
thread reads; each run has a lane, a queue of entries in this process, and threads that handle them. Threads belong to
a tenant: a tenant whose threads all block delays no other tenant, however many runs it has. An entry that does not fit
into a full lane is released, so that a run with ten thousand entries does not hide the ten of another run. It is
claimed again by its id once there is room, unless another replica has claimed it by then.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import cast

import redis

from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient, unless_away
from spo.messaging.run_specs import RunTenants
from spo.messaging.streams import entries as entries_module, recovery
from spo.messaging.streams.entries import Entry, entry_of, raw_entries
from spo.messaging.streams.recovery import (
    ENTRY_DEATHS,
    SAY_SECONDS,
    THIS_PROCESS,
    Fate,
    StreamHolder,
    TroubleNotes,
    fate_of,
    reason_of,
)
from spo.observability import get_logger

log = get_logger("streams")

# The death of a holder that has finished other entries before; of one that never finished anything it is 1.
PROVEN_WEIGHT = 10
MAX_BACKOFF_SECONDS = 30.0
SCANS_PER_READ = 20
TIDY_SECONDS = 60.0
# A member that holds nothing and has not read for this long is removed; if it comes back, it is a member again.
SILENT_SECONDS = 600.0
MAX_REMEMBERED_FAILURES = 10_000
# Redis' clock is not followed more closely; it must be more than an answer of Redis takes.
LEAST_STEP_MS = 1000

# An entry's id, its fields one after the other, and which delivery this is.
RawDelivery = tuple[bytes, list[bytes], int]

Handler = Callable[[list[Entry]], None]

# After this many consecutive failures of entries on their own, the entries are not the cause.
OUTAGE_AFTER_FAILURES = 3

# Runs of one tenant that are handled at a time; more take turns. They may hold its threads as long as they take.
MAX_LANES = 16
# Tenants that have threads of their own, made when they are needed; more share these.
MOST_TENANTS = 8
# How much of one run waits in this process: so many calls of the handler per thread, and so many bytes. More would
# only be memory, and keep it from other replicas.
CALLS_AHEAD = 2
LANE_BYTES = 32 << 20
# Ids of entries of one run that were released.
MAX_GIVEN_BACK = 20_000
READ_ENTRIES = 64
RETRY_SECONDS = 1.0


@dataclass(eq=False)
class Consumer:
    """One member of a consumer group.

    reclaim_after_seconds must exceed the longest time that an entry may take: after it, another consumer claims the
    entries of a silent one. `keep_alive` resets that clock for entries that are still worked on.

    run_id: of a stream that belongs to one run; the stream of a deleted run is not created again.
    """

    client: RedisClient
    stream: str
    group: str
    name: str
    reclaim_after_seconds: float = 60.0
    run_id: str = ""
    holder: StreamHolder = THIS_PROCESS
    tidy_seconds: float = TIDY_SECONDS
    silent_seconds: float = SILENT_SECONDS
    _ready: bool = field(default=False, init=False)
    _next_reclaim: float = field(default=0.0, init=False)
    _next_tidy: float = field(default=0.0, init=False)
    _cursor: str = field(default="0-0", init=False)
    # Redis' time in ms at the last look, and when that was.
    _clock: tuple[int, float] = field(default=(0, 0.0), init=False)
    _unsure: bool = field(default=False, init=False)
    # How many entries were finished here.
    done: int = field(default=0, init=False)
    _held: set[str] = field(default_factory=set, init=False)
    # Entries whose handling failed alone -> how often: they go alone again, and each time later.
    _failures: dict[str, int] = field(default_factory=dict, init=False)
    _left: list[Entry] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._notes = TroubleNotes(self.client)
        recovery.show_none(self.stream)
        self._reading = self.holder.reading(self.stream)
        self._handling = self.holder.handling(self.stream)
        self.holder.joined_by(self)
        self._next_tidy = time.monotonic() + self.tidy_seconds / 2

    # --- reading ---

    def read(self, count: int, block_seconds: float = 1.0) -> list[Entry]:
        """Return up to count entries, reclaimed ones first; waits at most block_seconds for new ones.

        An entry that must be handled alone is returned alone; pass it to `begin_alone` before handling starts. An entry
        that this process still handles is not returned twice, even if it seemed silent after an outage. A stream or
        group that vanished is created again. Raises redis.RedisError when the stream cannot be read, NotFound
        (unknown_run) when its run is deleted.
        """
        begun = time.monotonic()
        try:
            entries = self._read_patiently(count, block_seconds)
        except redis.RedisError as error:
            self._ready = False
            self._reading.failed(error)
            raise
        self._reading.over(begun)
        entries = [entry for entry in entries if entry.entry_id not in self._held]
        self._held.update(entry.entry_id for entry in entries)
        return entries

    def _read_patiently(self, count: int, block_seconds: float) -> list[Entry]:
        try:
            return self._read(count, block_seconds)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            log.warning("a stream had lost its group; it is made again", stream=self.stream, group=self.group)
            self._ready = False
            return self._read(count, block_seconds)

    def _read(self, count: int, block_seconds: float) -> list[Entry]:
        self._release_left()
        self._ensure_group()
        self._remove_silent()
        # A holder that has yet to show that it works begins with what nobody died of.
        first = [] if self.holder.proven else self._new(count, min(block_seconds, 0.1))
        return first or self._reclaim(count) or self._wait(count, block_seconds)

    def _wait(self, count: int, block_seconds: float) -> list[Entry]:
        """New entries; after a look that was not sure of the clock, those of silent consumers once it can be."""
        if not self._unsure:
            return self._new(count, block_seconds)
        pause = min(block_seconds, max(0.0, self._next_reclaim - time.monotonic()))
        return self._new(count, pause) or self._reclaim(count) or self._new(count, block_seconds - pause)

    def _release_left(self) -> None:
        # Taken out first: other threads add to the list meanwhile.
        left, self._left = self._left, []
        try:
            self.release(left)
        except redis.RedisError:
            self._left += left
            raise

    def _new(self, count: int, block_seconds: float) -> list[Entry]:
        replies = self.client.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=count, block=max(1, int(block_seconds * 1000))
        )
        return [entry_of(entry_id, fields, 1) for entry_id, fields in raw_entries(replies)]

    def stop_reading(self) -> None:
        """Its process needs the stream no more: whether it can be read is no obstacle to it."""
        self._reading.over()

    def begin_alone(self, entry: Entry) -> bool:
        """Count an attempt at a lone entry before it starts; a consumer that survives the attempt resets the count.

        False when it must not be handled: another consumer has it, or it killed too many and is a dead letter now.
        """
        weight = PROVEN_WEIGHT if self.holder.proven else 1
        enough = ENTRY_DEATHS.alone * PROVEN_WEIGHT
        keys = self.stream, redis_keys.lone_deliveries(self.stream)
        arguments = (self.group, self.name, entry.entry_id, weight, enough)
        before = cast(int, self.client.eval(entries_module.BEGIN_ALONE, len(keys), *keys, *arguments))
        if before < 0:
            self._held.discard(entry.entry_id)
            return False
        died = entry.deliveries - 1
        if before >= enough:
            self.dead_letter(entry, f"{died} holders vanished with it, the last ones while they had nothing else")
            return False
        reason = f"{died} holders vanished with an entry; it is handled alone"
        log.warning(reason, stream=self.stream, entry=entry.entry_id, run=self._run_of(entry))
        self._notes.note(self._run_of(entry), self.stream, reason)
        return True

    # --- finishing ---

    @property
    def in_hand(self) -> int:
        """How many entries were read here and are not finished, failed or released."""
        return len(self._held)

    def keep_alive(self, entries: Sequence[Entry] | None = None) -> None:
        """Reset the idle time of entries, of all that are held by default: their consumer is slow, not dead."""
        ids = list(self._held) if entries is None else [entry.entry_id for entry in self.unfinished(entries)]
        if ids:
            self.client.eval(entries_module.KEEP_ALIVE, 1, self.stream, self.group, self.name, *ids)

    def forward(self, entry: Entry, next_stream: str, payload: bytes, trace: str = "", run_id: str = "") -> bool:
        """Write the next hop, acknowledge and delete, atomically; False if another delivery did so before.

        The next hop belongs to the span `trace` and is counted for the run `run_id`, else as the entry was.
        """
        counted_for = run_id or entry.run_id
        counts = redis_keys.entries_in_flight(counted_for)
        keys = self.stream, next_stream, counts, redis_keys.lone_deliveries(self.stream)
        arguments = (self.group, entry.entry_id, payload, trace or entry.trace, counted_for, entry.run_id)
        done = bool(self.client.eval(entries_module.FORWARD, len(keys), *keys, *arguments))
        self._done_with([entry])
        return done

    def finish(self, entries: Sequence[Entry]) -> None:
        """Acknowledge and delete entries whose effect has been written elsewhere."""
        lone = redis_keys.lone_deliveries(self.stream)
        with self.client.pipeline(transaction=True) as pipe:
            for entry in entries:
                keys = self.stream, redis_keys.entries_in_flight(entry.run_id), lone
                pipe.eval(entries_module.FINISH, len(keys), *keys, self.group, entry.entry_id, entry.run_id)
            pipe.execute()
        self._done_with(entries)

    def dead_letter(self, entry: Entry, reason: str) -> None:
        """Move an entry to the dead letters with its reason, counted for its run."""
        recovery.write(self.client, self.stream, self.group, entry, reason, self._run_of(entry))
        self._done_with([entry])

    def fail(self, entry: Entry, error: Exception) -> Fate:
        """Let the error of a handler decide on its entry: see `recovery.py`. Raises redis.RedisError."""
        fate = fate_of(error)
        run_id = self._run_of(entry)
        if fate is Fate.DROP and run_id and self.client.exists(redis_keys.run_spec(run_id)):
            fate = Fate.RETRY
        match fate:
            case Fate.DEAD_LETTER:
                self.dead_letter(entry, str(error))
            case Fate.DROP:
                log.warning("dropped an entry of a deleted run", stream=self.stream, entry=entry.entry_id)
                self.finish([entry])
            case Fate.RETRY:
                self._retry_later(entry, error)
        return fate

    @contextmanager
    def isolated(self, entry: Entry) -> Iterator[None]:
        """Let what goes wrong in the body decide on this entry alone. Raises redis.RedisError as it comes."""
        try:
            yield
        except redis.RedisError:
            raise
        except Exception as error:
            # Whatever it was (a service away, a bug), the entry is still pending; its error decides what becomes of it.
            if self.unfinished([entry]):
                self.fail(entry, error)

    def release(self, entries: Sequence[Entry], after_seconds: float = 0.0) -> None:
        """Release entries unfinished: any member may read them `after_seconds` later, as if for the first time."""
        if entries:
            idle_ms = max(0, int((self.reclaim_after_seconds - after_seconds) * 1000))
            self._put_back([entry.entry_id for entry in entries], idle_ms, deliveries=0, forgive=True)
            self._next_reclaim = min(self._next_reclaim, time.monotonic() + after_seconds)

    def give_back(self) -> None:
        """Release every held entry, of a process that is to stop; without Redis others reclaim them later."""
        held = list(self._held)
        with unless_away("entries were not given back", stream=self.stream):
            if held:
                self._put_back(held, int(self.reclaim_after_seconds * 1000), deliveries=0, forgive=True)

    def take_back(self, entry_ids: Sequence[str]) -> list[Entry]:
        """Released entries that no member has taken since, as if they had been read now."""
        if not entry_ids:
            return []
        reply = self.client.eval(entries_module.TAKE_BACK, 1, self.stream, self.group, self.name, *entry_ids)
        entries = [_reclaimed(raw) for raw in cast("list[RawDelivery]", reply) if raw[1]]
        self._held.update(entry.entry_id for entry in entries)
        return entries

    def interrupted(self, entries: Sequence[Entry], error: Exception) -> None:
        """The outcome of entries was not written, as while Redis is away: the next read that works gives them back."""
        self._handling.failed(error)
        for entry in self.unfinished(entries):
            self._notes.note(self._run_of(entry), self.stream, reason_of(error))
            self._left.append(entry)

    def unfinished(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the entries that this consumer has not finished, failed or released since it read them."""
        return [entry for entry in entries if entry.entry_id in self._held]

    def failures(self, entry: Entry) -> int:
        """How often the entry failed here, each time as the only one of its handling."""
        return self._failures.get(entry.entry_id, 0)

    # --- what it is made of ---

    def _retry_later(self, entry: Entry, error: Exception) -> None:
        failures = self._failures.get(entry.entry_id, 0) + 1
        if len(self._failures) >= MAX_REMEMBERED_FAILURES:
            self._failures.clear()
        self._failures[entry.entry_id] = failures
        self._handling.failed(error)
        self._notes.note(self._run_of(entry), self.stream, reason_of(error))
        self.release([entry], min(MAX_BACKOFF_SECONDS, self.reclaim_after_seconds, 2.0 ** min(failures - 1, 10)))

    def _done_with(self, entries: Sequence[Entry]) -> None:
        self.holder.proven = True
        self.done += len(entries)
        for entry in entries:
            self._held.discard(entry.entry_id)
            self._failures.pop(entry.entry_id, None)
        self._handling.over(time.monotonic() - SAY_SECONDS)

    def _put_back(self, ids: Sequence[str], idle_ms: int, deliveries: int, *, forgive: bool) -> None:
        keys = self.stream, redis_keys.lone_deliveries(self.stream)
        arguments: tuple[str | int, ...] = (self.group, self.name, idle_ms, deliveries, int(forgive), *ids)
        try:
            self.client.eval(entries_module.RELEASE, len(keys), *keys, *arguments)
        except redis.ResponseError as error:
            # Nothing to release to: the stream came back empty.
            if "NOGROUP" not in str(error):
                raise
        self._held.difference_update(ids)

    def _run_of(self, entry: Entry) -> str:
        return entry.run_id or self.run_id

    def _ensure_group(self) -> None:
        if self._ready:
            return
        needed = redis_keys.run_spec(self.run_id) if self.run_id else ""
        if not self.client.eval(entries_module.ENSURE_GROUP, 2, self.stream, needed, self.group):
            raise NotFound(f"the run {self.run_id} is deleted", code="unknown_run")
        self._ready = True

    def _remove_silent(self) -> None:
        if time.monotonic() < self._next_tidy:
            return
        self._next_tidy = time.monotonic() + self.tidy_seconds
        silent_ms = int(max(self.silent_seconds, 3 * self.reclaim_after_seconds) * 1000)
        removed = self.client.eval(entries_module.REMOVE_SILENT, 1, self.stream, self.group, silent_ms)
        if removed:
            log.info("removed consumers that are gone", stream=self.stream, consumers=removed)

    def _reclaim(self, count: int) -> list[Entry]:
        """Entries of silent consumers, found by following the cursor through all that is pending."""
        if time.monotonic() < self._next_reclaim:
            return []
        for _ in range(SCANS_PER_READ):
            entries = self._scan(count)
            if entries:
                return self._lone_or_all(entries)
            if self._cursor == "0-0" or self._unsure:
                self._next_reclaim = time.monotonic() + min(5.0, self.reclaim_after_seconds / 4)
                break
        return []

    def _scan(self, count: int) -> list[Entry]:
        idle_ms = int(self.reclaim_after_seconds * 1000)
        keys = self.stream, redis_keys.stream_clock(self.stream)
        began = time.monotonic()
        redis_ms, then = self._clock
        expected = redis_ms + int((began - then) * 1000) if redis_ms else 0
        tolerance = max(LEAST_STEP_MS, idle_ms // 4)
        arguments = (self.group, self.name, idle_ms, self._cursor, count, expected, tolerance)
        reply = self.client.eval(entries_module.RECLAIM, len(keys), *keys, *arguments)
        cursor, found, at, clock = cast("tuple[bytes, list[RawDelivery], int, bytes]", reply)
        self._cursor = cursor.decode()
        # The later of two times here: an answer that took long looks like no step.
        self._clock = at, time.monotonic()
        self._unsure = clock == b"unsure"
        if clock == b"stepped":
            log.warning("the clock of Redis stepped; silent members keep entries from now on", stream=self.stream)
        return [_reclaimed(raw) for raw in found if raw[1]]

    def _lone_or_all(self, entries: list[Entry]) -> list[Entry]:
        """The entries that may be handled together; if there is none, one that must be alone. The rest is put back."""
        together = [entry for entry in entries if entry.deliveries <= ENTRY_DEATHS.in_company]
        silent = [entry for entry in together if entry.deliveries > 1]
        if silent:
            log.warning("reclaimed entries of a silent consumer", stream=self.stream, entries=len(silent))
        idle_ms = int(self.reclaim_after_seconds * 1000)
        for entry in entries:
            if entry.deliveries > ENTRY_DEATHS.in_company:
                # As it was found: idle for long enough, and this look at it is no delivery.
                self._put_back([entry.entry_id], idle_ms, entry.deliveries - 1, forgive=False)
        return together or self._one_alone(idle_ms)

    def _one_alone(self, idle_ms: int) -> list[Entry]:
        keys = self.stream, redis_keys.lone_deliveries(self.stream)
        arguments = (self.group, self.name, idle_ms, ENTRY_DEATHS.in_company - 1)
        taken = cast(
            "RawDelivery | tuple[()]", self.client.eval(entries_module.TAKE_LONE, len(keys), *keys, *arguments)
        )
        return [replace(_reclaimed(taken), alone=True)] if taken else []


def _reclaimed(raw: RawDelivery) -> Entry:
    entry_id, fields, deliveries = raw
    return entry_of(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), deliveries)


def deliver(consumer: Consumer, handler: Handler, entries: Sequence[Entry]) -> None:
    """Handle entries that were read. Raises redis.RedisError where Redis did not take the outcome.

    The handler acknowledges entries itself (`forward` or `finish`) and may fail a single one (`Consumer.fail`), so that
    the rest of its batch goes on. When it raises, each entry that it left unfinished is handled again alone: those that
    fail alone are failed, the others are finished. An entry whose earlier consumers died is handled alone, while no
    other thread of the process handles any.
    """
    if not entries:
        return
    if entries[0].alone:
        entry = entries[0]
        with consumer.holder.alone():
            if consumer.begin_alone(entry):
                _attempt(consumer, handler, entry)
        return
    with consumer.holder.among_others():
        failed_before = [entry for entry in entries if consumer.failures(entry)]
        fresh = [entry for entry in entries if not consumer.failures(entry)]
        if len(fresh) == 1:
            _attempt(consumer, handler, fresh[0])
        elif fresh:
            _together(consumer, handler, fresh)
        _one_by_one(consumer, handler, failed_before)


def _together(consumer: Consumer, handler: Handler, entries: list[Entry]) -> None:
    try:
        handler(entries)
    except redis.RedisError:
        raise
    except Exception:
        # Which of them it was shows when each is on its own, and so does the error.
        _one_by_one(consumer, handler, consumer.unfinished(entries))


def _one_by_one(consumer: Consumer, handler: Handler, entries: Sequence[Entry]) -> None:
    # In another order each time: an outage that is taken for granted early never hides the same entries twice.
    order = random.sample(entries, len(entries))
    failures = 0
    for at, entry in enumerate(order):
        failures = 0 if _attempt(consumer, handler, entry) else failures + 1
        if failures == OUTAGE_AFTER_FAILURES:
            consumer.release(order[at + 1 :], after_seconds=1.0)
            return


def _attempt(consumer: Consumer, handler: Handler, entry: Entry) -> bool:
    """Whether the entry was finished, in whatever way, or released by its handler."""
    before = consumer.failures(entry)
    with consumer.isolated(entry):
        handler([entry])
    return consumer.failures(entry) <= before


@dataclass(eq=False)
class RunLane:
    """Entries of one run that wait here, those that were released, and how many threads work on others of it."""

    most: int
    tenant: str = ""
    waiting: deque[Entry] = field(default_factory=deque)
    waiting_bytes: int = 0
    given_back: dict[str, None] = field(default_factory=dict)
    threads: int = 0
    # Calls in a row of which nothing was finished.
    failures: int = 0

    @property
    def room(self) -> int:
        """How many more entries may wait here."""
        return 0 if self.waiting_bytes >= LANE_BYTES else max(0, self.most - len(self.waiting))

    def add(self, entry: Entry) -> None:
        self.waiting.append(entry)
        self.waiting_bytes += len(entry.payload)
        self.given_back.pop(entry.entry_id, None)

    def take(self, count: int) -> list[Entry]:
        """The oldest entries, at most `count`."""
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.waiting_bytes -= sum(len(entry.payload) for entry in taken)
        return taken

    def wanted_back(self) -> list[str]:
        """Ids of the oldest released entries that there is room for; they no longer count as released."""
        ids = list(self.given_back)[: self.room] if len(self.waiting) <= self.most // 2 else []
        for entry_id in ids:
            del self.given_back[entry_id]
        return ids


class StageRunner:
    """Feeds the entries of a stream to a handler (`deliver`), by run, with at most `threads` calls at a time per run.

    A call of the handler gets at most `count` entries, all of one run; calls come from several threads. Entries are
    kept alive as long as this process holds them. most: called before each read, returns how many entries may be held;
    without it a few calls' worth of entries per run.
    """

    def __init__(
        self,
        consumer: Consumer,
        handler: Handler,
        *,
        threads: int = 1,
        count: int = 1,
        most: Callable[[], int] | None = None,
    ) -> None:
        self.consumer = consumer
        self.handler = handler
        self.threads = threads
        self.count = count
        self._most = most
        self._tenants = RunTenants(consumer.client)
        # Runs that wait for a thread, by tenant, and how many threads work for each tenant.
        self._turns: dict[str, deque[str]] = {}
        self._working: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._lanes: dict[str, RunLane] = {}
        # Set when there may be room for more.
        self._room = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Read and handle until stop, then finish what is being handled and release what waits."""
        stopped = threading.Event()
        alive = threading.Thread(target=self._keep_alive, args=(stopped,), name="stage-alive", daemon=True)
        alive.start()
        try:
            with ThreadPoolExecutor(MOST_TENANTS * MAX_LANES * self.threads, thread_name_prefix="lane") as pool:
                while not stop.is_set():
                    self._read(pool, stop)
                self.consumer.stop_reading()
                self._give_back()
        finally:
            stopped.set()
            alive.join()

    def _read(self, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        self._room.clear()
        count = max(self.count, READ_ENTRIES)
        if self._most is not None:
            count = min(count, self._most() - self.consumer.in_hand)
            if count <= 0:
                self._room.wait(RETRY_SECONDS)
                return
        try:
            entries = self.consumer.read(count)
        except (redis.RedisError, NotFound):
            # The consumer has said what it was.
            stop.wait(RETRY_SECONDS)
            return
        if entries and entries[0].alone:
            self._deliver(entries)
            return
        queued: list[Entry] = []
        try:
            queued += (entry for entry in entries if self._queue(entry, pool, stop))
            full = [entry for entry in entries if entry not in queued]
            # Whoever finds them silent for long enough may have them.
            self.consumer.release(full, after_seconds=self.consumer.reclaim_after_seconds)
            self._note_given_back(full, pool, stop)
        except redis.RedisError as error:
            # Else they would be kept alive and handled by nobody.
            self.consumer.interrupted([entry for entry in entries if entry not in queued], error)
            stop.wait(RETRY_SECONDS)

    def _queue(self, entry: Entry, pool: ThreadPoolExecutor, stop: threading.Event) -> bool:
        """Let an entry wait in its lane; False when that is full."""
        tenant = self._tenants.of(entry.run_id)
        with self._lock:
            lane = self._lane(entry.run_id, tenant)
            # What arrived earlier and was released goes first.
            if lane.given_back or not lane.room:
                return False
            lane.add(entry)
            if lane.threads < self.threads:
                lane.threads += 1
                self._queue_up(entry.run_id, pool, stop)
        return True

    def _lane(self, run_id: str, tenant: str) -> RunLane:
        return self._lanes.setdefault(run_id, RunLane(CALLS_AHEAD * self.threads * self.count, tenant))

    def _queue_up(self, run_id: str, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Let a run wait for a thread of its tenant's. Raises RuntimeError where the pool is closed."""
        tenant = self._lanes[run_id].tenant
        self._turns.setdefault(tenant, deque()).append(run_id)
        self._start(tenant, pool, stop)

    def _start(self, tenant: str, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Let the tenant's next runs work, as far as it has threads left."""
        turns = self._turns.get(tenant)
        while turns and self._working[tenant] < MAX_LANES * self.threads:
            run_id = turns.popleft()
            pool.submit(self._work_for, tenant, run_id, pool, stop)
            self._working[tenant] += 1

    def _work_for(self, tenant: str, run_id: str, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        try:
            self._work(run_id, pool, stop)
        finally:
            with self._lock, suppress(RuntimeError):
                self._working[tenant] -= 1
                self._start(tenant, pool, stop)
                if not self._working[tenant]:
                    self._working.pop(tenant)
                    self._turns.pop(tenant, None)

    def _note_given_back(self, entries: Sequence[Entry], pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        for entry in entries:
            tenant = self._tenants.of(entry.run_id)
            with self._lock:
                lane = self._lane(entry.run_id, tenant)
                if len(lane.given_back) < MAX_GIVEN_BACK:
                    lane.given_back[entry.entry_id] = None
                if not lane.threads:
                    # It ran empty while they were released: no other member would take them before they are reclaimed.
                    lane.threads += 1
                    self._queue_up(entry.run_id, pool, stop)

    def _work(self, run_id: str, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Handle some entries of a run, and queue up for more behind the other runs."""
        if self._lanes[run_id].failures >= OUTAGE_AFTER_FAILURES:
            # What its handler needs is away: entries are tried with one call a second, and not each for nothing.
            stop.wait(RETRY_SECONDS)
        entries, done = self._take(run_id, stop), self.consumer.done
        if entries:
            self._deliver(entries)
        with self._lock:
            lane = self._lanes[run_id]
            if entries:
                lane.failures = lane.failures + 1 if self.consumer.done == done else 0
            if (entries or lane.waiting or lane.given_back) and not stop.is_set():
                with suppress(RuntimeError):
                    # Else the pool is closed: the process stops, and what waits is released.
                    self._queue_up(run_id, pool, stop)
                    return
            lane.threads -= 1
            if not lane.threads and not lane.waiting:
                del self._lanes[run_id]

    def _take(self, run_id: str, stop: threading.Event) -> list[Entry]:
        """The next entries of a run; a lane that runs empty is filled with what was released."""
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
                lane.add(entry)
            return [] if stop.is_set() else lane.take(self.count)

    def _deliver(self, entries: Sequence[Entry]) -> None:
        try:
            deliver(self.consumer, self.handler, entries)
            # What a handler leaves is somebody's again when it has been silent for as long as that of the dead.
            left = self.consumer.unfinished(entries)
            self.consumer.release(left, after_seconds=self.consumer.reclaim_after_seconds)
        except redis.RedisError as error:
            self.consumer.interrupted(entries, error)
        except Exception as error:
            # `deliver` lets errors decide on entries; this one is its own.
            log.exception("entries were not delivered", stream=self.consumer.stream)
            self.consumer.interrupted(entries, error)
        finally:
            self._room.set()

    def _give_back(self) -> None:
        with self._lock:
            waiting = [entry for lane in self._lanes.values() for entry in lane.take(len(lane.waiting))]
        with unless_away("entries were not given back; others take them over later", stream=self.consumer.stream):
            self.consumer.release(waiting)

    def _keep_alive(self, stopped: threading.Event) -> None:
        while not stopped.wait(self.consumer.reclaim_after_seconds / 4):
            with unless_away("keep-alive failed; will try again", stream=self.consumer.stream):
                self.consumer.keep_alive()
