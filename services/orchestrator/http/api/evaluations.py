"""Ask how good a weight version or checkpoint is, on any task set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.evaluation.requests import RequestedEvaluation
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep, require_own_job
from services.orchestrator.jobs.checkpoints import recorded_checkpoints
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.spec.job_spec import EvaluationSpec, TasksSpec
from spo.spec.section import Temperature, TopP

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])

EvaluationId = Annotated[str, Path(pattern=r"^eval_[0-9A-HJKMNP-TV-Z]{26}$")]


class EvaluationRequest(BaseModel):
    """What to evaluate and how. Without version and checkpoint_step: the newest version; 0 is the reference."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    job_id: str = Field(pattern=r"^job_[0-9A-HJKMNP-TV-Z]{26}$")
    version: int | None = Field(default=None, ge=0, le=2**53)
    checkpoint_step: int | None = Field(default=None, ge=1, le=2**53, description="The weights of this checkpoint.")
    tasks: TasksSpec | None = Field(default=None, description="Whose held-out problems; default: the job's.")
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    ks: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(default=(1, 10), min_length=1, max_length=64)


class Evaluation(BaseModel):
    id: str
    job_id: str
    version: int
    tasks: dict[str, object] | None
    protocol: dict[str, object]
    state: str
    created_at: str
    result: dict[str, object] | None
    failure: dict[str, str]


class EvaluationList(BaseModel):
    """Without the tables of problems."""

    items: list[Evaluation]


@router.post("", status_code=202)
def request_evaluation(
    context: ContextDep, principal: PrincipalDep, body: EvaluationRequest, response: Response
) -> Evaluation:
    """Queue an evaluation; it is carried out once its job has replicas, or no job wants any."""
    context.jobs.state(body.job_id)
    require_own_job(context, principal, body.job_id)
    tasks = context.served_judges.pinned(body.tasks, principal.tenant) if body.tasks else None
    context.require_usable(tasks, principal.sees_tenant)
    if body.samples < max(body.ks):
        message = f"pass@{max(body.ks)} needs at least {max(body.ks)} samples"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation("/ks", message),))
    protocol = EvaluationSpec(
        samples=body.samples,
        temperature=body.temperature,
        top_p=body.top_p,
        ks=body.ks,
    )
    requested = context.evaluations.request(body.job_id, _version(context, body), tasks, protocol)
    response.headers["Location"] = f"/v1/evaluations/{requested.id}"
    return _shown(requested)


@router.get("")
def list_evaluations(context: ContextDep, principal: PrincipalDep) -> EvaluationList:
    """Newest first."""
    found = [requested for requested in context.evaluations.requests.all() if _may_see(principal, requested)]
    for requested in found:
        if requested.result:
            requested.result.pop("per_problem", None)
    return EvaluationList(items=[_shown(requested) for requested in found])


@router.get("/{evaluation_id}")
def get_evaluation(context: ContextDep, principal: PrincipalDep, evaluation_id: EvaluationId) -> Evaluation:
    """One evaluation with its table of problems."""
    return _shown(_visible(context, principal, evaluation_id))


@router.post("/{evaluation_id}/cancel")
def cancel_evaluation(context: ContextDep, principal: PrincipalDep, evaluation_id: EvaluationId) -> Evaluation:
    """End an evaluation without a result; one that has ended otherwise is a conflict."""
    _visible(context, principal, evaluation_id)
    return _shown(context.evaluations.requests.cancel(evaluation_id, f"{principal.name} cancelled it"))


def _visible(context: AppContext, principal: Principal, evaluation_id: str) -> RequestedEvaluation:
    found = context.evaluations.requests.get(evaluation_id)
    if not _may_see(principal, found):
        raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
    return found


def _version(context: AppContext, body: EvaluationRequest) -> int:
    if body.version is not None:
        return body.version
    if body.checkpoint_step is None:
        return max((int(published["version"]) for published in context.weights.versions(body.job_id)), default=0)
    heads = {head.step: head for head in recorded_checkpoints(context.redis, body.job_id)}
    if body.checkpoint_step not in heads:
        message = f"job {body.job_id} has checkpoints at {sorted(heads) or 'no step'}"
        raise InvalidInput(
            message, code="invalid_evaluation", violations=(FieldViolation("/checkpoint_step", message),)
        )
    return heads[body.checkpoint_step].weight_version


def _shown(requested: RequestedEvaluation) -> Evaluation:
    return Evaluation.model_validate(asdict(requested))


def _may_see(principal: Principal, requested: RequestedEvaluation) -> bool:
    return principal.sees_tenant in (None, requested.tenant)
