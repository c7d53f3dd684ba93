"""The history of a job: pages of JSON, or live as server-sent events that resume after Last-Event-ID."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http.dependencies import ContextDep, JobId
from services.orchestrator.http.live_events import EventStream, LiveEvents

router = APIRouter(prefix="/v1/jobs", tags=["events"])


class EventQuery(BaseModel):
    after_seq: int = Field(0, ge=0, le=2**53)
    limit: int = Field(500, ge=1, le=1000)


class EventHeaders(BaseModel):
    accept: str = ""
    last_event_id: str | None = Field(None, pattern=r"^[0-9]{1,15}$")


@router.get(
    "/{job_id}/events",
    response_model=schemas.EventPage,
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
