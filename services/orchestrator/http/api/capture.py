"""Captured traffic and what is said of it: policy, feedback, what is kept, and trajectories made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from services.orchestrator.http.api.experience import check_import_name, tasks_of
from services.orchestrator.http.dependencies import RUN_PATTERN, ContextDep, PrincipalDep
from services.orchestrator.http.threads import lasting
from services.orchestrator.serving.capture import Captured, CapturePolicy, Feedback
from services.orchestrator.serving.collect import CollectTerms, collect
from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec

router = APIRouter(prefix="/v1", tags=["capture"])

ID_PATTERN = r"^(chatcmpl|cmpl)-[0-9A-HJKMNP-TV-Z]{26}$"
NDJSON = "application/x-ndjson"


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


@router.post("/feedback")
def give_feedback(context: ContextDep, principal: PrincipalDep, body: FeedbackRequest) -> FeedbackReceipt:
    """Join a score, thumbs, a test's result or an edited answer to a captured completion; again is no change."""
    said = Feedback.model_validate(body.model_dump(exclude={"id", "index"}))
    if said == Feedback():
        raise InvalidInput("feedback is a score, thumbs, a test, an edited answer or a comment", code="invalid_request")
    captured = context.captures.give_feedback(principal.tenant, body.id, body.index, said)
    choice = next(each for each in captured.choices if each.index == body.index)
    reward = captured.feedback[body.index].reward(choice.text)
    return FeedbackReceipt(id=body.id, index=body.index, reward=reward)


@router.get("/capture")
def describe_capture(context: ContextDep, principal: PrincipalDep) -> CaptureView:
    """How traffic is captured where it is asked for, and how much is kept."""
    tenant = principal.tenant
    return CaptureView(policy=context.captures.policy(tenant), captured=context.captures.count(tenant))


@router.put("/capture")
def set_capture_policy(context: ContextDep, principal: PrincipalDep, body: CapturePolicy) -> CaptureView:
    """Change how traffic is captured from now on."""
    context.captures.set_policy(principal.tenant, body)
    return describe_capture(context, principal)


@router.get("/capture/export", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
def export_captured(context: ContextDep, principal: PrincipalDep) -> StreamingResponse:
    """What is kept, oldest first, one JSON object a line."""
    return StreamingResponse(_lines(context.captures.all(principal.tenant)), media_type=NDJSON)


@router.post("/capture/collect")
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


@router.delete("/capture/completions/{completion_id}", status_code=204, response_class=Response)
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
