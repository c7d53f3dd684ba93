"""The platform over REST: replicas and their number, health, metrics, API keys, the audit log, what is wrong now, and
what is served: names of policies, captured traffic and its feedback, and continual jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Annotated, get_args

import redis
from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agent_episodes import EpisodeState
from services.orchestrator.auth import ApiKey, Principal
from services.orchestrator.autoscaling import SCALABLE
from services.orchestrator.capture import Captured, CollectTerms, collect
from services.orchestrator.commit import now_ms
from services.orchestrator.container import AppContext, ContextDep, Limit, PrincipalDep, at_the_door, lasting
from services.orchestrator.continual import NAME, WANTING, ContinualJob, ContinualSpec, Round
from services.orchestrator.http.events import DeadLetters
from services.orchestrator.http.experience import check_import_name, tasks_of
from services.orchestrator.http.jobs import job_summaries, waits
from services.orchestrator.job_records import JobFilter, page_of_jobs
from services.orchestrator.pipeline import platform_depths
from services.orchestrator.serving import NAME_PATTERN, Change, ServedModel, Target
from spo import api, redis_keys
from spo.errors import FieldViolation, InvalidInput, NotFound, NotReady, catalogue
from spo.messaging.redis_client import as_spo_error
from spo.messaging.streams.recovery import counts_of
from spo.observability import (
    AGENT_EPISODES,
    AGENT_LEASE_AGE,
    AGENT_OPEN_EPISODES,
    DELETIONS_FAILING,
    JOBS,
    REPLICAS,
    STREAM_LAG,
    STREAM_PENDING,
    WANTED_REPLICAS,
)
from spo.spec.section import ACTIVE, TERMINAL, JobState

UNKNOWN_RUN: dict[str, object] = {"run_id": "", "policy_version": 0, "problem": ""}

NEEDED_POOLS = ("inference", "sandbox-judge", "replay-buffer", "value-estimation", "trainer")
# So many ends of a pool's processes within so long are a crash loop.
CRASHES, CRASH_MINUTES = 3, 15
MOST_JOBS = 100
FAILED_HOURS = 24
# Work on its way is no fault, nor is a job whose turn comes.
_BUSY = re.compile(
    r"the job waits for a slot: |\d+ groups wait at |training waits for \d+ prompts|"
    r"an evaluation \([^)]*\) is under way, [^:]*$"
)
_LOGS = "its log says why: runs/<name>/logs with `spo up`, `kubectl logs --previous` in a cluster; then `spo doctor`"

Entry = api.AttentionEntry

router = APIRouter(tags=["platform"])

scale_router = APIRouter(prefix="/v1/scale", tags=["platform"])

keys_router = APIRouter(prefix="/v1", tags=["access"])

KeyId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]

served_models_router = APIRouter(prefix="/v1/served-models", tags=["serving"])

Name = Annotated[str, Path(max_length=100, pattern=NAME_PATTERN, description="The name that clients ask for.")]

capture_router = APIRouter(prefix="/v1", tags=["capture"])

NDJSON = "application/x-ndjson"

continual_router = APIRouter(prefix="/v1/continual", tags=["continual jobs"])

ContinualName = Annotated[str, Path(pattern=NAME, description="Name of a continual job, unique within the tenant.")]


def replica_documents(context: AppContext, tenant: str | None) -> list[api.Replica]:
    """Every live registered replica; of those that serve another tenant's run, not which run and how it fares."""
    now = now_ms()
    live = context.replicas.live()
    runs = {replica.run_id for replica in live} - {""}
    hidden = {run for run in runs if tenant is not None and not _owns(context, tenant, run)}
    return [
        api.Replica.model_validate(
            {name: value for name, value in vars(replica).items() if name != "last_seen_unix_ms"}
            | (UNKNOWN_RUN if replica.run_id in hidden else {})
            | {"last_seen_seconds_ago": max(0, now - replica.last_seen_unix_ms) / 1000}
        )
        for replica in live
    ]


def platform_document(context: AppContext, tenant: str | None) -> api.PlatformView:
    """What the platform is and what it lost; the lost jobs of the tenant, None: of all."""
    identity = context.redis.hgetall(redis_keys.platform())
    return api.PlatformView(
        epoch=identity.get(b"epoch", b"").decode(),
        schema_version=identity.get(b"schema_version", b"").decode(),
        notice=context.watch.notice(),
        losses=[api.PlatformLoss(**vars(loss)) for loss in context.watch.identity.losses()],
        lost_jobs=[
            api.LostJob(
                id=manifest.id,
                name=manifest.name,
                tenant=manifest.tenant,
                state=manifest.state,
                saved_at=manifest.saved_at,
                checkpoints=sorted(map(int, manifest.checkpoints)),
                weight_versions=sorted(map(int, manifest.weights)),
            )
            for manifest in context.watch.lost(tenant)
        ],
    )


def _owns(context: AppContext, tenant: str, run_id: str) -> bool:
    try:
        return context.jobs.tenant(run_id) == tenant
    except NotFound:
        return False


def scale_document(context: AppContext) -> api.ScaleView:
    """How many replicas each pool that scales has, should have and may have."""
    desired = context.scale.desired()
    live = context.replicas.live()
    pools = {}
    for pool in SCALABLE:
        low, high = context.scale.bounds[pool]
        members = [replica for replica in live if replica.pool == pool]
        draining = sum(replica.draining for replica in members)
        pools[pool] = api.PoolView(
            desired=desired[pool], live=len(members) - draining, draining=draining, minimum=low, maximum=high
        )
    return api.ScaleView(scaler=context.scale.kind, pools=pools)


def attention_list(context: AppContext, principal: Principal) -> api.AttentionList:
    """Everything that asks for a person, errors first; of jobs those that the principal may see."""
    found = [
        *_platform(context, principal),
        *_deletions(context, principal),
        *_services(context, principal),
        *_jobs(context, principal),
        *_continual(context, principal),
    ]
    return api.AttentionList(items=sorted(found, key=lambda entry: entry.severity != "error"))


def _platform(context: AppContext, principal: Principal) -> Iterator[Entry]:
    if notice := context.watch.notice():
        remedy = "look at what is gone with `spo platform show`; `spo platform rebuild` makes lost jobs again"
        yield _entry("error", "data loss", notice, remedy)
    if context.watch.away:
        remedy = "look at the bucket, its network and the keys; what waits for it goes on by itself"
        yield _entry("error", "bucket", context.watch.away, remedy)
    if principal.is_admin and DeadLetters(context.redis, "").page("", 1, "").items:
        message = "entries that name no job were given up on"
        yield _entry("warning", "dead letters", message, "`spo dead-letters list` shows them, `drop` forgets them")


def _deletions(context: AppContext, principal: Principal) -> Iterator[Entry]:
    if principal.is_admin:
        for job_id, reason in context.deletion.failing().items():
            remedy = "give the orchestrator the right to write there, or remove it; it is tried again by itself"
            yield _entry("error", f"deleted job {job_id}", f"its files are still there: {reason}"[:500], remedy)


def _services(context: AppContext, principal: Principal) -> Iterator[Entry]:
    live = context.replicas.counts()
    busy = bool(context.jobs.in_states([state for state in JobState if state not in TERMINAL]))
    for pool in NEEDED_POOLS:
        if not live.get(pool):
            severity = "error" if busy else "warning"
            yield _entry(severity, pool, f"no live replica of {pool}", f"start one; {_LOGS}", page="/replicas")
    for pool, ends in context.replicas.ended_since(now_ms() - CRASH_MINUTES * 60_000).items():
        if ends >= CRASHES:
            message = f"{ends} processes ended in the last {CRASH_MINUTES} minutes without being asked to: a crash loop"
            yield _entry("error", pool, message, _LOGS, page="/replicas")
    for replica in replica_documents(context, principal.sees_tenant):
        if replica.problem:
            remedy = "it says what it waits for; where that lasts, its log has more"
            subject = f"{replica.pool} {replica.replica_id}"
            yield _entry("warning", subject, replica.problem, remedy, replica.run_id or None, "/replicas")


def _jobs(context: AppContext, principal: Principal) -> Iterator[Entry]:
    recent = (now_ms() - FAILED_HOURS * 3_600_000, None)
    ids: list[str] = []
    for state in JobState:
        if state in TERMINAL and state is not JobState.FAILED:
            continue
        created = recent if state is JobState.FAILED else (None, None)
        wanted = JobFilter([state], created=created, tenant=principal.sees_tenant)
        ids += page_of_jobs(context.redis, wanted, None, MOST_JOBS).job_ids
    for summary in job_summaries(context, ids):
        try:
            yield from _job(context, summary)
        except NotFound:
            # Deleted meanwhile.
            continue


def jobs_in_queue(context: AppContext, principal: Principal) -> list[api.JobSummary]:
    """The jobs that wait for a slot, oldest first; at most MOST_JOBS of those that the principal may see."""
    tenant = principal.sees_tenant
    ids = [job_id for job_id in context.queue.waiting() if tenant is None or _owns(context, tenant, job_id)]
    return job_summaries(context, ids[:MOST_JOBS])


def _continual(context: AppContext, principal: Principal) -> Iterator[Entry]:
    for job in context.continual.all(principal.sees_tenant):
        reason = context.continual.wait_of(job).reason
        if reason and not reason.startswith(WANTING):
            remedy = "it goes on by itself once that is mended; `spo continual show` says more"
            yield _entry("warning", f"continual job {job.name}", reason[:500], remedy, page="/models")


def _job(context: AppContext, job: api.JobSummary) -> Iterator[Entry]:
    subject, page = f"job {job.name}", f"/jobs/{job.id}"
    if job.state is JobState.FAILED:
        record = context.jobs.record(job.id)
        known = catalogue().get(record.failure_code)
        remedy = known.remedy if known else "its page and its log have more"
        yield _entry("error", subject, f"{record.failure_code}: {record.failure_message}"[:500], remedy, job.id, page)
    else:
        for reason in waits(context, job.id, job.state):
            if not _BUSY.match(reason):
                yield _entry("warning", subject, reason, "its page says who waits for whom", job.id, page)
        if job.state is JobState.RUNNING and (stuck := context.monitor.never_right(job.id, context.jobs.spec(job.id))):
            yield _entry("warning", subject, stuck.partition(": ")[0], stuck.partition(": ")[2], job.id, page)
    alarms = [json.loads(raw) for raw in context.redis.hvals(own_keys.job_alarms(job.id)) if raw.startswith(b"{")]
    if alarms and job.state is not JobState.FAILED:
        last = max(alarms, key=lambda alarm: int(alarm["step"]))
        remedy = "look at KL, entropy and reward around it; roll back, or fork an earlier checkpoint with a larger beta"
        yield _entry(
            "warning", subject, f"{len(alarms)} alarms, at step {last['step']}: {last['reason']}", remedy, job.id, page
        )
    letters = sum(total.count for total in counts_of(context.redis, job.id).values())
    if letters:
        remedy = "read their reasons; put back what may pass now"
        yield _entry("warning", subject, f"{letters} entries were given up on", remedy, job.id, f"{page}/dead-letters")


def _entry(severity: str, subject: str, message: str, remedy: str, job_id: str | None = None, page: str = "") -> Entry:
    return Entry.model_validate(
        {"severity": severity, "subject": subject, "message": message, "remedy": remedy, "job_id": job_id, "page": page}
    )


def version() -> str:
    """Version of the installed platform."""
    return metadata.version("spo-platform")


@router.get("/v1/replicas")
def list_replicas(context: ContextDep, principal: PrincipalDep) -> api.Replicas:
    """Every live registered replica: run, version, load, last heartbeat; another tenant's run is not named."""
    return api.Replicas(items=replica_documents(context, principal.sees_tenant))


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers, whatever keeps its threads busy."""
    return {"status": "ok"}


# The name that clients of vLLM's server ask for before they begin.
@router.get("/health", include_in_schema=False)
@router.get("/readyz")
async def readyz(context: ContextDep) -> dict[str, str]:
    """Ready for requests: Redis answers, this process leads and is not draining; a standby names the leader."""
    return await at_the_door(partial(_readiness, context))


def _readiness(context: AppContext) -> dict[str, str]:
    if context.stop.is_set():
        raise NotReady("the orchestrator is draining", code="draining")
    try:
        context.redis.ping()
    except redis.RedisError as error:
        raise as_spo_error(error) from None
    context.leadership.require()
    notice = context.watch.notice()
    return {"status": "ready", **({"data_loss": notice} if notice else {})}


@router.get("/v1/platform")
def show_platform(context: ContextDep, principal: PrincipalDep) -> api.PlatformView:
    """Which platform this is, what it lost, and the jobs whose records are gone; tenants see their own jobs."""
    return platform_document(context, principal.sees_tenant)


@router.post("/v1/platform/rebuild")
def rebuild_jobs(context: ContextDep, principal: PrincipalDep, body: api.RebuildRequest) -> api.RebuiltJobs:
    """Make the records of lost jobs again from their manifests, and acknowledge the loss; needs the scope admin."""
    lost = {manifest.id: manifest for manifest in context.watch.lost()}
    named = list(lost) if body.job_ids is None else body.job_ids
    faults = [
        FieldViolation(f"/job_ids/{number}", "is no lost job") for number, name in enumerate(named) if name not in lost
    ]
    if faults:
        raise InvalidInput("not all of these are lost jobs", code="not_lost", violations=tuple(faults))
    made = [
        context.job_rebuild.rebuild(lost[job_id], resume=body.resume, actor=principal.name)
        for job_id in dict.fromkeys(named)
    ]
    context.watch.acknowledge()
    return api.RebuiltJobs(items=[api.RebuiltJob(**vars(job)) for job in made])


@router.get("/v1/attention")
def show_attention(context: ContextDep, principal: PrincipalDep) -> api.AttentionList:
    """What is wrong now and what to do about it, errors first: services, jobs, dead letters; tenants see their own."""
    return attention_list(context, principal)


@router.get("/version")
def show_version() -> api.Version:
    """Version of the platform."""
    return api.Version(version=version())


@router.get("/metrics", response_class=Response)
def prometheus(context: ContextDep) -> Response:
    """Prometheus metrics of the orchestrator; gauges are read when scraped."""
    refresh_gauges(context)
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def refresh_gauges(context: AppContext) -> None:
    """Bring the gauges that describe Redis up to date."""
    for state, count in context.jobs.counts().items():
        JOBS.labels(state=state.value).set(count)
    REPLICAS.clear()
    for pool, count in context.replicas.counts().items():
        REPLICAS.labels(pool=pool).set(count)
    DELETIONS_FAILING.set(len(context.deletion.failing()))
    held = context.agent_episodes.held()
    for state in get_args(EpisodeState):
        AGENT_EPISODES.labels(state=state).set(sum(each.state == state for each in held))
    # Runners are scaled by it: a pool that has none open is there with 0.
    for pool, count in context.agent_episodes.open_by_pool().items():
        AGENT_OPEN_EPISODES.labels(pool=pool).set(count)
    leased = [each.leased_unix_ms for each in held if each.state == "leased" and each.leased_unix_ms]
    AGENT_LEASE_AGE.set(max(0.0, (now_ms() - min(leased)) / 1000) if leased else 0.0)
    for pool, count in context.autoscaling.wanted.items():
        WANTED_REPLICAS.labels(pool=pool).set(count)
    for stream, depth in platform_depths(context.redis, context.jobs.in_states(ACTIVE)).items():
        STREAM_LAG.labels(stream=stream).set(depth.lag)
        STREAM_PENDING.labels(stream=stream).set(depth.pending)


@scale_router.get("")
def get_scale(context: ContextDep) -> api.ScaleView:
    """Desired and live replicas of the pools that scale."""
    return scale_document(context)


@scale_router.put("", status_code=202)
def put_scale(context: ContextDep, body: api.ScaleRequest) -> api.ScaleView:
    """Ask for other numbers of replicas; they join and drain while jobs run."""
    given = {"inference": body.inference, "sandbox-judge": body.sandbox_judge, "verifier": body.verifier}
    context.scale.request({pool: count for pool, count in given.items() if count is not None})
    return scale_document(context)


@keys_router.post("/keys", status_code=201)
def create_key(context: ContextDep, body: api.KeyRequest) -> api.NewKey:
    """Make a key. Its token is in this response and nowhere else."""
    key, token = context.authenticator.keys.create(
        body.name,
        body.tenant,
        tuple(body.scopes),
        body.max_active_jobs,
        body.expires_in_seconds,
    )
    return api.NewKey.model_validate({**asdict(key), "token": token})


@keys_router.get("/keys")
def list_keys(context: ContextDep) -> api.Keys:
    """Every key, revoked ones too, without secrets."""
    return api.Keys(items=[_shown(key) for key in context.authenticator.keys.all()])


@keys_router.delete("/keys/{key_id}")
def revoke_key(context: ContextDep, key_id: KeyId) -> api.Key:
    """Make a key useless, within five seconds."""
    return _shown(context.authenticator.keys.revoke(key_id))


@keys_router.get("/audit")
def audit(
    context: ContextDep,
    limit: Limit = 100,
    cursor: Annotated[str, Query(pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> api.AuditPage:
    """Changes and refusals, newest first; the last million are kept."""
    entries, next_cursor = context.audit.page(cursor, limit)
    return api.AuditPage(items=entries, next_cursor=next_cursor)


def _shown(key: ApiKey) -> api.Key:
    return api.Key.model_validate(key, from_attributes=True)


@served_models_router.get("")
def list_served_models(context: ContextDep, principal: PrincipalDep) -> api.ServedModelList:
    """Every name that means something now."""
    return _list(context.served_models.all(principal.sees_tenant))


@served_models_router.get("/{name}")
def get_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> api.ServedModelView:
    """What a name means now."""
    return _view(context.served_models.get(principal.tenant, name))


@served_models_router.put("/{name}")
def publish_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: api.Publication
) -> api.ServedModelView:
    """Make a name mean a weight version of a job, or its newest; what it means already is no change."""
    _check_replicas(context, principal, body.min_replicas)
    change = Change(principal.name, body.note, body.expected_number, body.min_replicas)
    return _view(context.served_models.publish(principal.tenant, name, Target(body.job_id, body.version), change))


@served_models_router.delete("/{name}")
def remove_served_model(context: ContextDep, principal: PrincipalDep, name: Name) -> api.ServedModelView:
    """Let a name mean nothing; its history stays."""
    return _view(context.served_models.remove(principal.tenant, name, Change(principal.name)))


@served_models_router.post("/{name}/rollback")
def roll_back_served_model(
    context: ContextDep, principal: PrincipalDep, name: Name, body: api.Rollback
) -> api.ServedModelView:
    """Serve again what was served before; once more goes back one further."""
    change = Change(principal.name, body.note, body.expected_number)
    return _view(context.served_models.roll_back(principal.tenant, name, change, body.to_number))


@served_models_router.get("/{name}/history")
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
        history=list(map(_round_shown, rounds)),
    )


def _round_shown(each: Round) -> api.ContinualRound:
    return api.ContinualRound(
        **{name: value for name, value in asdict(each).items() if name not in ("overrides", "parent_change")}
    )
