"""What is served, over REST: names of policies, captured traffic and its feedback, and continual jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from services.orchestrator.capture import Captured, CapturePolicy, CollectTerms, Feedback, collect
from services.orchestrator.container import RUN_PATTERN, AppContext, ContextDep, Limit, PrincipalDep, lasting
from services.orchestrator.continual import NAME, ContinualJob, ContinualSpec, Round
from services.orchestrator.http.experience import check_import_name, tasks_of
from services.orchestrator.serving import NAME_PATTERN, Change, ServedModel, Target
from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec

router = APIRouter(prefix="/v1/served-models", tags=["serving"])

Name = Annotated[str, Path(max_length=100, pattern=NAME_PATTERN, description="The name that clients ask for.")]
Note = Annotated[str, Field(max_length=2000, description="Why; kept in the history.")]
Expected = Annotated[
    int | None,
    Field(ge=0, le=2**53, description="Refuse unless this is the number of the name's last change; 0: none."),
]

capture_router = APIRouter(prefix="/v1", tags=["capture"])

ID_PATTERN = r"^(chatcmpl|cmpl)-[0-9A-HJKMNP-TV-Z]{26}$"
NDJSON = "application/x-ndjson"

continual_router = APIRouter(prefix="/v1/continual", tags=["continual jobs"])

ContinualName = Annotated[str, Path(pattern=NAME, description="Name of a continual job, unique within the tenant.")]


class Publication(BaseModel):
    """What a name is to mean."""

    model_config = ConfigDict(extra="forbid")

    job_id: str = Field(pattern=r"^job_[0-9A-HJKMNP-TV-Z]{26}$")
    version: int | None = Field(default=None, ge=0, le=2**53, description="0: pi0; default: always the newest.")
    note: Note = ""
    expected_number: Expected = None
    min_replicas: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Inference replicas that stay for it whoever asks; 0: none, as at first; default: as before.",
    )


class Rollback(BaseModel):
    """Back to an earlier change, by default to what the name meant before."""

    model_config = ConfigDict(extra="forbid")

    to_number: int | None = Field(default=None, ge=1, le=2**53)
    note: Note = ""
    expected_number: Expected = None


class ServedTarget(BaseModel):
    job_id: str
    version: int | None


class ServedModelView(ServedTarget):
    """A name and what it means since its last change; `version` null: the newest of the job."""

    name: str
    tenant: str
    number: int
    at: str
    by: str
    note: str
    before: ServedTarget | None
    restores: int | None
    removed: bool
    min_replicas: int


class ServedModelList(BaseModel):
    items: list[ServedModelView]


@router.get("")
def list_served_models(context: ContextDep, principal: PrincipalDep) -> ServedModelList:
    """Every name that means something now."""
    return _list(context.served_models.all(principal.sees_tenant))


@router.get("/{name}")
def get_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> ServedModelView:
    """What a name means now."""
    return _view(context.served_models.get(principal.tenant, name))


@router.put("/{name}")
def publish_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: Publication
) -> ServedModelView:
    """Make a name mean a weight version of a job, or its newest; what it means already is no change."""
    _check_replicas(context, principal, body.min_replicas)
    change = Change(principal.name, body.note, body.expected_number, body.min_replicas)
    return _view(context.served_models.publish(principal.tenant, name, Target(body.job_id, body.version), change))


@router.delete("/{name}")
def remove_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> ServedModelView:
    """Let a name mean nothing; its history stays."""
    return _view(context.served_models.remove(principal.tenant, name, Change(principal.name)))


@router.post("/{name}/rollback")
def roll_back_served_model(context: ContextDep, principal: PrincipalDep, name: Name, body: Rollback) -> ServedModelView:
    """Serve again what was served before; once more goes back one further."""
    change = Change(principal.name, body.note, body.expected_number)
    return _view(context.served_models.roll_back(principal.tenant, name, change, body.to_number))


@router.get("/{name}/history")
def served_model_history(
    context: ContextDep, principal: PrincipalDep, name: Name, limit: Limit = 100
) -> ServedModelList:
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


def _list(found: list[ServedModel]) -> ServedModelList:
    return ServedModelList(items=[_view(each) for each in found])


def _view(found: ServedModel) -> ServedModelView:
    return ServedModelView.model_validate(found, from_attributes=True)


class FeedbackRequest(Feedback):
    """What is said of one choice of a completion."""

    id: str = Field(pattern=ID_PATTERN, description="Of the completion, as its answer said.")
    index: int = Field(default=0, ge=0, lt=64, description="Of the choice.")


class FeedbackReceipt(BaseModel):
    """What the choice is worth now, best 0 and worst -1; null: nothing says so yet."""

    id: str
    index: int
    reward: float | None


class CaptureView(BaseModel):
    policy: CapturePolicy
    captured: int


class CollectRequest(BaseModel):
    """Which traffic becomes trajectories, and under which name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=RUN_PATTERN, description="Of the stored experience; jobs name it as their source.")
    job: str | None = Field(default=None, pattern=r"^job_[0-9A-Z]{26}$", description="Prompts are those of its tasks.")
    tasks: TasksSpec | None = None
    judge_unscored: StrictBool = Field(default=False, description="Judge what nobody scored by the tasks' verifier.")
    after_unix_ms: int = Field(default=0, ge=0, lt=2**53, description="Only traffic since then.")


class CollectReport(BaseModel):
    """human: edited answers; unscored: left for later. newest_unix_ms: of the traffic that was looked at."""

    run: str
    looked_at: int
    stored: int
    human: int
    judged: int
    unscored: int
    newest_unix_ms: int


@capture_router.post("/feedback")
def give_feedback(context: ContextDep, principal: PrincipalDep, body: FeedbackRequest) -> FeedbackReceipt:
    """Join a score, thumbs, a test's result or an edited answer to a captured completion; again is no change."""
    said = Feedback.model_validate(body.model_dump(exclude={"id", "index"}))
    if said == Feedback():
        raise InvalidInput("feedback is a score, thumbs, a test, an edited answer or a comment", code="invalid_request")
    captured = context.captures.give_feedback(principal.tenant, body.id, body.index, said)
    choice = next(each for each in captured.choices if each.index == body.index)
    reward = captured.feedback[body.index].reward(choice.text)
    return FeedbackReceipt(id=body.id, index=body.index, reward=reward)


@capture_router.get("/capture")
def describe_capture(context: ContextDep, principal: PrincipalDep) -> CaptureView:
    """How traffic is captured where it is asked for, and how much is kept."""
    tenant = principal.tenant
    return CaptureView(policy=context.captures.policy(tenant), captured=context.captures.count(tenant))


@capture_router.put("/capture")
def set_capture_policy(context: ContextDep, principal: PrincipalDep, body: CapturePolicy) -> CaptureView:
    """Change how traffic is captured from now on."""
    context.captures.set_policy(principal.tenant, body)
    return describe_capture(context, principal)


@capture_router.get("/capture/export", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
def export_captured(context: ContextDep, principal: PrincipalDep) -> StreamingResponse:
    """What is kept, oldest first, one JSON object a line."""
    return StreamingResponse(_lines(context.captures.all(principal.tenant)), media_type=NDJSON)


@capture_router.post("/capture/collect")
@lasting
def collect_captured(context: ContextDep, principal: PrincipalDep, body: CollectRequest) -> CollectReport:
    """Store captured traffic as trajectories, with what was said of it as their reward; again changes nothing."""
    spec = tasks_of(context, principal, body.job, body.tasks)[0] if body.job or body.tasks else None
    if body.judge_unscored and spec is None:
        raise InvalidInput("judging needs a job or tasks", code="which_problems")
    check_import_name(context, principal, body.name, "traffic")
    problems = context.library.load(spec).train if spec else []
    task_set = spec.kind if spec else "traffic"
    terms = CollectTerms(body.name, principal.tenant, task_set, body.judge_unscored, body.after_unix_ms)
    found = collect(context.captures, context.experience, context.judges, problems, terms)
    return CollectReport(
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
    context: ContextDep, principal: PrincipalDep, completion_id: Annotated[str, Path(pattern=ID_PATTERN)]
) -> Response:
    """Remove a captured completion and what was said of it; one that is gone already is no fault."""
    context.captures.forget(principal.tenant, completion_id)
    return Response(status_code=204)


def _lines(captured: Iterator[Captured]) -> Iterator[bytes]:
    for each in captured:
        said = {index: feedback.model_dump(exclude_none=True) for index, feedback in each.feedback.items()}
        document = {**asdict(each), "statement": each.statement, "feedback": said}
        yield json.dumps(document, ensure_ascii=False).encode() + b"\n"


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


@continual_router.put("/{name}")
def put_continual(
    context: ContextDep, principal: PrincipalDep, name: ContinualName, body: ContinualSpec, response: Response
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


@continual_router.get("")
def list_continual(context: ContextDep, principal: PrincipalDep) -> ContinualList:
    """All of the tenant, by name."""
    return ContinualList(items=[_summary(context, job) for job in context.continual.all(principal.sees_tenant)])


@continual_router.get("/{name}")
def get_continual(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> ContinualDetail:
    """One with its rounds, newest first."""
    return _detail(context, context.continual.get(name, principal.sees_tenant))


@continual_router.post("/{name}/rounds", status_code=202)
def begin_round(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> ContinualDetail:
    """Begin a round as soon as none is under way and there is anything new, whatever the schedule says."""
    job = context.continual.get(name, principal.sees_tenant)
    context.continual.want_round(job)
    return _detail(context, job)


@continual_router.delete("/{name}", status_code=204)
def delete_continual(context: ContextDep, principal: PrincipalDep, name: ContinualName) -> None:
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
