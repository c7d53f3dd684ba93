"""Continual jobs: a served model that is trained from stored experience by a schedule and a gate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel

from services.orchestrator.container import AppContext
from services.orchestrator.http.api.experience import check_import_name
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.serving.continual.definition import NAME, ContinualSpec
from services.orchestrator.serving.continual.rounds import ContinualJob, Round
from spo.errors import InvalidInput

router = APIRouter(prefix="/v1/continual", tags=["continual jobs"])

Name = Annotated[str, Path(pattern=NAME, description="Name of a continual job, unique within the tenant.")]


class RoundComparison(BaseModel):
    """Mean pass@1 over `problems` of what was served and of the new version, their difference and its interval."""

    served: float
    candidate: float
    gain: float
    low: float
    high: float
    problems: int


class RoundSource(BaseModel):
    """A source of feedback: mean |Q_T - r| in reward units, how much above the others' median, and whether that is bad.

    excess_error: the standard error of the excess over training steps.
    """

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


class ContinualRound(BaseModel):
    """One round; learned_from: rows of each stored run when it began; served: its version was put in service."""

    number: int
    state: str
    parent_job: str
    parent_version: int
    job_id: str
    version: int
    learned_from: dict[str, int]
    evaluations: list[str]
    comparison: RoundComparison | None
    reason: str
    began_at: str
    ended_at: str
    sources: list[RoundSource]


class ContinualSummary(BaseModel):
    """waits: what keeps it from going on, beside its schedule; waits_since: when that began; both "" for nothing."""

    name: str
    tenant: str
    spec: dict[str, object]
    created_at: str
    waits: str
    waits_since: str


class ContinualDetail(ContinualSummary):
    """new_trajectories: stored since its newest round began; round_wanted: somebody asked for one that is to begin."""

    new_trajectories: int
    round_wanted: bool
    history: list[ContinualRound]


class ContinualList(BaseModel):
    items: list[ContinualSummary]


@router.put("/{name}")
def put_continual(
    context: ContextDep, principal: PrincipalDep, name: Name, body: ContinualSpec, response: Response
) -> ContinualDetail:
    """Make a continual job or change it; the served model that it names must be there."""
    if not principal.may("jobs:write"):
        raise InvalidInput("this key lacks the scope jobs:write", code="forbidden")
    serving = context.served_models.get(principal.tenant, body.serves)
    context.round_jobs.check_overrides(serving.job_id, body)
    context.require_usable(body.gate.tasks, principal.sees_tenant)
    if body.traffic:
        check_import_name(context, principal, body.traffic.name, "traffic")
    is_new = all(job.name != name for job in context.continual.all(principal.tenant))
    quota = principal.max_active_jobs
    wanted = ContinualJob(name, principal.tenant, principal.name, body, admin=principal.is_admin, max_active_jobs=quota)
    made = context.continual.put(wanted)
    response.status_code = 201 if is_new else 200
    return _detail(context, made)


@router.get("")
def list_continual(context: ContextDep, principal: PrincipalDep) -> ContinualList:
    """All of the tenant, by name."""
    return ContinualList(items=[_summary(context, job) for job in context.continual.all(principal.sees_tenant)])


@router.get("/{name}")
def get_continual(context: ContextDep, principal: PrincipalDep, name: Name) -> ContinualDetail:
    """One with its rounds, newest first."""
    return _detail(context, context.continual.get(name, principal.sees_tenant))


@router.post("/{name}/rounds", status_code=202)
def begin_round(context: ContextDep, principal: PrincipalDep, name: Name) -> ContinualDetail:
    """Begin a round as soon as none is under way and there is anything new, whatever the schedule says."""
    job = context.continual.get(name, principal.sees_tenant)
    context.continual.want_round(job)
    return _detail(context, job)


@router.delete("/{name}", status_code=204)
def delete_continual(context: ContextDep, principal: PrincipalDep, name: Name) -> None:
    """Forget it and its rounds; jobs, weights and what is served stay."""
    context.continual.delete(context.continual.get(name, principal.sees_tenant))


def _summary(context: AppContext, job: ContinualJob) -> ContinualSummary:
    wait = context.continual.wait_of(job)
    return ContinualSummary(
        name=job.name,
        tenant=job.tenant,
        spec=job.spec.model_dump(mode="json"),
        created_at=job.created_at,
        waits=wait.reason,
        waits_since=wait.since,
    )


def _detail(context: AppContext, job: ContinualJob) -> ContinualDetail:
    rounds = context.continual.rounds(job)
    new = context.continual_loop.experience.new_rows(job, rounds)
    return ContinualDetail(
        **dict(_summary(context, job)),
        new_trajectories=new,
        round_wanted=context.continual.is_round_wanted(job),
        history=list(map(_shown, rounds)),
    )


def _shown(each: Round) -> ContinualRound:
    return ContinualRound(
        **{name: value for name, value in asdict(each).items() if name not in ("overrides", "parent_change")}
    )
