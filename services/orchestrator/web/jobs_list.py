"""The list of jobs: pages by cursor, filters, progress."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator import views
from services.orchestrator.api.answers import CallerOf, DeskOf
from services.orchestrator.desk import Desk
from services.orchestrator.job_search import JobFilter, find_jobs
from services.orchestrator.states import JobState
from services.orchestrator.web.rendering import is_part, show

router = APIRouter()

PAGE_LENGTH = 50


@router.get("/")
def show_jobs(
    request: Request,
    desk: DeskOf,
    caller: CallerOf,
    status: Annotated[str, Query(pattern=f"^({'|'.join(JobState)})?$")] = "",
    label: Annotated[str, Query(max_length=600)] = "",
    q: Annotated[str, Query(max_length=200)] = "",
    cursor: Annotated[str, Query(pattern=r"^\d{0,15}$")] = "",
) -> Response:
    """The jobs, newest first."""
    wanted = JobFilter([JobState(status)] if status else [], label.strip(), q.strip())
    page = find_jobs(desk.jobs, wanted, cursor or None, PAGE_LENGTH, caller.sees_tenant)
    chosen = {"status": status, "label": label, "q": q}
    kept = {name: value for name, value in chosen.items() if value}
    older = urlencode({**kept, "cursor": page.next_cursor}) if page.next_cursor else ""
    facts = {
        "jobs": [_line(desk, job_id) for job_id in page.job_ids],
        "older": older,
        "newest": urlencode(kept),
        "cursor": cursor,
        "chosen": chosen,
        "states": list(JobState),
        # How many jobs others have is not everybody's business.
        "counts": desk.jobs.counts() if caller.sees_tenant is None else {},
    }
    return show(request, "jobs_table.html" if is_part(request) else "jobs.html", **facts)


def _line(desk: Desk, job_id: str) -> dict[str, Any]:
    spec = desk.jobs.spec(job_id)
    return {**views.job_summary(desk, job_id).model_dump(), "steps": spec.trainer.steps}
