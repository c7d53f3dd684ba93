"""Entries that were given up on: written aside and counted for their run, listed, redriven, dropped.

The facts of a letter are in a stream, its payload is in a hash beside it. Both are capped; the oldest letters go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient, StreamEntry
from spo.messaging.streams import scripts
from spo.messaging.streams.entries import Entry
from spo.observability import metrics
from spo.observability.logs import get_logger

log = get_logger("streams")

MAX_LETTERS = 1000
MAX_BYTES = 256 << 20
MAX_REASON = 2000
_PAGE = 200


@dataclass(frozen=True)
class DeadLetter:
    """One entry that was given up on, without its payload; run_id is "" where it belongs to none."""

    letter_id: str
    stream: str
    run_id: str
    reason: str
    deliveries: int
    at_unix_ms: int
    size_bytes: int


@dataclass(frozen=True)
class DeadLetterCount:
    """How many entries of a run were given up on at a stream, and why the last one was."""

    stream: str
    count: int
    last_reason: str


def write(client: RedisClient, stream: str, group: str, entry: Entry, reason: str, run_id: str) -> None:
    """Move an entry to the dead letters of its stream, counted for its run; nothing when it was finished before."""
    keys = (
        stream,
        *_kept(stream),
        redis_keys.entries_in_flight(entry.run_id),
        redis_keys.dead_letter_counts(run_id),
        redis_keys.run_spec(run_id),
        redis_keys.lone_deliveries(stream),
    )
    facts = (entry.payload, reason[:MAX_REASON], entry.deliveries, entry.run_id, run_id, entry.trace)
    arguments = (group, entry.entry_id, *facts, MAX_LETTERS, MAX_BYTES)
    gone = cast(int, client.eval(scripts.DEAD_LETTER, len(keys), *keys, *arguments))
    if gone < 0:
        return
    metrics.DEAD_LETTERS.labels(stream=_label(stream)).inc()
    log.error("dead letter", stream=stream, entry=entry.entry_id, run=run_id, reason=reason[:500])
    if gone:
        log.warning("dead letters went to make room for newer ones", stream=stream, letters=gone)


def counts_of(client: RedisClient, run_id: str) -> dict[str, DeadLetterCount]:
    """What of a run was given up on, by stream."""
    found = {name.decode(): value for name, value in client.hgetall(redis_keys.dead_letter_counts(run_id)).items()}
    return {
        name: DeadLetterCount(name, int(value), found.get(f"{name}:reason", b"").decode(errors="replace"))
        for name, value in found.items()
        if not name.endswith(":reason")
    }


def gone_of(client: RedisClient, stream: str) -> int:
    """How many letters of a stream gave way to newer ones."""
    return int(client.hget(redis_keys.dead_letter_totals(stream), "gone") or 0)


def newest(client: RedisClient, stream: str, run_id: str, before: str = "") -> Iterator[DeadLetter]:
    """The letters of a run on a stream ("": of no run), the newest first, those older than an id where one is given."""
    last = f"({before}" if before else "+"
    while True:
        page = client.xrevrange(redis_keys.dead_letters(stream), max=last, count=_PAGE)
        yield from (letter for letter in (_letter(stream, raw) for raw in page) if letter.run_id == run_id)
        if len(page) < _PAGE:
            return
        last = f"({page[-1][0].decode()}"


def find(client: RedisClient, stream: str, letter_id: str, run_id: str) -> tuple[DeadLetter, bytes]:
    """A letter of a run and its payload. Raises NotFound (dead_letter_not_found)."""
    page = client.xrange(redis_keys.dead_letters(stream), min=letter_id, max=letter_id)
    payload = client.hget(redis_keys.dead_letter_payloads(stream), letter_id)
    found = [letter for letter in (_letter(stream, raw) for raw in page) if letter.run_id == run_id]
    if not found or payload is None:
        raise NotFound(f"there is no dead letter {letter_id} on {stream}", code="dead_letter_not_found")
    return found[0], payload


def redrive(client: RedisClient, letter: DeadLetter) -> bool:
    """Put the entry back at the end of its stream, counted for its run again; False when it is no letter any more.

    Raises NotFound (unknown_run) when its run is deleted.
    """
    run_id, stream = letter.run_id, letter.stream
    counts = redis_keys.entries_in_flight(run_id), redis_keys.dead_letter_counts(run_id)
    keys = (stream, *_kept(stream), *counts, redis_keys.run_spec(run_id))
    moved = client.eval(scripts.REDRIVE, len(keys), *keys, letter.letter_id)
    if moved == -1:
        raise NotFound(f"there is no run {run_id}", code="unknown_run")
    if moved:
        log.info("dead letter redriven", stream=stream, letter=letter.letter_id, run=run_id)
    return bool(moved)


def drop(client: RedisClient, stream: str, letter_ids: Sequence[str]) -> int:
    """Forget letters; their run goes on counting them as lost. Returns how many were there."""
    kept = _kept(stream)
    return cast(int, client.eval(scripts.DROP, len(kept), *kept, *letter_ids)) if letter_ids else 0


def drop_run(client: RedisClient, streams: Sequence[str], run_id: str) -> int:
    """Forget all letters of a run on streams that runs share."""
    return sum(drop(client, name, [letter.letter_id for letter in newest(client, name, run_id)]) for name in streams)


def _kept(stream: str) -> tuple[str, str, str]:
    payloads, totals = redis_keys.dead_letter_payloads(stream), redis_keys.dead_letter_totals(stream)
    return redis_keys.dead_letters(stream), payloads, totals


def _letter(stream: str, raw: StreamEntry) -> DeadLetter:
    letter_id, fields = raw
    return DeadLetter(
        letter_id.decode(),
        stream,
        fields.get(b"run", b"").decode(),
        fields[b"reason"].decode(errors="replace"),
        int(fields[b"deliveries"]),
        int(fields[b"at_unix_ms"]),
        int(fields.get(b"bytes", 0)),
    )


def show_none(stream: str) -> None:
    """Export the stream's count from 0 on: of one that appears with the first letter nobody sees an increase."""
    metrics.DEAD_LETTERS.labels(stream=_label(stream))


def _label(stream: str) -> str:
    return stream.rsplit(":", 1)[-1]
