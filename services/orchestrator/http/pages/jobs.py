"""The list of jobs: pages by cursor, filters, progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.jobs.listing import JobFilter
from services.orchestrator.jobs.search import find_jobs
from spo import redis_keys
from spo.spec.job_state import JobState

router = APIRouter()

PAGE_LENGTH = 50
# Columns of the list, for the metrics that have no better name.
TITLES = {"reward": "reward", "loss": "loss", "kl_to_reference": "KL"}


class JobsForm(BaseModel):
    """What the list is filtered by; q is words of names."""

    status: str = Field("", pattern=f"^({'|'.join(JobState)})?$")
    label: str = Field("", max_length=800)
    q: str = Field("", max_length=200)
    cursor: str = Field("", pattern=r"^[0-9]{0,15}$")


@router.get("/")
def show_jobs(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    query: Annotated[JobsForm, Query()],
) -> Response:
    """The jobs, newest first."""
    labels = [query.label.strip()] if query.label.strip() else []
    wanted = JobFilter([JobState(query.status)] if query.status else [], labels, tenant=principal.sees_tenant)
    page = find_jobs(context.jobs, wanted, query.q.strip(), query.cursor or None, PAGE_LENGTH)
    chosen = query.model_dump(exclude={"cursor"})
    kept = {name: value for name, value in chosen.items() if value}
    older = urlencode({**kept, "cursor": page.next_cursor}) if page.next_cursor else ""
    lines = _lines(context, page.job_ids)
    facts = {
        "jobs": lines,
        "columns": _columns(lines),
        "older": older,
        "newest": urlencode(kept),
        "cursor": query.cursor,
        "chosen": chosen,
        "states": list(JobState),
        # How many jobs others have is not everybody's business.
        "counts": context.jobs.counts() if principal.sees_tenant is None else {},
    }
    return show(request, "jobs/table.html" if is_part(request) else "jobs/page.html", **facts)


def _columns(lines: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """The metrics that some job of the page has, by their names and titles."""
    known: set[str] = set()
    for line in lines:
        metrics = line["metrics"]
        assert isinstance(metrics, dict)
        known.update(metrics)
    scores = sorted((name for name in known if name.startswith("pass@")), key=lambda name: (len(name), name))
    return [(name, name) for name in scores] + [each for each in TITLES.items() if each[0] in known]


def _lines(context: AppContext, job_ids: Sequence[str]) -> list[dict[str, object]]:
    """The jobs in one line each, with how many steps they are to take."""
    summaries = views.job_summaries(context, job_ids)
    specs = context.redis.mget([redis_keys.run_spec(summary.id) for summary in summaries]) if summaries else []
    return [
        {**summary.model_dump(), "steps": json.loads(spec)["trainer"]["steps"] if spec else 0}
        for summary, spec in zip(summaries, specs, strict=True)
    ]
