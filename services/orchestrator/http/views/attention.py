"""What is wrong on the platform now and what to do about it: services, jobs, entries that were given up on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from services.orchestrator import redis_keys as own_keys
from services.orchestrator import schemas
from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http.views.dead_letters import DeadLetters
from services.orchestrator.http.views.jobs import job_summaries, waits
from services.orchestrator.http.views.platform import replicas
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.jobs.listing import JobFilter, page_of_jobs
from spo.error_codes import CATALOGUE
from spo.errors import NotFound
from spo.messaging.streams.dead_letters import counts_of
from spo.spec.job_state import TERMINAL, JobState

NEEDED_POOLS = ("inference", "sandbox-judge", "replay-buffer", "value-estimation", "trainer")
# So many ends of a pool's processes within so long are a crash loop.
CRASHES, CRASH_MINUTES = 3, 15
MOST_JOBS = 100
FAILED_HOURS = 24
# Work on its way is no fault.
_BUSY = re.compile(r"\d+ groups wait at |training waits for \d+ prompts|an evaluation \([^)]*\) is under way, [^:]*$")
_LOGS = "its log says why: runs/<name>/logs with `spo up`, `kubectl logs --previous` in a cluster; then `spo doctor`"

Entry = schemas.AttentionEntry


def attention(context: AppContext, principal: Principal) -> schemas.AttentionList:
    """Everything that asks for a person, errors first; of jobs those that the principal may see."""
    found = [
        *_platform(context, principal),
        *_deletions(context, principal),
        *_services(context, principal),
        *_jobs(context, principal),
        *_continual(context, principal),
    ]
    return schemas.AttentionList(items=sorted(found, key=lambda entry: entry.severity != "error"))


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
    for replica in replicas(context, principal.sees_tenant):
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


def _continual(context: AppContext, principal: Principal) -> Iterator[Entry]:
    for job in context.continual.all(principal.sees_tenant):
        if reason := context.continual.wait_of(job).reason:
            remedy = "it goes on by itself once that is mended; `spo continual show` says more"
            yield _entry("warning", f"continual job {job.name}", reason[:500], remedy, page="/models")


def _job(context: AppContext, job: schemas.JobSummary) -> Iterator[Entry]:
    subject, page = f"job {job.name}", f"/jobs/{job.id}"
    if job.state is JobState.FAILED:
        record = context.jobs.record(job.id)
        known = CATALOGUE.get(record.failure_code)
        remedy = known.remedy if known else "its page and its log have more"
        yield _entry("error", subject, f"{record.failure_code}: {record.failure_message}"[:500], remedy, job.id, page)
    else:
        for reason in waits(context, job.id, job.state):
            if not _BUSY.match(reason):
                yield _entry("warning", subject, reason, "its page says who waits for whom", job.id, page)
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
