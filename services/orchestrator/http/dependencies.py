"""What the routers share: the desk of a request, documents with an ETag, the bounds of a page."""

from __future__ import annotations

from typing import Annotated

from blake3 import blake3
from fastapi import Depends, Path, Query, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from spo.errors import NotFound


async def _context(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


ContextOf = Annotated[AppContext, Depends(_context)]
PrincipalOf = Annotated[Principal, Depends(_principal)]


async def _own_job(
    context: ContextOf,
    principal: PrincipalOf,
    job_id: Annotated[str, Path(pattern=r"^job_[0-9A-HJKMNP-TV-Z]{26}$", description="Id of a job.")],
) -> str:
    """Another tenant's job is as absent as one that never was."""
    if not principal.is_admin and await run_in_threadpool(context.jobs.tenant, job_id) != principal.tenant:
        raise NotFound(f"there is no job {job_id}", code="job_not_found")
    return job_id


JobId = Annotated[str, Depends(_own_job)]
Limit = Annotated[int, Query(ge=1, le=1000)]


def with_etag(request: Request, document: BaseModel, status: int = 200, location: str = "") -> Response:
    """The document as JSON with its ETag; 304 when the caller has it already."""
    body = document.model_dump_json().encode()
    headers = {"ETag": f'"{blake3(body).hexdigest(16)}"', "Cache-Control": "no-cache"}
    if location:
        headers["Location"] = location
    if status == 200 and headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
