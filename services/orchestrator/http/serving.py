"""What is served, over REST: names of policies, captured traffic and its feedback, and continual jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import StreamingResponse

from services.orchestrator.capture import Captured, CollectTerms, collect
from services.orchestrator.container import AppContext, ContextDep, Limit, PrincipalDep, lasting
from services.orchestrator.continual import NAME, ContinualJob, ContinualSpec, Round
from services.orchestrator.http.experience import check_import_name, tasks_of
from services.orchestrator.serving import NAME_PATTERN, Change, ServedModel, Target
from spo import api
from spo.errors import FieldViolation, InvalidInput

router = APIRouter(prefix="/v1/served-models", tags=["serving"])

Name = Annotated[str, Path(max_length=100, pattern=NAME_PATTERN, description="The name that clients ask for.")]

capture_router = APIRouter(prefix="/v1", tags=["capture"])

NDJSON = "application/x-ndjson"

continual_router = APIRouter(prefix="/v1/continual", tags=["continual jobs"])

ContinualName = Annotated[str, Path(pattern=NAME, description="Name of a continual job, unique within the tenant.")]


@router.get("")
def list_served_models(context: ContextDep, principal: PrincipalDep) -> api.ServedModelList:
    """Every name that means something now."""
    return _list(context.served_models.all(principal.sees_tenant))


@router.get("/{name}")
def get_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> api.ServedModelView:
    """What a name means now."""
    return _view(context.served_models.get(principal.tenant, name))


@router.put("/{name}")
def publish_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: api.Publication
) -> api.ServedModelView:
    """Make a name mean a weight version of a job, or its newest; what it means already is no change."""
    _check_replicas(context, principal, body.min_replicas)
    change = Change(principal.name, body.note, body.expected_number, body.min_replicas)
    return _view(context.served_models.publish(principal.tenant, name, Target(body.job_id, body.version), change))


@router.delete("/{name}")
def remove_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> api.ServedModelView:
    """Let a name mean nothing; its history stays."""
    return _view(context.served_models.remove(principal.tenant, name, Change(principal.name)))


@router.post("/{name}/rollback")
def roll_back_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: api.Rollback
) -> api.ServedModelView:
    """Serve again what was served before; once more goes back one further."""
    change = Change(principal.name, body.note, body.expected_number)
    return _view(context.served_models.roll_back(principal.tenant, name, change, body.to_number))


@router.get("/{name}/history")
def served_model_history(
    context: ContextDep, principal: PrincipalDep, name: Name, limit: Limit = 100
) -> api.ServedModelList:
    """The changes of a name, newest first: who, when, from what; the last thousand are kept."""
    return _list(context.served_models.history(principal.tenant, name, limit))


def _check_replicas(context: ContextDep, principal: PrincipalDep, replicas: int | None) -> None:
    """Raises InvalidInput: replicas that stay are everybody's cost, and so an administrator's to give."""
    most = context.settings.max_replicas
    if replicas and not principal.is_admin:
        raise InvalidInput("min_replicas needs a key with the scope admin", code="forbidden")
    if replicas and replicas > most:
        violation = FieldViolation("/min_replicas", f"must be at most {most} (SPO_ORCHESTRATOR_MAX_REPLICAS)")
        raise InvalidInput("outside the bounds", code="invalid_request", violations=(violation,))


def _list(found: list[ServedModel]) -> api.ServedModelList:
    return api.ServedModelList(items=[_view(each) for each in found])


def _view(found: ServedModel) -> api.ServedModelView:
    return api.ServedModelView.model_validate(found, from_attributes=True)


@capture_router.post("/feedback")
def give_feedback(context: ContextDep, principal: PrincipalDep, body: api.FeedbackRequest) -> api.FeedbackReceipt:
    """Join a score, thumbs, a test's result or an edited answer to a captured completion; again is no change."""
    said = api.Feedback.model_validate(body.model_dump(exclude={"id", "index"}))
    if said == api.Feedback():
        raise InvalidInput("feedback is a score, thumbs, a test, an edited answer or a comment", code="invalid_request")
    captured = context.captures.give_feedback(principal.tenant, body.id, body.index, said)
    choice = next(each for each in captured.choices if each.index == body.index)
    reward = captured.feedback[body.index].reward(choice.text)
    return api.FeedbackReceipt(id=body.id, index=body.index, reward=reward)


@capture_router.get("/capture")
def describe_capture(context: ContextDep, principal: PrincipalDep) -> api.CaptureView:
    """How traffic is captured where it is asked for, and how much is kept."""
    tenant = principal.tenant
    return api.CaptureView(policy=context.captures.policy(tenant), captured=context.captures.count(tenant))


@capture_router.put("/capture")
def set_capture_policy(context: ContextDep, principal: PrincipalDep, body: api.CapturePolicy) -> api.CaptureView:
    """Change how traffic is captured from now on."""
    context.captures.set_policy(principal.tenant, body)
    return describe_capture(context, principal)


@capture_router.get("/capture/export", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
def export_captured(context: ContextDep, principal: PrincipalDep) -> StreamingResponse:
    """What is kept, oldest first, one JSON object a line."""
    return StreamingResponse(_lines(context.captures.all(principal.tenant)), media_type=NDJSON)


@capture_router.post("/capture/collect")
@lasting
def collect_captured(context: ContextDep, principal: PrincipalDep, body: api.CollectRequest) -> api.CollectReport:
    """Store captured traffic as trajectories, with what was said of it as their reward; again changes nothing."""
    spec = tasks_of(context, principal, body.job, body.tasks)[0] if body.job or body.tasks else None
    if body.judge_unscored and spec is None:
        raise InvalidInput("judging needs a job or tasks", code="which_problems")
    check_import_name(context, principal, body.name, "traffic")
    problems = context.library.load(spec).train if spec else []
    task_set = spec.kind if spec else "traffic"
    terms = CollectTerms(body.name, principal.tenant, task_set, body.judge_unscored, body.after_unix_ms)
    found = collect(context.captures, context.experience, context.judges, problems, terms)
    return api.CollectReport(
        run=body.name,
        looked_at=found.looked_at,
        stored=len(found.rows),
        human=found.human,
        judged=found.judged,
        unscored=found.unscored,
        newest_unix_ms=found.newest_unix_ms,
    )


@capture_router.delete("/capture/completions/{completion_id}", status_code=204, response_class=Response)
def forget_captured(
    context: ContextDep, principal: PrincipalDep, completion_id: Annotated[str, Path(pattern=api.COMPLETION_ID_PATTERN)]
) -> Response:
    """Remove a captured completion and what was said of it; one that is gone already is no fault."""
    context.captures.forget(principal.tenant, completion_id)
    return Response(status_code=204)


def _lines(captured: Iterator[Captured]) -> Iterator[bytes]:
    for each in captured:
        said = {index: feedback.model_dump(exclude_none=True) for index, feedback in each.feedback.items()}
        document = {**asdict(each), "statement": each.statement, "feedback": said}
        yield json.dumps(document, ensure_ascii=False).encode() + b"\n"


@continual_router.put("/{name}")
def put_continual(
    context: ContextDep, principal: PrincipalDep, name: ContinualName, body: ContinualSpec, response: Response
) -> api.ContinualDetail:
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


@continual_router.get("")
def list_continual(context: ContextDep, principal: PrincipalDep) -> api.ContinualList:
    """All of the tenant, by name."""
    return api.ContinualList(items=[_summary(context, job) for job in context.continual.all(principal.sees_tenant)])


@continual_router.get("/{name}")
def get_continual(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> api.ContinualDetail:
    """One with its rounds, newest first."""
    return _detail(context, context.continual.get(name, principal.sees_tenant))


@continual_router.post("/{name}/rounds", status_code=202)
def begin_round(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> api.ContinualDetail:
    """Begin a round as soon as none is under way and there is anything new, whatever the schedule says."""
    job = context.continual.get(name, principal.sees_tenant)
    context.continual.want_round(job)
    return _detail(context, job)


@continual_router.delete("/{name}", status_code=204)
def delete_continual(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> None:
    """Forget it and its rounds; jobs, weights and what is served stay."""
    context.continual.delete(context.continual.get(name, principal.sees_tenant))


def _summary(context: AppContext, job: ContinualJob) -> api.ContinualSummary:
    wait = context.continual.wait_of(job)
    return api.ContinualSummary(
        name=job.name,
        tenant=job.tenant,
        spec=job.spec.model_dump(mode="json"),
        created_at=job.created_at,
        waits=wait.reason,
        waits_since=wait.since,
    )


def _detail(context: AppContext, job: ContinualJob) -> api.ContinualDetail:
    rounds = context.continual.rounds(job)
    new = context.continual_loop.experience.new_rows(job, rounds)
    return api.ContinualDetail(
        **dict(_summary(context, job)),
        new_trajectories=new,
        round_wanted=context.continual.is_round_wanted(job),
        history=list(map(_shown, rounds)),
    )


def _shown(each: Round) -> api.ContinualRound:
    return api.ContinualRound(
        **{name: value for name, value in asdict(each).items() if name not in ("overrides", "parent_change")}
    )
