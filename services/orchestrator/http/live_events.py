"""Events of jobs as they happen, for any number of listeners: one reader per job, whose newest events all share.

A listener keeps only the last sequence number it sent. It takes what follows from the shared tail, and from
Redis what the tail no longer holds, so it misses and repeats nothing however slow it is, and needs no memory
beyond the buffer of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import redis.asyncio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.events import JobEvent, event_of
from services.orchestrator.jobs.store import JobStore
from spo.messaging.redis_client import StreamEntry, StreamReplies
from spo.observability.logs import get_logger
from spo.spec.job_state import TERMINAL

log = get_logger("events")

BLOCK_MS = 1000
BATCH = 200
KEPT_EVENTS = 1000
# So many listeners that came late or fell behind read from Redis at once.
HISTORY_READS = 8
HEARTBEAT_SECONDS = 15
# A connection that takes nothing for so long is closed; its client resumes with Last-Event-ID.
SEND_SECONDS = 30.0
# A listener whose key was revoked, or whose token expired, is disconnected within this time.
ADMISSION_SECONDS = 15.0


@dataclass(frozen=True)
class Frame:
    """One event as it goes over the wire, encoded once for all listeners."""

    seq: int
    wire: bytes
    is_last: bool


class EventStream(EventSourceResponse):
    """Server-sent events with heartbeats; a connection that takes nothing for send_seconds is closed."""

    def __init__(self, frames: AsyncIterator[bytes], send_seconds: float = SEND_SECONDS) -> None:
        super().__init__(frames, ping=HEARTBEAT_SECONDS, send_timeout=send_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("a listener that took no events was cut off", path=scope["path"])


class _Tail:
    """The newest events of one job; `last` is the newest sequence number, None until the reader has read it."""

    def __init__(self) -> None:
        self.listeners = 0
        self.last: int | None = None
        self.kept: deque[Frame] = deque(maxlen=KEPT_EVENTS)
        self.news = asyncio.Event()
        self.is_closed = False

    def add(self, frames: Sequence[Frame]) -> None:
        self.kept.extend(frames)
        self.last = frames[-1].seq
        self.tell()

    def tell(self) -> None:
        """Wake every listener, and replace the event, so that none misses what comes between its look and its wait."""
        told, self.news = self.news, asyncio.Event()
        told.set()

    def after(self, seq: int) -> list[Frame] | None:
        """The events after seq; None where the tail does not reach back so far."""
        if self.last is None:
            return None
        if seq >= self.last:
            return []
        if not self.kept or self.kept[0].seq > seq + 1:
            return None
        return list(islice(self.kept, seq + 1 - self.kept[0].seq, None))


class LiveEvents:
    """The events of jobs for the listeners of this process."""

    def __init__(self, client: redis.asyncio.Redis, jobs: JobStore, stop: threading.Event) -> None:
        self._client = client
        self._jobs = jobs
        self._stop = stop
        self._tails: dict[str, _Tail] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._history_reads = asyncio.Semaphore(HISTORY_READS)

    async def follow(self, job_id: str, seq: int, is_admitted: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """Every event after seq, encoded, until the job has ended, the process stops or the listener may not listen."""
        tail = self._join(job_id)
        looked = time.monotonic()
        try:
            while not tail.is_closed:
                if time.monotonic() - looked >= ADMISSION_SECONDS:
                    if not await is_admitted():
                        return
                    looked = time.monotonic()
                news = tail.news
                frames = tail.after(seq)
                if frames is None:
                    frames = await self._history(job_id, seq)
                for frame in frames:
                    seq = frame.seq
                    yield frame.wire
                    if frame.is_last:
                        return
                if not frames:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(news.wait(), ADMISSION_SECONDS)
        finally:
            tail.listeners -= 1

    async def close(self) -> None:
        """Wait for the readers, which end by themselves once the process stops."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=2 * BLOCK_MS / 1000)

    def _join(self, job_id: str) -> _Tail:
        tail = self._tails.get(job_id)
        if tail is None:
            tail = self._tails[job_id] = _Tail()
            reader = asyncio.create_task(self._read(job_id, tail))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        tail.listeners += 1
        return tail

    async def _read(self, job_id: str, tail: _Tail) -> None:
        """Fill the tail while anybody listens."""
        key = own_keys.job_events(job_id)
        # The listener that starts this reader has been counted by the time this runs.
        try:
            while tail.listeners and not self._stop.is_set():
                try:
                    if tail.last is None:
                        newest: Any = await self._client.xrevrange(key, count=1)
                        tail.last = event_of(newest[0]).seq if newest else 0
                        tail.tell()
                    replies: Any = await self._client.xread({key: f"{tail.last}-0"}, count=BATCH, block=BLOCK_MS)
                except redis.RedisError:
                    # Listeners stay connected and miss nothing: reading continues after the last event.
                    await asyncio.sleep(1)
                    continue
                frames = [_frame(event_of(entry)) for entry in _entries(replies)]
                if frames:
                    tail.add(frames)
        finally:
            # No await from here on, so nobody can join a tail that is no longer filled.
            del self._tails[job_id]
            tail.is_closed = True
            tail.tell()

    async def _history(self, job_id: str, seq: int) -> list[Frame]:
        try:
            async with self._history_reads:
                events = await run_in_threadpool(self._jobs.events, job_id, seq, BATCH)
        except redis.RedisError:
            await asyncio.sleep(1)
            return []
        return [_frame(event) for event in events]


def _frame(event: JobEvent) -> Frame:
    wire = ServerSentEvent(json.dumps(asdict(event)), id=str(event.seq)).encode()
    return Frame(event.seq, wire, event.kind == "state" and event.body["to"] in TERMINAL)


def _entries(replies: StreamReplies | None) -> list[StreamEntry]:
    if isinstance(replies, dict):
        return [entry for batches in replies.values() for entries in batches for entry in entries]
    return [entry for _, entries in replies or [] for entry in entries]
