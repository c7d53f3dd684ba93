"""The history of a job: pages of JSON, or live as server-sent events that resume after Last-Event-ID."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http.dependencies import ContextOf, JobId, Limit
from services.orchestrator.http.live_events import EventStream, LiveEvents

router = APIRouter(prefix="/v1/jobs", tags=["events"])


@router.get(
    "/{job_id}/events",
    response_model=schemas.EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    request: Request,
    context: ContextOf,
    job_id: JobId,
    after_seq: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Limit = 500,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,15}$")] = None,
) -> Response:
    """Events after a sequence number; `Accept: text/event-stream` follows them live until the job has ended."""
    await run_in_threadpool(context.jobs.state, job_id)
    if "text/event-stream" not in accept:
        return JSONResponse(await run_in_threadpool(_history, context, job_id, after_seq, limit))
    live: LiveEvents = request.app.state.live
    authorization = request.headers.get("authorization", "")

    async def is_admitted() -> bool:
        return await run_in_threadpool(context.authenticator.admits, authorization)

    since = int(last_event_id) if last_event_id is not None else after_seq
    return EventStream(live.follow(job_id, since, is_admitted))


def _history(context: AppContext, job_id: str, after_seq: int, limit: int) -> dict[str, Any]:
    found = context.jobs.events(job_id, after_seq, limit)
    return {
        "items": [asdict(event) for event in found],
        "next_cursor": str(found[-1].seq) if len(found) == limit else None,
    }
