"""The HTTP application: routers, errors, limits and the OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from services.orchestrator import problems
from services.orchestrator.api import (
    datasets,
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
from services.orchestrator.api.contract import describe
from services.orchestrator.api.gate import Gate
from services.orchestrator.api.live import LiveEvents
from services.orchestrator.desk import Desk
from services.orchestrator.web import errors, pages


def create_app(desk: Desk) -> FastAPI:
    """The application over a desk; live events have their own asyncio connections to Redis."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client = redis.asyncio.Redis.from_url(desk.settings.redis_url)
        app.state.live = LiveEvents(client, desk.stop)
        yield
        await app.state.live.close()
        await client.aclose()

    app = FastAPI(
        title="SPO orchestrator",
        version=platform.version(),
        description="Soft Policy Optimization (Cohen et al., 2025): submit, watch and steer post-training jobs.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"description": "RFC 9457 problem"}},
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
        datasets,
        evaluations,
        logs,
        policies,
        keys,
        scale,
        platform,
        pages,
        errors,
    ):
        app.include_router(door.router)
    app.mount("/static", StaticFiles(directory=pages.STATIC), name="static")
    app.add_middleware(Gate, settings=desk.settings, doorkeeper=desk.doorkeeper, audit=desk.audit)
    describe(app)
    return app
