"""The history of a job: pages of JSON, or live as server-sent events that resume after Last-Event-ID."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

import redis.asyncio
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from services.orchestrator import schemas
from services.orchestrator.api.answers import DeskOf, JobId, Limit
from services.orchestrator.desk import Desk
from services.orchestrator.jobs import Event, event_of
from services.orchestrator.states import TERMINAL
from spo import redis_keys

router = APIRouter(prefix="/v1/jobs", tags=["events"])

HEARTBEAT_SECONDS = 15
BLOCK_MS = 1000
BATCH = 200


@router.get(
    "/{job_id}/events",
    response_model=schemas.EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    desk: DeskOf,
    job_id: JobId,
    after_seq: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Limit = 500,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,15}$")] = None,
) -> Response:
    """Events after a sequence number; `Accept: text/event-stream` follows them live until the job has ended."""
    await run_in_threadpool(desk.jobs.state, job_id)
    if "text/event-stream" not in accept:
        return JSONResponse(await run_in_threadpool(_history, desk, job_id, after_seq, limit))
    start = int(last_event_id) if last_event_id is not None else after_seq
    stream = _follow(request.app.state.redis, desk, job_id, start)
    return EventSourceResponse(stream, ping=HEARTBEAT_SECONDS, headers={"Cache-Control": "no-store"})


def _history(desk: Desk, job_id: str, after_seq: int, limit: int) -> dict[str, Any]:
    found = desk.jobs.events(job_id, after_seq, limit)
    return {
        "items": [asdict(event) for event in found],
        "next_cursor": str(found[-1].seq) if len(found) == limit else None,
    }


async def _follow(client: redis.asyncio.Redis, desk: Desk, job_id: str, seq: int) -> AsyncIterator[ServerSentEvent]:
    key = redis_keys.job_events(job_id)
    while not desk.stop.is_set():
        try:
            replies: Any = await client.xread({key: f"{seq}-0"}, count=BATCH, block=BLOCK_MS)
        except redis.RedisError:
            # The listener keeps its connection; it misses nothing, the next read goes on after `seq`.
            await asyncio.sleep(1)
            continue
        for event in _decode(replies):
            seq = event.seq
            yield ServerSentEvent(json.dumps(asdict(event)), id=str(event.seq))
            if event.kind == "state" and event.body["to"] in TERMINAL:
                return


def _decode(replies: Any) -> list[Event]:
    # Under RESP2 the reply is a list of pairs, under RESP3 a mapping.
    batches = replies.values() if isinstance(replies, dict) else [entries for _, entries in replies or []]
    flat = (entries[0] if entries and isinstance(entries[0], list) else entries for entries in batches)
    return [event_of(entry) for entries in flat for entry in entries]
