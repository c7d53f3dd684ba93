"""Server-rendered pages: the jobs, and one job live. Everything a model wrote is escaped by the templates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.templating import Jinja2Templates

from services.orchestrator import views
from services.orchestrator.api.answers import CallerOf, DeskOf, JobId
from services.orchestrator.states import VERBS, JobState
from spo.errors import SpoError

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
PAGE_LENGTH = 50
LATEST_TRAJECTORIES = 12

router = APIRouter(include_in_schema=False)
templates = Jinja2Templates(FOLDER / "templates")


@router.get("/")
def show_jobs(
    request: Request,
    desk: DeskOf,
    caller: CallerOf,
    status: JobState | None = None,
    cursor: Annotated[str | None, Query(pattern=r"^\d{1,15}$")] = None,
) -> Response:
    """The jobs, newest first."""
    page = desk.jobs.page([status] if status else [], cursor, PAGE_LENGTH, caller.sees_tenant)
    facts = {
        "jobs": views.job_summaries(desk, page.job_ids),
        "next_cursor": page.next_cursor,
        "status": status,
        "counts": desk.jobs.counts() if caller.sees_tenant is None else {},
        "replicas": views.replicas(desk, caller.sees_tenant),
    }
    return templates.TemplateResponse(request, "jobs.html", facts)


@router.get("/jobs/{job_id}")
def show_job(request: Request, desk: DeskOf, caller: CallerOf, job_id: JobId) -> Response:
    """One job; its script keeps it live."""
    job = views.job(desk, job_id)
    verbs = [verb.name for verb in VERBS if job.state in verb.moves]
    facts = {"job": job, "verbs": verbs, **_live_parts(desk, job_id, caller)}
    return templates.TemplateResponse(request, "job.html", facts)


@router.get("/jobs/{job_id}/live")
def show_live_parts(request: Request, desk: DeskOf, caller: CallerOf, job_id: JobId) -> Response:
    """The parts of a job's page that change, rendered again for its script."""
    job = views.job(desk, job_id)
    return templates.TemplateResponse(request, "refresh.html", {"job": job, **_live_parts(desk, job_id, caller)})


def _live_parts(desk: DeskOf, job_id: str, caller: CallerOf) -> dict[str, object]:
    return {
        "replicas": views.replicas(desk, caller.sees_tenant),
        "weights": views.weight_versions(desk, job_id)[-5:][::-1],
        "checkpoints": views.checkpoints(desk, job_id)[-3:][::-1],
        **_trajectories(desk, job_id, caller),
    }


def _trajectories(desk: DeskOf, job_id: str, caller: CallerOf) -> dict[str, object]:
    if not caller.may("trajectories:read"):
        return {"trajectories": [], "trajectories_missing": "this key lacks the scope trajectories:read"}
    try:
        page = views.trajectories(desk, job_id, limit=LATEST_TRAJECTORIES)
    except SpoError as error:
        # The page is worth showing without them.
        return {"trajectories": [], "trajectories_missing": error.message}
    return {"trajectories": page.items, "trajectories_missing": ""}
