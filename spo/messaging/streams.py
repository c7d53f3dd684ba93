"""The pipeline between services: the only XADD / XREADGROUP / XACK / XAUTOCLAIM of the platform.

An entry is one serialized protobuf message under the field `payload`; where traces are on, `trace` says which span it
belongs to. On a stream that all runs share, `run` names the run that the entry is counted for: `entries_in_flight`
changes in the same atomic step as the entries, and is exact whatever is redelivered or killed.

Delivery is at least once: an entry stays pending until its handler's outcome is written. `forward` writes the next hop
and acknowledges in one atomic step, and only the first of two deliveries can do it: a redelivered entry never appears
twice on the next stream. Work streams are never trimmed: trimming deletes pending entries silently. After
`max_deliveries` an entry goes to `<stream>:dead` with a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import redis

from spo import redis_keys
from spo.errors import SpoError
from spo.messaging.redis_client import GroupState, RedisClient, StreamEntry, StreamReplies
from spo.observability import metrics
from spo.observability.logs import get_logger

log = get_logger("streams")

MAX_DELIVERIES = 5

# One entry of a run less on a stream. Never below none: the counts go with a deleted run, its entries may outlast it.
_UNCOUNT = """
local function uncount(counts, stream)
  if redis.call('HINCRBY', counts, stream, -1) <= 0 then redis.call('HDEL', counts, stream) end
end
"""

# KEYS: source stream, next stream, counts of the run.  ARGV: group, entry id, payload for the next stream, its trace,
#       run that the next entry counts for or '', run that the source entry counted for or ''.
# Returns 1 when this call finished the entry, 0 when another delivery had finished it before.
_FORWARD = f"""
{_UNCOUNT}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
local fields = {{'payload', ARGV[3]}}
if ARGV[4] ~= '' then fields[3], fields[4] = 'trace', ARGV[4] end
if ARGV[5] ~= '' then
  fields[#fields + 1] = 'run'
  fields[#fields + 1] = ARGV[5]
  redis.call('HINCRBY', KEYS[3], KEYS[2], 1)
end
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XDEL', KEYS[1], ARGV[2])
if ARGV[6] ~= '' then uncount(KEYS[3], KEYS[1]) end
return 1
"""

# KEYS: stream, counts of the run.  ARGV: group, entry id.  For an entry that is counted.
_FINISH = f"""
{_UNCOUNT}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
uncount(KEYS[2], KEYS[1])
return 1
"""

# KEYS: source stream, dead-letter stream, counts of the run.  ARGV: group, entry id, payload, reason, deliveries,
#       unix ms, run that the entry counted for or ''.
_DEAD_LETTER = f"""
{_UNCOUNT}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', 'payload', ARGV[3], 'reason', ARGV[4], 'deliveries', ARGV[5], 'at_unix_ms', ARGV[6])
redis.call('XDEL', KEYS[1], ARGV[2])
if ARGV[7] ~= '' then uncount(KEYS[3], KEYS[1]) end
return 1
"""


@dataclass(frozen=True)
class Entry:
    """One delivery of a stream entry; deliveries counts from 1, trace is a traceparent or "".

    run_id is the run that it is counted for, "" on a stream of one run.
    """

    entry_id: str
    payload: bytes
    deliveries: int
    trace: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class StreamDepth:
    """lag: entries no consumer has seen; pending: entries delivered and not finished."""

    lag: int
    pending: int


def publish(client: RedisClient, stream: str, payloads: Sequence[bytes]) -> None:
    """Append messages to a stream in one round trip. Raises redis.RedisError; nothing is partly acknowledged."""
    with client.pipeline(transaction=True) as pipe:
        for payload in payloads:
            pipe.xadd(stream, {"payload": payload})
        pipe.execute()


def append_words(stream: str, payload: bytes, trace: str = "") -> tuple[str | bytes, ...]:
    """The command that appends one message, for writers whose append is part of a larger atomic step."""
    words = ("XADD", stream, "*", "payload", payload)
    return (*words, "trace", trace) if trace else words


def counted_append_words(stream: str, payload: bytes, run_id: str) -> list[tuple[str | bytes | int, ...]]:
    """The commands that append one message to a stream that runs share, counted for its run; for one atomic step."""
    return [
        (*append_words(stream, payload), "run", run_id),
        ("HINCRBY", redis_keys.entries_in_flight(run_id), stream, 1),
    ]


def entries_of_run(client: RedisClient, run_id: str, own: str, shared: Sequence[str]) -> dict[str, int]:
    """The unfinished entries of a run on its own stream and on streams that it shares, all at one moment."""
    with client.pipeline(transaction=True) as pipe:
        pipe.hmget(redis_keys.entries_in_flight(run_id), list(shared))
        for stream in (own, *shared):
            pipe.xlen(stream)
        counts, length, *lengths = pipe.execute()
    # At most what is there: should somebody empty a stream by hand, no count outlasts its entries.
    found = (min(int(count or 0), there) for count, there in zip(counts, lengths, strict=True))
    return {own: length} | dict(zip(shared, found, strict=True))


def depth(client: RedisClient, stream: str, group: str) -> StreamDepth:
    """How much work waits on a stream for a group; zeros when the stream does not exist yet."""
    return depths(client, [(stream, group)])[0]


def depths(client: RedisClient, wanted: Sequence[tuple[str, str]]) -> list[StreamDepth]:
    """The depths of several (stream, group) in one round trip."""
    with client.pipeline(transaction=False) as pipe:
        for stream, _ in wanted:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)
        # XINFO of a stream that does not exist yet is an error, in its place among the replies.
        replies = pipe.execute(raise_on_error=False)
    found = zip(wanted, replies[::2], replies[1::2], strict=True)
    return [_depth(length, groups, group) for (_, group), length, groups in found]


def _depth(length: int | Exception, groups: list[GroupState] | Exception, group: str) -> StreamDepth:
    if isinstance(length, Exception):
        raise length
    for facts in [] if isinstance(groups, Exception) else groups:
        if facts["name"] == group.encode():
            lag = facts.get("lag")
            return StreamDepth(lag=length if lag is None else int(lag), pending=int(facts["pending"]))
    return StreamDepth(lag=length, pending=0)


def oldest_unix_ms(client: RedisClient, stream: str) -> int | None:
    """When the oldest entry that is not finished was appended, by the server's clock; None when nothing waits."""
    first = client.xrange(stream, count=1)
    return int(first[0][0].split(b"-")[0]) if first else None


def read_after(client: RedisClient, stream: str, position: str, block_seconds: float, count: int = 1000) -> list[Entry]:
    """Entries of an append-only stream after an entry id ("0-0": from the start), without a group.

    Waits at most block_seconds for one; the last entry's id is the next position.
    """
    replies = client.xread({stream: position}, count=count, block=max(1, int(block_seconds * 1000)))
    return [_entry(raw, 0) for raw in _entries(replies)]


@dataclass
class Consumer:
    """One member of a consumer group.

    reclaim_after_seconds must exceed the slowest legitimate handling of an entry: after it, a silent consumer's entries
    are given to another. `keep_alive` resets that clock for entries still being worked on.
    """

    client: RedisClient
    stream: str
    group: str
    name: str
    reclaim_after_seconds: float = 60.0
    max_deliveries: int = MAX_DELIVERIES
    _ready: bool = field(default=False, init=False)
    _next_reclaim: float = field(default=0.0, init=False)

    def read(self, count: int, block_seconds: float = 1.0) -> list[Entry]:
        """Return up to count entries, reclaimed ones first; waits at most block_seconds for new ones."""
        self._ensure_group()
        claimed = self._reclaim(count)
        if claimed:
            return claimed
        replies = self.client.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=count, block=max(1, int(block_seconds * 1000))
        )
        return [_entry(raw, 1) for raw in _entries(replies)]

    def keep_alive(self, entries: Sequence[Entry]) -> None:
        """Reset the idle time of entries that are still being handled: their consumer is slow, not dead."""
        if entries:
            self.client.xclaim(
                self.stream, self.group, self.name, 0, [entry.entry_id for entry in entries], justid=True
            )

    def forward(self, entry: Entry, next_stream: str, payload: bytes, trace: str = "", run_id: str = "") -> bool:
        """Write the next hop, acknowledge and delete, atomically; False if another delivery did so before.

        The next hop belongs to the span `trace` and is counted for the run `run_id`, else as the entry was.
        """
        counted_for = run_id or entry.run_id
        keys = self.stream, next_stream, redis_keys.entries_in_flight(counted_for)
        arguments = (self.group, entry.entry_id, payload, trace or entry.trace, counted_for, entry.run_id)
        return bool(self.client.eval(_FORWARD, len(keys), *keys, *arguments))

    def finish(self, entries: Sequence[Entry]) -> None:
        """Acknowledge and delete entries whose effect has been written elsewhere."""
        with self.client.pipeline(transaction=True) as pipe:
            for entry in entries:
                if entry.run_id:
                    counts = redis_keys.entries_in_flight(entry.run_id)
                    pipe.eval(_FINISH, 2, self.stream, counts, self.group, entry.entry_id)
                else:
                    pipe.xack(self.stream, self.group, entry.entry_id)
                    pipe.xdel(self.stream, entry.entry_id)
            pipe.execute()

    def dead_letter(self, entry: Entry, reason: str) -> None:
        """Move an entry to the dead letters with its reason."""
        at_unix_ms = str(int(time.time() * 1000))
        keys = self.stream, redis_keys.dead_letters(self.stream), redis_keys.entries_in_flight(entry.run_id)
        facts = (entry.payload, reason[:2000], str(entry.deliveries), at_unix_ms, entry.run_id)
        if self.client.eval(_DEAD_LETTER, len(keys), *keys, self.group, entry.entry_id, *facts):
            metrics.DEAD_LETTERS.labels(stream=self.stream_label()).inc()
            log.error("dead letter", stream=self.stream, entry=entry.entry_id, reason=reason[:500])

    def stream_label(self) -> str:
        """The stream's name without run ids, for metric labels."""
        return self.stream.rsplit(":", 1)[-1]

    def _ensure_group(self) -> None:
        if self._ready:
            return
        try:
            self.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._ready = True

    def _reclaim(self, count: int) -> list[Entry]:
        if time.monotonic() < self._next_reclaim:
            return []
        idle_ms = int(self.reclaim_after_seconds * 1000)
        reply = self.client.xautoclaim(self.stream, self.group, self.name, idle_ms, count=count)
        entries = [_entry(raw, 0) for raw in reply[1] if raw[1]]
        if not entries:
            self._next_reclaim = time.monotonic() + min(5.0, self.reclaim_after_seconds / 4)
            return []
        log.warning("reclaimed entries of a silent consumer", stream=self.stream, entries=len(entries))
        return self._dead_letter_exhausted(entries)

    def _dead_letter_exhausted(self, entries: list[Entry]) -> list[Entry]:
        alive = []
        for entry in entries:
            pending = self.client.xpending_range(self.stream, self.group, entry.entry_id, entry.entry_id, 1)
            deliveries = int(pending[0]["times_delivered"]) if pending else 1
            counted = replace(entry, deliveries=deliveries)
            if deliveries > self.max_deliveries:
                self.dead_letter(counted, f"not finished in {self.max_deliveries} deliveries")
            else:
                alive.append(counted)
        return alive


def _entries(replies: StreamReplies) -> list[StreamEntry]:
    if isinstance(replies, dict):
        return [raw for batches in replies.values() for batch in batches for raw in batch]
    return [raw for _, batch in replies for raw in batch]


def _entry(raw: StreamEntry, deliveries: int) -> Entry:
    entry_id, fields = raw
    return Entry(
        entry_id.decode(),
        fields[b"payload"],
        deliveries,
        trace=fields.get(b"trace", b"").decode(),
        run_id=fields.get(b"run", b"").decode(),
    )


def consume(
    consumer: Consumer,
    handler: Callable[[list[Entry]], None],
    stop: threading.Event,
    *,
    count: int = 16,
    block_seconds: float = 1.0,
    retry_seconds: float = 1.0,
) -> None:
    """Feed batches of entries to handler until stop is set.

    The handler finishes entries itself (forward, finish or dead_letter). When it raises, its entries stay pending and
    are redelivered after reclaim_after_seconds: a fault costs time, never an entry. After an error that is not
    retryable a batch of one entry goes to the dead letters, and a larger one is retried entry by entry, so that one
    poison entry harms no other.
    """
    while not stop.is_set():
        try:
            entries = consumer.read(count, block_seconds)
            if entries:
                _deliver(consumer, handler, entries)
        except Exception as error:
            # Whatever it was (Redis away, a bug), the entries are still pending: say so and try again.
            log.exception("stream consumer will retry", stream=consumer.stream, error=str(error))
            stop.wait(retry_seconds)


def _deliver(consumer: Consumer, handler: Callable[[list[Entry]], None], entries: list[Entry]) -> None:
    try:
        handler(entries)
    except SpoError as error:
        if error.retryable:
            raise
        if len(entries) == 1:
            consumer.dead_letter(entries[0], str(error))
            return
        for entry in entries:
            _deliver(consumer, handler, [entry])
