"""Entries that were given up on: those of a job for its tenant, those that name no job for admins."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from services.orchestrator.http.dependencies import ContextDep, JobId
from services.orchestrator.http.views.dead_letters import DeadLetters
from services.orchestrator.schemas.dead_letters import DeadLetterDetail, DeadLetterPage, Redriven
from spo.errors import Conflict
from spo.spec.job_state import TERMINAL

router = APIRouter(prefix="/v1", tags=["dead letters"])

_ID = r"(prompts|rollouts|verifier_rollouts|verdicts|estimates|pivotal)-\d{1,16}-\d{1,16}"
LetterId = Annotated[str, Path(pattern=f"^{_ID}$")]


class DeadLetterQuery(BaseModel):
    stream: Literal["", "prompts", "rollouts", "verifier_rollouts", "verdicts", "estimates", "pivotal"] = ""
    limit: int = Field(200, ge=1, le=1000)
    cursor: str = Field("", pattern=f"^({_ID})?$")


@router.get("/jobs/{job_id}/dead-letters")
def list_dead_letters(context: ContextDep, job_id: JobId, query: Annotated[DeadLetterQuery, Query()]) -> DeadLetterPage:
    """Entries of the job that were given up on, the newest of each stream first; the oldest letters give way."""
    context.jobs.state(job_id)
    return DeadLetters(context.redis, job_id).page(query.stream, query.limit, query.cursor)


@router.get("/jobs/{job_id}/dead-letters/{letter_id}")
def show_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> DeadLetterDetail:
    """One of them, with what it says."""
    context.jobs.state(job_id)
    return DeadLetters(context.redis, job_id).detail(letter_id)


@router.post("/jobs/{job_id}/dead-letters/{letter_id}/redrive")
def redrive_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> Redriven:
    """Put the entry back at the end of its stream, to be handled again; asked for twice it happens once."""
    state = context.jobs.state(job_id)
    if state in TERMINAL:
        raise Conflict(f"a job that is {state} has no use for its dead letters", code="illegal_transition")
    return Redriven(redriven=DeadLetters(context.redis, job_id).redrive(letter_id))


@router.delete("/jobs/{job_id}/dead-letters/{letter_id}", status_code=204)
def drop_dead_letter(context: ContextDep, job_id: JobId, letter_id: LetterId) -> None:
    """Forget the entry; the job goes on counting it as given up."""
    context.jobs.state(job_id)
    DeadLetters(context.redis, job_id).drop(letter_id)


@router.get("/dead-letters")
def list_jobless_dead_letters(context: ContextDep, query: Annotated[DeadLetterQuery, Query()]) -> DeadLetterPage:
    """Entries that were given up on and name no job: malformed ones, mostly. For admins."""
    return DeadLetters(context.redis, "").page(query.stream, query.limit, query.cursor)


@router.get("/dead-letters/{letter_id}")
def show_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> DeadLetterDetail:
    """One of them, with what it says. For admins."""
    return DeadLetters(context.redis, "").detail(letter_id)


@router.post("/dead-letters/{letter_id}/redrive")
def redrive_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> Redriven:
    """Put the entry back at the end of its stream; asked for twice it happens once. For admins."""
    return Redriven(redriven=DeadLetters(context.redis, "").redrive(letter_id))


@router.delete("/dead-letters/{letter_id}", status_code=204)
def drop_jobless_dead_letter(context: ContextDep, letter_id: LetterId) -> None:
    """Forget the entry. For admins."""
    DeadLetters(context.redis, "").drop(letter_id)
