"""Submitting a job, for the API and the page: checks that depend on who asks, the quota, the job."""

from __future__ import annotations

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.experience.availability import require_stored
from services.orchestrator.jobs.creation import Submission, submitted_before
from services.orchestrator.lifecycle.shared_rollout_rules import require_followable
from spo.errors import ResourceExhausted
from spo.spec.job_spec import JobSpec


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
