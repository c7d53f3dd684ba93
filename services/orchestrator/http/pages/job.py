"""One job: state and controls, curves, who waits for whom, weights, alarms; its evaluations and its logs."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.bottlenecks import job_waits
from services.orchestrator.http.dependencies import ContextDep, JobId, PrincipalDep
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.http.views.dead_letters import DeadLetters
from services.orchestrator.jobs.series import evaluation_results
from services.orchestrator.replicas.registry import POOLS
from spo.errors import SpoError
from spo.spec.job_state import TERMINAL

router = APIRouter(prefix="/jobs/{job_id}")

LATEST_TRAJECTORIES = 6
SHOWN_VERSIONS = 8
SHOWN_ALARMS = 20
LOG_LINES = 200
LETTERS = 100


@router.get("")
def show_job(request: Request, context: ContextDep, principal: PrincipalDep, job_id: JobId) -> Response:
    """One job; its script keeps it live."""
    facts = _live_parts(context, job_id, principal)
    return show(request, "job/page.html", tab="overview", **facts)


@router.get("/live")
def show_live_parts(request: Request, context: ContextDep, principal: PrincipalDep, job_id: JobId) -> Response:
    """The parts of a job's page that change, rendered again."""
    facts = _live_parts(context, job_id, principal)
    return show(request, "job/live.html", swapped=True, **facts)


@router.get("/evaluations")
def show_evaluations(request: Request, context: ContextDep, job_id: JobId) -> Response:
    """pass@k as training went, and what somebody asked for beside."""
    facts = {
        "job": views.job(context, job_id),
        "results": [views.evaluation_brief(result) for result in evaluation_results(context.redis, job_id)][::-1],
        "asked": [asked for asked in context.evaluations.requests.all() if asked.job_id == job_id],
        "failures": context.evaluations.schedule.failures(job_id),
        "attempts": context.settings.evaluation_attempts,
        "versions": [published["version"] for published in context.weights.versions(job_id)][::-1],
    }
    if is_part(request):
        return show(request, "evaluations/tables.html", **facts)
    return show(request, "evaluations/page.html", tab="evaluations", **facts)


@router.get("/logs")
def show_logs(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    service: Annotated[str, Query(pattern=f"^({'|'.join(POOLS)})?$")] = "",
    level: views.LogLevel = "info",
    cursor: Annotated[str, Query(pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> Response:
    """The latest log lines of every service that worked on the job."""
    page = views.logs(context, job_id, views.LogFilter(service, level), LOG_LINES, cursor)
    facts = {"page": page, "service": service, "level": level, "services": POOLS, "cursor": cursor}
    job = views.job(context, job_id)
    if is_part(request):
        return show(request, "logs/lines.html", job=job, **facts)
    return show(request, "logs/page.html", tab="logs", job=job, **facts)


@router.get("/dead-letters")
def show_dead_letters(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    cursor: Annotated[str, Query(pattern=r"^([a-z_]{1,40}-[0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> Response:
    """Entries of the job that were given up on, and why."""
    job = views.job(context, job_id)
    page = DeadLetters(context.redis, job_id).page("", LETTERS, cursor)
    given_up = sum(total.given_up for total in page.totals.values())
    facts = {"job": job, "ended": job.state in TERMINAL, "page": page, "given_up": given_up}
    return show(request, "dead_letters/page.html", tab="dead letters", **facts)


def _live_parts(context: AppContext, job_id: str, principal: Principal) -> dict[str, object]:
    job = views.job(context, job_id)
    return {
        "job": job,
        "ended": job.state in TERMINAL,
        "slow": job_waits(context, job_id, job.state),
        "replicas": [
            replica for replica in views.replicas(context, principal.sees_tenant) if replica.run_id in ("", job_id)
        ],
        "weights": views.weight_versions(context, job_id)[-SHOWN_VERSIONS:][::-1],
        "checkpoints": views.checkpoints(context, job_id)[-SHOWN_VERSIONS:][::-1],
        "alarms": _alarms(context, job_id),
        **_trajectories(context, job_id, principal),
    }


def _alarms(context: AppContext, job_id: str) -> list[dict[str, object]]:
    """Collapse alarms and quarantined batches, latest step first."""
    found = context.redis.hgetall(own_keys.job_alarms(job_id))
    bodies = [json.loads(raw) for raw in found.values() if raw.startswith(b"{")]
    return sorted(bodies, key=lambda body: -int(body["step"]))[:SHOWN_ALARMS]


def _trajectories(context: AppContext, job_id: str, principal: Principal) -> dict[str, object]:
    if not principal.may("trajectories:read"):
        return {"trajectories": [], "trajectories_missing": "this key lacks the scope trajectories:read"}
    try:
        page = views.trajectories(context, job_id, limit=LATEST_TRAJECTORIES)
    except SpoError as error:
        # The page is worth showing without them.
        return {"trajectories": [], "trajectories_missing": error.message}
    return {"trajectories": page.items, "trajectories_missing": ""}
