"""What routers take from a request: the application's context, who asks, ids and bounds of pages."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request
from starlette.concurrency import run_in_threadpool

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http.threads import SharedThreads
from spo.errors import NotFound


async def _context(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def checks_of(request: Request) -> SharedThreads:
    """The threads for checks of specs."""
    checks: SharedThreads = request.app.state.checks
    return checks


ContextDep = Annotated[AppContext, Depends(_context)]
PrincipalDep = Annotated[Principal, Depends(_principal)]
JOB_ID_PATTERN = r"^job_[0-9A-HJKMNP-TV-Z]{26}$"


async def _own_job(
    context: ContextDep,
    principal: PrincipalDep,
    job_id: Annotated[str, Path(pattern=JOB_ID_PATTERN, description="Id of a job.")],
) -> str:
    if not principal.is_admin:
        await run_in_threadpool(require_own_job, context, principal, job_id)
    return job_id


def require_own_job(context: AppContext, principal: Principal, job_id: str) -> None:
    """Raises NotFound for another tenant's job as for one that never was, so that nobody can tell which it is."""
    if principal.is_admin:
        return
    try:
        tenant = context.jobs.tenant(job_id)
    except NotFound:
        raise context.watch.absent(job_id, principal.tenant) from None
    if tenant != principal.tenant:
        raise NotFound(f"there is no job {job_id}", code="job_not_found")


JobId = Annotated[str, Depends(_own_job)]
PromptId = Annotated[str, Path(pattern=r"^[0-9a-f]{1,128}$")]
TrajectoryId = Annotated[str, Path(pattern=r"^traj_[0-9A-Za-z]{1,64}$")]

RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"
Limit = Annotated[int, Query(ge=1, le=1000)]
PolicyVersion = Annotated[int | None, Query(ge=0, le=2**53, description="Weight version; default: the newest, 0: pi0.")]
