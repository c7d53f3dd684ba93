"""The HTTP application: routers, errors, limits and the OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from services.orchestrator.container import AppContext
from services.orchestrator.http import errors
from services.orchestrator.http.api import (
    capture,
    continual,
    datasets,
    dead_letters,
    evaluations,
    events,
    experience,
    jobs,
    keys,
    logs,
    platform,
    policies,
    scale,
    served_models,
    training,
    trajectories,
    values,
)
from services.orchestrator.http.api.openai import completions
from services.orchestrator.http.api.tinker import routes as tinker
from services.orchestrator.http.live_events import LiveEvents
from services.orchestrator.http.middleware import RequestMiddleware
from services.orchestrator.http.openapi import describe
from services.orchestrator.http.pages import errors as error_pages
from services.orchestrator.http.pages import router as pages
from services.orchestrator.http.threads import threads_for_checks
from spo.messaging.redis_url import open_async_server


def create_app(context: AppContext) -> FastAPI:
    """The application; live events have their own asyncio connections to Redis."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_async_server(context.settings.redis_url) as client:
            app.state.live = LiveEvents(client, context.jobs, context.stop)
            app.state.checks = threads_for_checks()
            yield
            await app.state.live.close()

    app = FastAPI(
        title="SPO orchestrator",
        version=platform.version(),
        description="Soft Policy Optimization (Cohen et al., 2025): submit, watch and steer post-training jobs.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"description": "RFC 9457 problem"}},
    )
    app.state.context = context
    errors.install(app)
    for routes in (
        jobs,
        events,
        dead_letters,
        training,
        trajectories,
        values,
        experience,
        continual,
        datasets,
        evaluations,
        logs,
        policies,
        keys,
        scale,
        served_models,
        completions,
        capture,
        tinker,
        platform,
        pages,
        error_pages,
    ):
        app.include_router(routes.router)
    app.include_router(jobs.deletions)
    app.mount("/static", StaticFiles(directory=pages.STATIC), name="static")
    app.add_middleware(RequestMiddleware, context=context)
    describe(app)
    return app
