"""The platform itself: replicas, health, version, Prometheus metrics."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Annotated

import redis
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.http.threads import at_the_door
from services.orchestrator.lifecycle.pipeline import platform_depths
from spo.errors import FieldViolation, InvalidInput, NotReady
from spo.observability.metrics import DELETIONS_FAILING, JOBS, REPLICAS, STREAM_LAG, STREAM_PENDING, WANTED_REPLICAS
from spo.spec.job_state import ACTIVE

router = APIRouter(tags=["platform"])


class RebuildRequest(BaseModel):
    """Which lost jobs; null: all. Without `resume` those that had not ended come back as failed."""

    model_config = ConfigDict(extra="forbid")

    job_ids: list[Annotated[str, Field(max_length=200)]] | None = Field(default=None, max_length=10_000)
    resume: StrictBool = Field(default=False, description="Queue them again, to go on from their newest checkpoints.")


def version() -> str:
    """Version of the installed platform."""
    return metadata.version("spo-platform")


@router.get("/v1/replicas")
def list_replicas(context: ContextDep, principal: PrincipalDep) -> schemas.Replicas:
    """Every live registered replica: run, version, load, last heartbeat; another tenant's run is not named."""
    return schemas.Replicas(items=views.replicas(context, principal.sees_tenant))


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers, whatever keeps its threads busy."""
    return {"status": "ok"}


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
        raise NotReady(f"Redis does not answer: {error}", code="redis_unreachable") from None
    context.leadership.require()
    notice = context.watch.notice()
    return {"status": "ready", **({"data_loss": notice} if notice else {})}


@router.get("/v1/platform")
def show_platform(context: ContextDep, principal: PrincipalDep) -> schemas.PlatformView:
    """Which platform this is, what it lost, and the jobs whose records are gone; tenants see their own jobs."""
    return views.platform(context, principal.sees_tenant)


@router.post("/v1/platform/rebuild")
def rebuild_jobs(context: ContextDep, principal: PrincipalDep, body: RebuildRequest) -> schemas.RebuiltJobs:
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
    return schemas.RebuiltJobs(items=[schemas.RebuiltJob(**vars(job)) for job in made])


@router.get("/v1/attention")
def show_attention(context: ContextDep, principal: PrincipalDep) -> schemas.AttentionList:
    """What is wrong now and what to do about it, errors first: services, jobs, dead letters; tenants see their own."""
    return views.attention(context, principal)


@router.get("/version")
def show_version() -> schemas.Version:
    """Version of the platform."""
    return schemas.Version(version=version())


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
    for pool, count in context.autoscaling.wanted.items():
        WANTED_REPLICAS.labels(pool=pool).set(count)
    for stream, depth in platform_depths(context.redis, context.jobs.in_states(ACTIVE)).items():
        STREAM_LAG.labels(stream=stream).set(depth.lag)
        STREAM_PENDING.labels(stream=stream).set(depth.pending)
