"""Jobs over REST: submit, list, read, fork and steer them; who waits for whom."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from blake3 import blake3
from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth import Principal
from services.orchestrator.commit import now_ms
from services.orchestrator.container import (
    AppContext,
    ContextDep,
    JobId,
    PrincipalDep,
    checks_of,
    require_own_job,
)
from services.orchestrator.damaged_jobs import shown_state, why_not_shown
from services.orchestrator.forks import ForkOptions, require_followable
from services.orchestrator.job_records import (
    CANCEL,
    PAUSE,
    RESUME,
    JobAction,
    JobRecord,
    Submission,
    latest_point,
    submitted_before,
    training_series,
)
from services.orchestrator.pipeline import DISPATCHER, entries_in_pipeline, troubles_in_pipeline
from services.orchestrator.steps import act_on, ask_for_checkpoint, rename_job
from services.orchestrator.values import require_stored
from services.orchestrator.versions import announce_version, announcement_of
from spo import api, redis_keys
from spo.errors import Conflict, InvalidInput, NotFound, NotReady, ResourceExhausted
from spo.messaging.redis_client import only_this_job, replies_by_key
from spo.messaging.streams.entries import oldest_unix_ms
from spo.spec.job_spec import JobSpec
from spo.spec.section import TERMINAL, JobState

RECENT_STEPS = 20

# Of the newest step, beside pass@k of the newest evaluation.
LISTED_METRICS = ("reward", "reward/online", "loss", "kl_to_reference", "entropy")  # rollouts' where there are some

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
# Not below /v1/jobs, where it would be the id of a job to other methods.
deletions = APIRouter(prefix="/v1/job-deletions", tags=["jobs"])


@dataclass(frozen=True)
class Wait:
    """`who` has waited for `whom` for so many seconds; `entries` wait there (None: not a queue)."""

    who: str
    whom: str
    seconds: float
    entries: int | None
    meaning: str


def job_waits(context: AppContext, job_id: str, state: JobState) -> list[Wait]:
    """The waits of at least a tenth of a second, longest first; of an ended job what its last steps waited for."""
    found = _trainer(context, job_id) if state in (JobState.RUNNING, JobState.PAUSING, *TERMINAL) else []
    found += _pipeline(context, job_id) if state in (JobState.ESTIMATING, JobState.RUNNING, JobState.PAUSING) else []
    return sorted((wait for wait in found if wait.seconds >= 0.1), key=lambda wait: -wait.seconds)


def _trainer(context: AppContext, job_id: str) -> list[Wait]:
    recent = training_series(context.redis, job_id).columns
    waited = mean_of_late(recent.get("wait_seconds", ()))
    worked = mean_of_late(recent.get("step_seconds", ()))
    if waited is None or worked is None:
        return []
    share = waited / (waited + worked) if waited + worked else 0
    idle = f"of each step {waited:.2f} s are waiting and {worked:.2f} s training: the trainer idles {share:.0%}"
    return [Wait("trainer", "a batch from the replay buffer", waited, None, idle)]


def mean_of_late(column: Sequence[float | None]) -> float | None:
    known = [value for value in column[-RECENT_STEPS:] if value is not None]
    return sum(known) / len(known) if known else None


def _pipeline(context: AppContext, job_id: str) -> list[Wait]:
    """How old the oldest entry is of each stream where the job has some; all but `prompts` are shared with others."""
    entries = entries_in_pipeline(context.redis, job_id)
    stages = (
        ("estimates", redis_keys.estimates(), "prompts without a value", "value-estimation", "pi0 is being sampled"),
        ("pivotal", redis_keys.pivotal(), "pivotal searches", "value-estimation", "prefixes are being rolled out"),
        ("prompts", redis_keys.prompts(job_id), "prompts", "inference", "some always wait, so that no replica idles"),
        ("rollouts", redis_keys.rollouts(), "responses", "sandbox-judge", "long waits ask for more judges"),
        ("verifier_rollouts", redis_keys.verifier_rollouts(), "responses", "verifier", "services outside may be slow"),
        ("verdicts", redis_keys.verdicts(), "judged responses", "replay-buffer", "it stores them and may be full"),
    )
    now = now_ms()
    troubles = troubles_in_pipeline(context.redis, job_id)
    waits = []
    if trouble := troubles.get(DISPATCHER):
        seconds = max(0, now - trouble.since_unix_ms) / 1000
        waits.append(Wait("the dispatcher", "room in the replay buffer", seconds, None, trouble.reason))
    for name, stream, who, whom, meaning in stages:
        since = oldest_unix_ms(context.redis, stream)
        if since is not None and entries[name]:
            why = f"tried again and again: {troubles[name].reason}" if name in troubles else meaning
            waits.append(Wait(who, whom, max(0, now - since) / 1000, entries[name], why))
    return waits


def checked_spec(context: AppContext, principal: Principal, body: bytes) -> JobSpec:
    """The resolved spec, if it can be submitted. Raises InvalidInput."""

    def admitted(parsed: JobSpec) -> JobSpec:
        pinned = parsed.model_copy(update={"tasks": context.served_judges.pinned(parsed.tasks, principal.tenant)})
        context.require_usable(pinned.tasks, principal.sees_tenant, pinned.model_paths)
        return pinned

    spec = context.spec_check.accept(body, admitted)
    require_sources(context, principal, spec)
    return spec


def submit_job(context: AppContext, principal: Principal, spec: JobSpec, idempotency_key: str | None) -> str:
    """The id of the new job, or of the one with this idempotency key. Raises ResourceExhausted, Conflict."""
    digest = Submission(spec).request_digest()
    if submitted_before(context.redis, idempotency_key, digest, principal.tenant) is None:
        require_quota(context, principal)
    job_id = context.jobs.submit(spec, idempotency_key, actor=principal.name, tenant=principal.tenant)
    context.watch.keep(job_id)
    return job_id


def require_sources(context: AppContext, principal: Principal, spec: JobSpec) -> None:
    """Refuse a spec whose stored experience or shared rollouts are not there for the tenant. Raises InvalidInput."""
    require_stored(context.redis, context.experience, spec, principal.tenant)
    require_followable(context.jobs, spec, principal.tenant)


def require_quota(context: AppContext, principal: Principal) -> None:
    """Raises ResourceExhausted (code "quota_exceeded") where the key may have no more unfinished jobs."""
    if principal.max_active_jobs is not None and context.jobs.active_of(principal.tenant) >= principal.max_active_jobs:
        raise ResourceExhausted(
            f"this key may have {principal.max_active_jobs} jobs that have not ended", code="quota_exceeded"
        )


def job_summary(context: AppContext, job_id: str) -> api.JobSummary:
    """A job in one line. Raises NotFound."""
    for summary in job_summaries(context, [job_id]):
        return summary
    raise context.jobs.absent(job_id)


def job_summaries(context: AppContext, job_ids: Sequence[str]) -> list[api.JobSummary]:
    """The jobs in one line each; those deleted meanwhile are left out."""
    with context.redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hgetall(redis_keys.job_record(job_id))
            pipe.get(redis_keys.run_state(job_id))
            pipe.zrange(own_keys.job_metrics(job_id), -1, -1, withscores=True)
        replies = replies_by_key(pipe)
    found = zip(job_ids, replies[::3], replies[1::3], replies[2::3], strict=True)
    return [
        _summary(job_id, JobRecord.shown(job_id, fields), state, newest or [])
        for job_id, fields, raw, newest in found
        if (state := shown_state(context.jobs, job_id, raw))
    ]


def job_document(context: AppContext, job_id: str) -> api.Job:
    """A job with all that is known of its progress. Raises NotFound."""
    # One round trip for all of it: jobs are looked at often, and by many.
    with context.redis.pipeline(transaction=False) as pipe:
        pipe.hgetall(redis_keys.job_record(job_id))
        pipe.get(redis_keys.run_state(job_id))
        pipe.get(redis_keys.run_spec(job_id))
        pipe.zrange(own_keys.job_metrics(job_id), -1, -1, withscores=True)
        pipe.hkeys(own_keys.evaluations(job_id))
        pipe.xrevrange(redis_keys.weights(job_id), count=1)
        pipe.hlen(redis_keys.run_values(job_id))
        pipe.hlen(redis_keys.provisional_values(job_id))
        fields, state, document, newest, evaluated, announced, values, provisional = replies_by_key(pipe)
    if not state or document is None:
        raise why_not_shown(context.jobs, job_id)
    record, newest, evaluated = JobRecord.shown(job_id, fields), newest or [], evaluated or []
    summary = _summary(job_id, record, JobState(state.decode()), newest)
    spec = context.jobs.parse_spec(document)
    latest = _newest_evaluation(context, job_id, evaluated)
    failure = None
    if record.failure_code:
        failure = api.Failure(code=record.failure_code, message=record.failure_message)
    return api.Job(
        **vars(summary),
        progress=api.Progress(
            **context.value_progress.of(job_id, spec, values or 0),
            values_total=record.prompts_total,
            values_provisional=provisional or 0,
            values_pending=record.estimates_pending,
            solved=_solved(context, job_id, spec),
            step=summary.step,
            steps=spec.trainer.steps,
            weight_version=announcement_of(announced[0]).version if announced else 0,
            evaluations=len(evaluated),
        ),
        latest_evaluation=api.StepEvaluation.model_validate(evaluation_brief(latest)) if latest else None,
        failure=failure,
        waits=[] if summary.state in TERMINAL else waits(context, job_id, summary.state),
        spec=spec.model_dump(mode="json"),
        missing_evaluations=[
            api.MissingEvaluation(step=failed.step, version=failed.version, code=failed.code, message=failed.message)
            for failed in context.evaluations.schedule.given_up(job_id)
        ],
        lineage=api.Lineage(**asdict(record.lineage)) if record.lineage else None,
        warnings=spec_warnings(context, spec, summary),
    )


def _solved(context: AppContext, job_id: str, spec: JobSpec) -> api.SolvedPrompts | None:
    """Of how many prompts rollouts found a right answer; None for a job that does not count them."""
    if not spec.counts_outcomes:
        return None
    outcomes = [tuple(map(int, each.split(b":"))) for each in context.redis.hvals(redis_keys.replay_outcomes(job_id))]
    tried = [(right, wrong_since) for rollouts, right, wrong_since in outcomes if rollouts]
    return api.SolvedPrompts(
        tried=len(tried),
        never=sum(not right for right, _ in tried),
        once=sum(right == 1 for right, _ in tried),
        lately=sum(right > 0 and wrong_since < spec.rollout.samples_per_prompt for right, wrong_since in tried),
    )


def spec_warnings(context: AppContext, spec: JobSpec, job: api.JobSummary | None = None) -> list[api.SpecWarning]:
    """What speaks against a spec on the replicas that live now, and of a job also that its rollouts are never right."""
    stuck = context.monitor.never_right(job.id, spec) if job else ""
    found = [api.SpecWarning(pointer="/rollout", message=stuck)] if stuck else []
    if job and job.state in TERMINAL:
        return found
    tokens = latest_point(context.redis, job.id).get("response_length") if job else None
    found += [api.SpecWarning(pointer="/tasks", message=note) for note in context.library.notes(spec.tasks)]
    return found + [api.SpecWarning(**asdict(each)) for each in context.plan_warnings.of(spec, tokens)]


def evaluation_brief(evaluation: Mapping[str, object]) -> dict[str, object]:
    """An evaluation without its list of problems."""
    return {name: value for name, value in evaluation.items() if name != "per_problem"}


def _summary(job_id: str, record: JobRecord, state: JobState, newest: list[tuple[bytes, float]]) -> api.JobSummary:
    return api.JobSummary(
        id=job_id,
        name=record.name,
        labels=record.labels,
        state=state,
        # A Redis that was set back may have lost the rows of the last steps, which the trainer does not take again.
        step=max(int(newest[0][1]) if newest else 0, record.trained_steps or 0),
        created_at=record.created_at,
        updated_at=record.updated_at or record.created_at,
        metrics=_metrics(record, newest),
    )


def _metrics(record: JobRecord, newest: list[tuple[bytes, float]]) -> dict[str, float]:
    """What a list shows of a job's curves; what is not finite is left out, as JSON has no such number."""
    scalars = json.loads(newest[0][0]) if newest else {}
    shown = {name.partition("/")[0]: float(scalars[name]) for name in LISTED_METRICS if scalars.get(name) is not None}
    return {name: value for name, value in (shown | record.scores).items() if math.isfinite(value)}


def waits(context: AppContext, job_id: str, state: JobState) -> list[str]:
    """What a job that has not ended waits for, in words."""
    reasons = context.monitor.waits(job_id, state)
    # Where the job's record is damaged, the monitor has said so.
    with only_this_job():
        reasons += context.queue.reasons(job_id, state)
    return context.monitor.named(job_id, state, reasons)


def _newest_evaluation(context: AppContext, job_id: str, steps: list[bytes]) -> dict[str, object] | None:
    """The latest of them; each can be large, so only that one is read."""
    raw = context.redis.hget(own_keys.evaluations(job_id), max(steps, key=int).decode()) if steps else None
    return json.loads(raw) if raw else None


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


_SPEC_BODY: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}


@router.post("", status_code=202, response_model=api.Job, openapi_extra=_SPEC_BODY)
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
            warnings = [each.model_dump() for each in spec_warnings(context, spec)]
            return JSONResponse({**spec.model_dump(mode="json"), "warnings": warnings})
        job_id = submit_job(context, principal, spec, idempotency_key)
        return _with_etag(request, job_document(context, job_id), 202, f"/v1/jobs/{job_id}")

    return await checks_of(request).run(answer, principal.tenant)


@router.get("")
def list_jobs(context: ContextDep, principal: PrincipalDep, query: Annotated[JobQuery, Query()]) -> api.JobPage:
    """Jobs, newest first."""
    created = (_unix_ms(query.created_from), _unix_ms(query.created_to))
    states = [query.status] if query.status else []
    page = context.jobs.page(states, query.cursor, query.limit, principal.sees_tenant, query.label or (), created)
    return api.JobPage(items=job_summaries(context, page.job_ids), next_cursor=page.next_cursor)


def _unix_ms(at: AwareDatetime | None) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)


@router.get("/{job_id}", response_model=api.Job)
def get_job(request: Request, context: ContextDep, job_id: JobId) -> Response:
    """One job with its progress, its spec and who waits for whom."""
    return _with_etag(request, job_document(context, job_id))


@router.delete("/{job_id}", status_code=204)
def delete_job(context: ContextDep, job_id: JobId) -> None:
    """Delete an ended job with its trajectories, weights and checkpoints; the experience store keeps what it has."""
    context.deletion.delete(job_id)


@router.patch("/{job_id}")
def change_job(context: ContextDep, principal: PrincipalDep, job_id: JobId, body: api.JobChange) -> api.JobSummary:
    """Rename a job, whatever its state; its spec keeps the name it came with."""
    rename_job(context.jobs, job_id, body.name, principal.name)
    return job_summary(context, job_id)


@deletions.post("")
def delete_jobs(context: ContextDep, principal: PrincipalDep, body: api.JobsToDelete) -> api.DeletedJobs:
    """Delete several ended jobs, as DELETE does one; those that cannot be are named with the reason."""
    deleted, refused = [], []
    for job_id in dict.fromkeys(body.job_ids):
        try:
            require_own_job(context, principal, job_id)
            context.deletion.delete(job_id)
            deleted.append(job_id)
        except (NotFound, Conflict, NotReady) as error:
            refused.append(api.NotDeleted(id=job_id, code=error.code, message=error.message))
    return api.DeletedJobs(deleted=deleted, refused=refused)


@router.post("/{job_id}/cancel", status_code=202)
def cancel(context: ContextDep, job_id: JobId) -> api.JobSummary:
    """Stop a job for good."""
    return _act(context, job_id, CANCEL)


@router.post("/{job_id}/pause", status_code=202)
def pause(context: ContextDep, job_id: JobId) -> api.JobSummary:
    """Checkpoint a running job and let it wait."""
    return _act(context, job_id, PAUSE)


@router.post("/{job_id}/resume", status_code=202)
def resume(context: ContextDep, job_id: JobId) -> api.JobSummary:
    """Let a paused job go on as soon as there is a slot for it; until then it stays `paused` and `waits` says so."""
    return _act(context, job_id, RESUME)


@router.post("/{job_id}/checkpoint", status_code=202)
def checkpoint(context: ContextDep, job_id: JobId) -> api.JobSummary:
    """Ask the trainer of a running job for a checkpoint now."""
    ask_for_checkpoint(context.jobs, job_id)
    return job_summary(context, job_id)


@router.post("/{job_id}/fork", status_code=202, response_model=api.Job)
async def fork(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    job_id: JobId,
    body: api.ForkRequest,
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
        return _with_etag(request, job_document(context, forked), 202, f"/v1/jobs/{forked}")

    return await checks_of(request).run(answer, principal.tenant)


@router.post("/{job_id}/weights/push", status_code=202)
def push_weights(
    context: ContextDep, job_id: JobId, version: Annotated[int, Body(embed=True, ge=1, le=2**53)]
) -> api.AnnouncedVersion:
    """Announce a published weight version to the replicas again."""
    context.jobs.state(job_id)
    return api.AnnouncedVersion(version=announce_version(context.jobs, job_id, version, "pushed").version)


@router.post("/{job_id}/weights/rollback", status_code=202)
def rollback_weights(
    context: ContextDep, job_id: JobId, version: Annotated[int, Body(embed=True, ge=1, le=2**53)]
) -> api.AnnouncedVersion:
    """Make the replicas serve an older version until the trainer publishes the next one."""
    context.jobs.state(job_id)
    return api.AnnouncedVersion(version=announce_version(context.jobs, job_id, version, "rolled_back").version)


def _act(context: AppContext, job_id: str, action: JobAction) -> api.JobSummary:
    act_on(context.jobs, job_id, action)
    if action is RESUME:
        context.queue.fill()
    return job_summary(context, job_id)


def _with_etag(request: Request, document: BaseModel, status: int = 200, location: str = "") -> Response:
    """The document as JSON with its ETag; 304 when the client has it already."""
    body = document.model_dump_json().encode()
    headers = {"ETag": f'"{blake3(body).hexdigest(16)}"', "Cache-Control": "no-cache"}
    if location:
        headers["Location"] = location
    if status == 200 and headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
