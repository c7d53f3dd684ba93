"""Entries: appending them, counting those of a run, reading a stream that has no consumer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spo import redis_keys
from spo.messaging.redis_client import RedisClient, StreamEntry, StreamReplies


@dataclass(frozen=True)
class Entry:
    """One delivery of a stream entry; deliveries counts from 1, trace is a traceparent or "".

    run_id is the run that it is counted for, "" on a stream of one run. alone: it must be handled by itself, since
    those who had it before vanished.
    """

    entry_id: str
    payload: bytes
    deliveries: int
    trace: str = ""
    run_id: str = ""
    alone: bool = False


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


def read_after(client: RedisClient, stream: str, position: str, block_seconds: float, count: int = 1000) -> list[Entry]:
    """Entries of an append-only stream after an entry id ("0-0": from the start), without a group.

    Waits at most block_seconds for one; the last entry's id is the next position.
    """
    replies = client.xread({stream: position}, count=count, block=max(1, int(block_seconds * 1000)))
    return [entry_of(entry_id, fields, 0) for entry_id, fields in raw_entries(replies)]


def raw_entries(replies: StreamReplies) -> list[StreamEntry]:
    """The entries of a reply about one stream, under RESP2 or RESP3."""
    if isinstance(replies, dict):
        return [raw for batches in replies.values() for batch in batches for raw in batch]
    return [raw for _, batch in replies for raw in batch]


def entry_of(entry_id: bytes, fields: Mapping[bytes, bytes], deliveries: int) -> Entry:
    """One delivery as the server tells it; something that is not a message of ours has an empty payload."""
    return Entry(
        entry_id.decode(),
        fields.get(b"payload", b""),
        deliveries,
        trace=fields.get(b"trace", b"").decode(errors="replace"),
        run_id=fields.get(b"run", b"").decode(errors="replace"),
    )
