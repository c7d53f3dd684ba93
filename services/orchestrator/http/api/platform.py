"""The platform itself: replicas, health, version, Prometheus metrics."""

from __future__ import annotations

from importlib import metadata

import redis
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.lifecycle.pipeline import platform_depths
from spo.errors import NotReady
from spo.observability.metrics import JOBS, REPLICAS, STREAM_LAG, STREAM_PENDING
from spo.spec.job_state import ACTIVE

router = APIRouter(tags=["platform"])


def version() -> str:
    """Version of the installed platform."""
    return metadata.version("spo-platform")


@router.get("/v1/replicas")
def list_replicas(context: ContextDep, principal: PrincipalDep) -> schemas.Replicas:
    """Every live registered replica: run, version, load, last heartbeat; another tenant's run is not named."""
    return schemas.Replicas(items=views.replicas(context, principal.sees_tenant))


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(context: ContextDep) -> dict[str, str]:
    """Ready for requests: Redis answers and the process is not draining."""
    if context.stop.is_set():
        raise NotReady("the orchestrator is draining", code="draining")
    try:
        context.redis.ping()
    except redis.RedisError as error:
        raise NotReady(f"Redis does not answer: {error}", code="redis_unreachable") from None
    return {"status": "ready"}


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
    for stream, depth in platform_depths(context.redis, context.jobs.in_states(ACTIVE)).items():
        STREAM_LAG.labels(stream=stream).set(depth.lag)
        STREAM_PENDING.labels(stream=stream).set(depth.pending)
