"""Events, log lines and dead letters of a job over REST: pages of JSON, or live as server-sent events.

Events of jobs as they happen, for any number of listeners: one reader per job, whose newest events all share.
A listener keeps only the last sequence number it sent. It takes what follows from the shared tail, and from
Redis what the tail no longer holds, so it misses and repeats nothing however slow it is, and needs no memory
beyond the buffer of its connection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import redis.asyncio
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext, ContextDep, JobId
from services.orchestrator.jobs import JobEvent, JobStore, event_of
from services.orchestrator.pipeline import SHARED_STREAMS, streams_of
from services.orchestrator.replicas import POOLS
from spo import api
from spo.api import (
    DeadLetterDetail,
    DeadLetterPage,
    DeadLetterSummary,
    DeadLetterTotals,
    Redriven,
)
from spo.errors import Conflict, NotFound
from spo.messaging.redis_client import RedisClient, StreamEntry, StreamReplies
from spo.messaging.streams import recovery
from spo.messaging.streams.recovery import DeadLetter
from spo.observability import get_logger
from spo.spec.section import TERMINAL
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest

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

router = APIRouter(prefix="/v1/jobs", tags=["events"])

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS = ("debug", "info", "warning", "error", "critical")
# A filter that matches next to nothing reads so many lines of a page before it ends.
MAX_SCANNED = 20_000
SCAN = 1000

logs_router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

# What an entry of a stream is.
MESSAGES: dict[str, type[Message]] = {
    "prompts": PromptGroup,
    "rollouts": RolloutGroup,
    "verifier_rollouts": RolloutGroup,
    "verdicts": RolloutGroup,
    "estimates": EstimateRequest,
    "pivotal": PivotalRequest,
}
# Larger messages are only shown by the beginning of their bytes.
MAX_SHOWN_BYTES = 4 << 20
MAX_BASE64_BYTES = 64 << 10

dead_letters_router = APIRouter(prefix="/v1", tags=["dead letters"])

_ID = r"(prompts|rollouts|verifier_rollouts|verdicts|estimates|pivotal)-\d{1,16}-\d{1,16}"
LetterId = Annotated[str, Path(pattern=f"^{_ID}$")]


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


class EventQuery(BaseModel):
    after_seq: int = Field(0, ge=0, le=2**53)
    limit: int = Field(500, ge=1, le=1000)


class EventHeaders(BaseModel):
    accept: str = ""
    last_event_id: str | None = Field(None, pattern=r"^[0-9]{1,15}$")


@router.get(
    "/{job_id}/events",
    response_model=api.EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    query: Annotated[EventQuery, Query()],
    headers: Annotated[EventHeaders, Header()],
) -> Response:
    """Events after a sequence number; `Accept: text/event-stream` follows them live until the job has ended."""
    await run_in_threadpool(context.jobs.state, job_id)
    if "text/event-stream" not in headers.accept:
        return JSONResponse(await run_in_threadpool(_history, context, job_id, query))
    live: LiveEvents = request.app.state.live
    authorization = request.headers.get("authorization", "")

    async def is_admitted() -> bool:
        return await run_in_threadpool(context.authenticator.admits, authorization)

    since = query.after_seq if headers.last_event_id is None else int(headers.last_event_id)
    return EventStream(live.follow(job_id, since, is_admitted))


def _history(context: AppContext, job_id: str, query: EventQuery) -> dict[str, object]:
    found = context.jobs.events(job_id, query.after_seq, query.limit)
    return {
        "items": [asdict(event) for event in found],
        "next_cursor": str(found[-1].seq) if len(found) == query.limit else None,
    }


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted: of at least a level, of one service or (empty) of all."""

    service: str = ""
    level: LogLevel = "info"

    def takes(self, line: api.LogLine) -> bool:
        return line.level in LEVELS[LEVELS.index(self.level) :] and self.service in ("", line.service)


def log_page(context: AppContext, job_id: str, wanted: LogFilter, limit: int, cursor: str) -> api.LogPage:
    """A page of lines, newest first. Raises NotFound."""
    context.jobs.state(job_id)
    found: list[api.LogLine] = []
    scanned, newest = 0, f"({cursor}" if cursor else "+"
    while scanned < MAX_SCANNED:
        entries = context.redis.xrevrange(own_keys.job_logs(job_id), max=newest, count=SCAN)
        for entry_id, fields in entries:
            line = _line(fields)
            if wanted.takes(line):
                found.append(line)
                if len(found) == limit:
                    return api.LogPage(items=found, next_cursor=entry_id.decode())
        if len(entries) < SCAN:
            break
        scanned += len(entries)
        newest = f"({entries[-1][0].decode()}"
    return api.LogPage(items=found, next_cursor=None)


def _line(fields: dict[bytes, bytes]) -> api.LogLine:
    text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    try:
        parsed = json.loads(text["line"])
    except ValueError:
        # Cut off: the line was longer than a line may be.
        parsed = {"event": text["line"]}
    return api.LogLine(
        service=text["service"],
        replica_id=text["replica_id"],
        level="warning" if text["level"] == "warn" else "error" if text["level"] == "exception" else text["level"],
        at_unix_ms=int(text["at_unix_ms"]),
        fields=parsed if isinstance(parsed, dict) else {"event": parsed},
    )


class LogQuery(BaseModel):
    service: str = Field("", pattern=f"^({'|'.join(POOLS)})?$")
    level: LogLevel = "info"
    limit: int = Field(200, ge=1, le=1000)
    cursor: str = Field("", pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")


@logs_router.get("/{job_id}/logs")
def logs(context: ContextDep, job_id: JobId, query: Annotated[LogQuery, Query()]) -> api.LogPage:
    """Lines of at least this level, newest first; the latest 20,000 of a job are kept."""
    return log_page(context, job_id, LogFilter(query.service, query.level), query.limit, query.cursor)


@dataclass(frozen=True)
class DeadLetters:
    """The dead letters of a job; run_id "": of entries that name no job. A letter's id names its stream."""

    client: RedisClient
    run_id: str

    @property
    def streams(self) -> dict[str, str]:
        """The streams whose letters are looked at, by name."""
        if self.run_id:
            return streams_of(self.run_id)
        return {name: stream for name, (stream, _) in SHARED_STREAMS.items()}

    def page(self, stream: str, limit: int, cursor: str) -> DeadLetterPage:
        """The newest letters of one stream, or of all one after the other."""
        names = [name for name in self.streams if stream in ("", name)]
        at, before = cursor.split("-", 1) if cursor else ("", "")
        if at in names:
            names = names[names.index(at) :]
        letters = (
            _summary(name, letter)
            for name in names
            for letter in recovery.newest(self.client, self.streams[name], self.run_id, before if name == at else "")
        )
        found = list(islice(letters, limit))
        next_cursor = found[-1].id if len(found) == limit else None
        return DeadLetterPage(items=found, totals=self._totals(), next_cursor=next_cursor)

    def detail(self, letter_id: str) -> DeadLetterDetail:
        """One letter with what it says. Raises NotFound."""
        name, letter, payload = self._find(letter_id)
        return DeadLetterDetail(
            **_summary(name, letter).model_dump(),
            message=_decoded(name, payload),
            payload_base64=base64.b64encode(payload[:MAX_BASE64_BYTES]).decode(),
        )

    def redrive(self, letter_id: str) -> bool:
        """Put an entry back on its stream; False when it is no letter any more. Raises NotFound for a deleted job."""
        try:
            _, letter, _ = self._find(letter_id)
        except NotFound:
            return False
        return recovery.redrive(self.client, letter)

    def drop(self, letter_id: str) -> None:
        """Forget a letter. Raises NotFound."""
        _, letter, _ = self._find(letter_id)
        recovery.drop(self.client, letter.stream, [letter.letter_id])

    def _find(self, letter_id: str) -> tuple[str, DeadLetter, bytes]:
        name, entry_id = letter_id.split("-", 1)
        if name not in self.streams:
            raise NotFound(f"there is no dead letter {letter_id}", code="dead_letter_not_found")
        letter, payload = recovery.find(self.client, self.streams[name], entry_id, self.run_id)
        return name, letter, payload

    def _totals(self) -> dict[str, DeadLetterTotals]:
        counts = recovery.counts_of(self.client, self.run_id) if self.run_id else {}
        return {
            name: DeadLetterTotals(
                given_up=counts[stream].count if stream in counts else 0,
                gone=recovery.gone_of(self.client, stream),
            )
            for name, stream in self.streams.items()
        }


def _summary(name: str, letter: DeadLetter) -> DeadLetterSummary:
    return DeadLetterSummary(
        id=f"{name}-{letter.letter_id}",
        stream=name,
        job_id=letter.run_id or None,
        reason=letter.reason,
        deliveries=letter.deliveries,
        at_unix_ms=letter.at_unix_ms,
        size_bytes=letter.size_bytes,
    )


def _decoded(name: str, payload: bytes) -> dict[str, object] | None:
    if len(payload) > MAX_SHOWN_BYTES:
        return None
    try:
        return dict(MessageToDict(MESSAGES[name].FromString(payload), preserving_proto_field_name=True))
    except (DecodeError, ValueError):
        return None


class DeadLetterQuery(BaseModel):
    stream: Literal["", "prompts", "rollouts", "verifier_rollouts", "verdicts", "estimates", "pivotal"] = ""
    limit: int = Field(200, ge=1, le=1000)
    cursor: str = Field("", pattern=f"^({_ID})?$")


@dead_letters_router.get("/jobs/{job_id}/dead-letters")
def list_dead_letters(context: ContextDep, job_id: JobId, query: Annotated[DeadLetterQuery, Query()]) -> DeadLetterPage:
    """Entries of the job that were given up on, the newest of each stream first; the oldest letters give way."""
    context.jobs.state(job_id)
    return DeadLetters(context.redis, job_id).page(query.stream, query.limit, query.cursor)


@dead_letters_router.get("/jobs/{job_id}/dead-letters/{letter_id}")
def show_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> DeadLetterDetail:
    """One of them, with what it says."""
    context.jobs.state(job_id)
    return DeadLetters(context.redis, job_id).detail(letter_id)


@dead_letters_router.post("/jobs/{job_id}/dead-letters/{letter_id}/redrive")
def redrive_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> Redriven:
    """Put the entry back at the end of its stream, to be handled again; asked for twice it happens once."""
    state = context.jobs.state(job_id)
    if state in TERMINAL:
        raise Conflict(f"a job that is {state} has no use for its dead letters", code="illegal_transition")
    return Redriven(redriven=DeadLetters(context.redis, job_id).redrive(letter_id))


@dead_letters_router.delete("/jobs/{job_id}/dead-letters/{letter_id}", status_code=204)
def drop_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> None:
    """Forget the entry; the job goes on counting it as given up."""
    context.jobs.state(job_id)
    DeadLetters(context.redis, job_id).drop(letter_id)


@dead_letters_router.get("/dead-letters")
def list_jobless_dead_letters(context: ContextDep, query: Annotated[DeadLetterQuery, Query()]) -> DeadLetterPage:
    """Entries that were given up on and name no job: malformed ones, mostly. For admins."""
    return DeadLetters(context.redis, "").page(query.stream, query.limit, query.cursor)


@dead_letters_router.get("/dead-letters/{letter_id}")
def show_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> DeadLetterDetail:
    """One of them, with what it says. For admins."""
    return DeadLetters(context.redis, "").detail(letter_id)


@dead_letters_router.post("/dead-letters/{letter_id}/redrive")
def redrive_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> Redriven:
    """Put the entry back at the end of its stream; asked for twice it happens once. For admins."""
    return Redriven(redriven=DeadLetters(context.redis, "").redrive(letter_id))


@dead_letters_router.delete("/dead-letters/{letter_id}", status_code=204)
def drop_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> None:
    """Forget the entry. For admins."""
    DeadLetters(context.redis, "").drop(letter_id)
