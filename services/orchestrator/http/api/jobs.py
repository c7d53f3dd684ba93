"""Submit, list, read and steer jobs."""

from __future__ import annotations

from typing import Annotated

from blake3 import blake3
from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import (
    JOB_ID_PATTERN,
    ContextDep,
    JobId,
    PrincipalDep,
    checks_of,
    require_own_job,
)
from services.orchestrator.http.submission import checked_spec, require_quota, require_sources, submit_job
from services.orchestrator.jobs.states import CANCEL, PAUSE, RESUME, JobAction
from services.orchestrator.lifecycle.forks.fork import ForkOptions
from spo.errors import Conflict, InvalidInput, NotFound, NotReady
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
# Not below /v1/jobs, where it would be the id of a job to other methods.
deletions = APIRouter(prefix="/v1/job-deletions", tags=["jobs"])


def _written_out(at: object) -> object:
    # Numbers would pass for seconds since 1970.
    if isinstance(at, str) and "T" not in at.upper():
        raise ValueError("write it as RFC 3339: 2026-01-31T12:00:00Z")
    return at


Moment = Annotated[AwareDatetime, BeforeValidator(_written_out)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


class JobQuery(BaseModel):
    status: JobState | None = None
    label: list[Annotated[str, Field(min_length=1, max_length=800)]] | None = Field(
        None, max_length=16, description="`key` or `key:value`; repeated: a job has all of them."
    )
    created_from: Moment | None = None
    created_to: Moment | None = None
    limit: int = Field(50, ge=1, le=1000)
    cursor: str | None = Field(None, pattern=r"^[0-9]{1,15}$")


class ForkRequest(BaseModel):
    """Where to start: a weight version, by default the newest, or a checkpoint with its optimiser state."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: int | None = Field(default=None, ge=1, le=2**53, description="Start at step 0 with these weights.")
    checkpoint_step: int | None = Field(default=None, ge=1, le=2**53, description="Go on from this checkpoint.")
    as_reference: StrictBool = Field(
        default=False, description="The weights become pi0, with new values; otherwise pi0 is the parent's."
    )
    overrides: dict[str, object] = Field(
        default_factory=dict, max_length=64, description="Changes to the parent's JobSpec (JSON merge patch)."
    )


class JobChange(BaseModel):
    """What may be changed of a job at any time."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=200)


class JobsToDelete(BaseModel):
    """Jobs by id."""

    model_config = ConfigDict(extra="forbid")

    job_ids: list[Annotated[str, Field(pattern=JOB_ID_PATTERN)]] = Field(min_length=1, max_length=200)


_SPEC_BODY: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}


@router.post("", status_code=202, response_model=schemas.Job, openapi_extra=_SPEC_BODY)
async def submit(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    *,
    validate_only: bool = False,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Submit a JobSpec; `warnings` say what may not fit the replicas that live, and refuse nothing.

    With `validate_only` nothing is created and the resolved spec comes back, with its `warnings`.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InvalidInput("send the job spec as application/json", code="unsupported_media_type")
    body = await request.body()

    def answer() -> Response:
        spec = checked_spec(context, principal, body)
        if validate_only:
            warnings = [each.model_dump() for each in views.spec_warnings(context, spec)]
            return JSONResponse({**spec.model_dump(mode="json"), "warnings": warnings})
        job_id = submit_job(context, principal, spec, idempotency_key)
        return _with_etag(request, views.job(context, job_id), 202, f"/v1/jobs/{job_id}")

    return await checks_of(request).run(answer, principal.tenant)


@router.get("")
def list_jobs(context: ContextDep, principal: PrincipalDep, query: Annotated[JobQuery, Query()]) -> schemas.JobPage:
    """Jobs, newest first."""
    created = (_unix_ms(query.created_from), _unix_ms(query.created_to))
    states = [query.status] if query.status else []
    page = context.jobs.page(states, query.cursor, query.limit, principal.sees_tenant, query.label or (), created)
    return schemas.JobPage(items=views.job_summaries(context, page.job_ids), next_cursor=page.next_cursor)


def _unix_ms(at: AwareDatetime | None) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)


@router.get("/{job_id}", response_model=schemas.Job)
def get_job(request: Request, context: ContextDep, job_id: JobId) -> Response:
    """One job with its progress, its spec and who waits for whom."""
    return _with_etag(request, views.job(context, job_id))


@router.delete("/{job_id}", status_code=204)
def delete_job(context: ContextDep, job_id: JobId) -> None:
    """Delete an ended job with its trajectories, weights and checkpoints; the experience store keeps what it has."""
    context.deletion.delete(job_id)


@router.patch("/{job_id}")
def change_job(context: ContextDep, principal: PrincipalDep, job_id: JobId, body: JobChange) -> schemas.JobSummary:
    """Rename a job, whatever its state; its spec keeps the name it came with."""
    context.actions.rename(job_id, body.name, principal.name)
    return views.job_summary(context, job_id)


@deletions.post("")
def delete_jobs(context: ContextDep, principal: PrincipalDep, body: JobsToDelete) -> schemas.DeletedJobs:
    """Delete several ended jobs, as DELETE does one; those that cannot be are named with the reason."""
    deleted, refused = [], []
    for job_id in dict.fromkeys(body.job_ids):
        try:
            require_own_job(context, principal, job_id)
            context.deletion.delete(job_id)
            deleted.append(job_id)
        except (NotFound, Conflict, NotReady) as error:
            refused.append(schemas.NotDeleted(id=job_id, code=error.code, message=error.message))
    return schemas.DeletedJobs(deleted=deleted, refused=refused)


@router.post("/{job_id}/cancel", status_code=202)
def cancel(context: ContextDep, job_id: JobId) -> schemas.JobSummary:
    """Stop a job for good."""
    return _act(context, job_id, CANCEL)


@router.post("/{job_id}/pause", status_code=202)
def pause(context: ContextDep, job_id: JobId) -> schemas.JobSummary:
    """Checkpoint a running job and let it wait."""
    return _act(context, job_id, PAUSE)


@router.post("/{job_id}/resume", status_code=202)
def resume(context: ContextDep, job_id: JobId) -> schemas.JobSummary:
    """Let a paused job go on as soon as there is a slot for it; until then it stays `paused` and `waits` says so."""
    return _act(context, job_id, RESUME)


@router.post("/{job_id}/checkpoint", status_code=202)
def checkpoint(context: ContextDep, job_id: JobId) -> schemas.JobSummary:
    """Ask the trainer of a running job for a checkpoint now."""
    context.actions.ask_for_checkpoint(job_id)
    return views.job_summary(context, job_id)


@router.post("/{job_id}/fork", status_code=202, response_model=schemas.Job)
async def fork(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    job_id: JobId,
    body: ForkRequest,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """A new job that starts from this one's weights or goes on from its checkpoint, whatever becomes of this one."""
    options = ForkOptions(**dict(body))

    def check(spec: JobSpec) -> None:
        # The model itself is the parent's, wherever it lies.
        context.require_usable(spec.tasks, principal.sees_tenant, spec.algorithm.model_paths)
        require_sources(context, principal, spec)

    def answer() -> Response:
        if context.forks.made_before(job_id, options, idempotency_key, principal.tenant) is None:
            require_quota(context, principal)
        forked = context.forks.fork(job_id, options, check, idempotency_key, principal.name, principal.tenant)
        return _with_etag(request, views.job(context, forked), 202, f"/v1/jobs/{forked}")

    return await checks_of(request).run(answer, principal.tenant)


@router.post("/{job_id}/weights/push", status_code=202)
def push_weights(
    context: ContextDep, job_id: JobId, version: Annotated[int, Body(embed=True, ge=1, le=2**53)]
) -> dict[str, int]:
    """Announce a published weight version to the replicas again."""
    context.jobs.state(job_id)
    return {"version": context.weights.announce(job_id, version, "pushed").version}


@router.post("/{job_id}/weights/rollback", status_code=202)
def rollback_weights(
    context: ContextDep, job_id: JobId, version: Annotated[int, Body(embed=True, ge=1, le=2**53)]
) -> dict[str, int]:
    """Make the replicas serve an older version until the trainer publishes the next one."""
    context.jobs.state(job_id)
    return {"version": context.weights.announce(job_id, version, "rolled_back").version}


def _act(context: AppContext, job_id: str, action: JobAction) -> schemas.JobSummary:
    context.actions.act(job_id, action)
    if action is RESUME:
        context.queue.fill()
    return views.job_summary(context, job_id)


def _with_etag(request: Request, document: BaseModel, status: int = 200, location: str = "") -> Response:
    """The document as JSON with its ETag; 304 when the client has it already."""
    body = document.model_dump_json().encode()
    headers = {"ETag": f'"{blake3(body).hexdigest(16)}"', "Cache-Control": "no-cache"}
    if location:
        headers["Location"] = location
    if status == 200 and headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
