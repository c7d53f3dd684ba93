"""The HTTP application: routers, errors, limits and the OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from services.orchestrator import problems
from services.orchestrator.api import (
    evaluations,
    events,
    experience,
    experience_store,
    jobs,
    keys,
    logs,
    platform,
    policies,
    scale,
    training,
    values,
)
from services.orchestrator.api.gate import Gate
from services.orchestrator.desk import Desk
from services.orchestrator.jobs import legal_transitions
from services.orchestrator.web import pages
from spo.job_spec import JobSpec

REF = "#/components/schemas/{model}"


def create_app(desk: Desk) -> FastAPI:
    """The application over a desk; the event streams get their own asyncio connections to Redis."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.redis = redis.asyncio.Redis.from_url(desk.settings.redis_url)
        yield
        await app.state.redis.aclose()

    app = FastAPI(
        title="SPO orchestrator",
        version=platform.version(),
        description="Soft Policy Optimization (Cohen et al., 2025): submit, watch and steer post-training jobs.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"model": problems.Problem, "description": "RFC 9457 problem"}},
    )
    app.state.desk = desk
    problems.install(app)
    for door in (
        jobs,
        events,
        training,
        experience,
        values,
        experience_store,
        evaluations,
        logs,
        policies,
        keys,
        scale,
        platform,
        pages,
    ):
        app.include_router(door.router)
    app.mount("/static", StaticFiles(directory=pages.STATIC), name="static")
    app.add_middleware(Gate, settings=desk.settings, doorkeeper=desk.doorkeeper, audit=desk.audit)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Complete the OpenAPI document: the JobSpec schema and the table of legal transitions."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            spec = JobSpec.model_json_schema(ref_template=REF)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(spec.pop("$defs", {}))
            schemas["JobSpec"] = spec
            schemas["JobState"]["x-legal-transitions"] = legal_transitions()
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
