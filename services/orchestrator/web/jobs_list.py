"""The list of jobs: pages by cursor, filters, progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator import views
from services.orchestrator.api.answers import CallerOf, DeskOf
from services.orchestrator.desk import Desk
from services.orchestrator.job_search import find_jobs
from services.orchestrator.listing import JobFilter
from services.orchestrator.states import JobState
from services.orchestrator.web.rendering import is_part, show
from spo import redis_keys

router = APIRouter()

PAGE_LENGTH = 50


@router.get("/")
def show_jobs(
    request: Request,
    desk: DeskOf,
    caller: CallerOf,
    status: Annotated[str, Query(pattern=f"^({'|'.join(JobState)})?$")] = "",
    label: Annotated[str, Query(max_length=800)] = "",
    q: Annotated[str, Query(max_length=200)] = "",
    cursor: Annotated[str, Query(pattern=r"^\d{0,15}$")] = "",
) -> Response:
    """The jobs, newest first."""
    labels = [label.strip()] if label.strip() else []
    wanted = JobFilter([JobState(status)] if status else [], labels, tenant=caller.sees_tenant)
    page = find_jobs(desk.jobs, wanted, q.strip(), cursor or None, PAGE_LENGTH)
    chosen = {"status": status, "label": label, "q": q}
    kept = {name: value for name, value in chosen.items() if value}
    older = urlencode({**kept, "cursor": page.next_cursor}) if page.next_cursor else ""
    facts = {
        "jobs": _lines(desk, page.job_ids),
        "older": older,
        "newest": urlencode(kept),
        "cursor": cursor,
        "chosen": chosen,
        "states": list(JobState),
        # How many jobs others have is not everybody's business.
        "counts": desk.jobs.counts() if caller.sees_tenant is None else {},
    }
    return show(request, "jobs_table.html" if is_part(request) else "jobs.html", **facts)


def _lines(desk: Desk, job_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The jobs in one line each, with how many steps they are to take."""
    summaries = views.job_summaries(desk, job_ids)
    specs: Any = desk.redis.mget([redis_keys.run_spec(each.id) for each in summaries]) if summaries else []
    return [
        {**summary.model_dump(), "steps": json.loads(spec)["trainer"]["steps"] if spec else 0}
        for summary, spec in zip(summaries, specs, strict=True)
    ]
