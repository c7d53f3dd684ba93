"""The HTTP application and its server: routers, errors, limits, and what the OpenAPI document says beyond the
routes.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers
from starlette.staticfiles import StaticFiles

from services.orchestrator.container import AppContext, threads_for_checks
from services.orchestrator.http import errors
from services.orchestrator.http.agents import calls_router as agent_calls_router, router as agents_router
from services.orchestrator.http.dialects import router as dialects_router
from services.orchestrator.http.errors import MEDIA_TYPE, STATIC, ProblemDocument
from services.orchestrator.http.events import LiveEvents, dead_letters_router, logs_router, router as events_router
from services.orchestrator.http.experience import datasets_router, router as experience_router
from services.orchestrator.http.jobs import deletions, router as jobs_router
from services.orchestrator.http.middleware import OPEN_PATHS, RequestMiddleware, limited_connections
from services.orchestrator.http.openai import router as openai_router
from services.orchestrator.http.pages.jobs import (
    compare_router as compare_pages,
    job_router as job_pages,
    router as jobs_pages,
    submission_router as submission_pages,
)
from services.orchestrator.http.pages.platform import (
    catalogue_router as catalogue_pages,
    errors_router as error_pages,
    reference_router as reference_pages,
    router as platform_pages,
)
from services.orchestrator.http.pages.trajectories import (
    episodes_router as episodes_pages,
    prompts_router as prompts_pages,
    router as trajectories_pages,
)
from services.orchestrator.http.platform import (
    capture_router,
    continual_router,
    keys_router,
    router as platform_router,
    scale_router,
    served_models_router,
    version as platform_version,
)
from services.orchestrator.http.tinker import router as tinker_router
from services.orchestrator.http.training import (
    evaluations_router,
    policies_router,
    router as training_router,
    trajectories_router,
    values_router,
)
from services.orchestrator.job_records import legal_transitions
from spo.errors import Unreachable
from spo.messaging.redis_client import open_async_server
from spo.observability import get_logger
from spo.spec.job_spec import JobSpec

JsonObject = dict[str, Any]

REF = "#/components/schemas/{model}"
METHODS = ("get", "put", "post", "delete", "patch")
SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of the OIDC provider."},
    "basic": {"type": "http", "scheme": "basic", "description": "For browsers: any name, the API key as password."},
}
_MEANINGS = {
    400: "The body is not JSON",
    401: "No key, or one that is not valid",
    403: "The key lacks a scope, or the request comes from another site",
    404: "Not there, or not yours",
    408: "The body did not arrive in time",
    409: "Not in this state, or the name is taken",
    412: "What the request builds on has changed or is missing",
    413: "The body is too large",
    415: "Not this media type or encoding",
    422: "Not valid; `errors` points at each fault",
    429: "Too much at once; `Retry-After` says when to come back",
    431: "The address and headers are too large together",
    500: "Our fault; the log of the orchestrator has it",
    503: "Not now; try again",
}
# Of every operation that needs a key; 429 and 503 since Redis may be full or absent at any time.
_ALWAYS = (401, 403, 413, 415, 422, 429, 431, 500, 503)
_WITH_BODY = (400, 408)
_WITH_PATH = (404, 412)
_CHANGING = (404, 409, 412)
# Query parameters that name something that may not exist.
_NAMING = {"run", "job", "cursor"}

pages_router = APIRouter(include_in_schema=False)
_PAGES = (
    jobs_pages,
    compare_pages,
    catalogue_pages,
    reference_pages,
    submission_pages,
    job_pages,
    trajectories_pages,
    prompts_pages,
    episodes_pages,
    platform_pages,
)

log = get_logger("http")

STOP_SECONDS = 5
# By then everything that the orchestrator imports and builds once is there.
SETTLED_SECONDS = 5.0


# Errors on the paths of OpenAI's and Anthropic's clients: what their forms have in common.
_ERROR_OF_THEIRS = "ErrorOfDialect"
_DIALECT_ERROR: JsonObject = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def describe(app: FastAPI) -> None:
    """Complete the document that the application serves and `make openapi` writes."""
    generate = app.openapi

    def openapi() -> JsonObject:
        if app.openapi_schema is None:
            document = generate()
            _add_schemas(document)
            _add_failures(document)
            _tell_object_defaults(document["components"]["schemas"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_schemas(document: JsonObject) -> None:
    spec = JobSpec.model_json_schema(ref_template=REF)
    problem = ProblemDocument.model_json_schema(ref_template=REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for schema, name in ((spec, "JobSpec"), (problem, "Problem")):
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    schemas[_ERROR_OF_THEIRS] = _DIALECT_ERROR
    schemas["JobState"]["x-legal-transitions"] = legal_transitions()


def _tell_object_defaults(schemas: JsonObject) -> None:
    """Put what an alternative of objects is by default into words: generators take no such default as a value."""
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            if "anyOf" in field and isinstance(field.get("default"), dict):
                default = json.dumps(field.pop("default"))
                field["description"] = f"{field.get('description', '')} Default: {default}.".strip()


def _add_failures(document: JsonObject) -> None:
    components = document["components"]
    components["securitySchemes"] = SCHEMES
    components["responses"] = {
        f"{_name(status)}{shape}": _problem(status, shape) for status in _MEANINGS for shape in ("", _ERROR_OF_THEIRS)
    }
    document["security"] = [{name: []} for name in SCHEMES]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in METHODS:
                continue
            responses = operation["responses"]
            shape = _ERROR_OF_THEIRS if errors.dialect(path.removeprefix("/s/{session_id}"), Headers()) else ""
            responses["default"] = _problem(None, shape)
            if path in OPEN_PATHS:
                operation["security"] = []
            # What is wrong with a request is a 400 in their forms.
            statuses = {400 if shape and status == 422 else status for status in _failures(path, method, operation)}
            for status in sorted(statuses):
                responses.setdefault(str(status), {"$ref": f"#/components/responses/{_name(status)}{shape}"})


def _failures(path: str, method: str, operation: JsonObject) -> list[int]:
    if path in OPEN_PATHS:
        return [413, 415, 503]
    statuses = set(_ALWAYS)
    if "{" in path or any(parameter["name"] in _NAMING for parameter in operation.get("parameters", [])):
        statuses.update(_WITH_PATH)
    if method != "get":
        statuses.update(_CHANGING)
    if "requestBody" in operation:
        statuses.update(_WITH_BODY)
    return sorted(statuses)


def _name(status: int) -> str:
    return f"Problem{status}"


def _problem(status: int | None, shape: str = "") -> JsonObject:
    description = _MEANINGS[status] if status else "an error" if shape else "RFC 9457 problem"
    media_type, model = ("application/json", shape) if shape else (MEDIA_TYPE, "Problem")
    found: JsonObject = {
        "description": description,
        "content": {media_type: {"schema": {"$ref": REF.format(model=model)}}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
    return found


for pages in _PAGES:
    pages_router.include_router(pages)


@cache
def _described() -> FastAPI:
    """Every route and the document of them, which no context changes.

    Made once in a process: it takes most of a second to look at all signatures.
    """
    app = FastAPI(
        title="SPO orchestrator",
        version=platform_version(),
        description="Soft Policy Optimization (Cohen et al., 2025): submit, watch and steer post-training jobs.",
        docs_url=None,
        redoc_url=None,
        # The names of functions: what generated clients call their own.
        generate_unique_id_function=lambda route: route.name,
        responses={"default": {"description": "RFC 9457 problem"}},
    )
    for routes in (
        jobs_router,
        events_router,
        dead_letters_router,
        training_router,
        trajectories_router,
        values_router,
        experience_router,
        continual_router,
        datasets_router,
        evaluations_router,
        logs_router,
        policies_router,
        keys_router,
        scale_router,
        served_models_router,
        openai_router,
        dialects_router,
        agents_router,
        agent_calls_router,
        capture_router,
        tinker_router,
        platform_router,
        pages_router,
        error_pages,
    ):
        app.include_router(routes)
    app.include_router(deletions)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    describe(app)
    return app


def create_app(context: AppContext) -> FastAPI:
    """The application; live events have their own asyncio connections to Redis."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_async_server(context.settings.redis_url) as client:
            app.state.live = LiveEvents(client, context.jobs, context.stop)
            app.state.checks = threads_for_checks()
            yield
            await app.state.live.close()

    described = _described()
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.routes.extend(described.router.routes)
    app.openapi = described.openapi  # type: ignore[method-assign]
    app.state.context = context
    errors.install(app)
    app.add_middleware(RequestMiddleware, context=context)
    return app


class HttpServer:
    """Serves the REST API and the pages on the HTTP port."""

    def __init__(self, context: AppContext) -> None:
        self.host = context.settings.host
        config = uvicorn.Config(
            create_app(context),
            host=self.host,
            port=context.settings.http_port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
            http=limited_connections(context.settings.max_connections),
            ws="none",
        )
        self.server = uvicorn.Server(config)

    @property
    def port(self) -> int:
        """The port in use; 0 until the server listens."""
        servers = getattr(self.server, "servers", [])
        return int(servers[0].sockets[0].getsockname()[1]) if servers and servers[0].sockets else 0

    def run(self, stop: threading.Event) -> None:
        """Serve until stop. Raises Unreachable when the server ends early, as when its port is taken."""
        thread = threading.Thread(target=self._serve, name="http", daemon=True)
        thread.start()
        while not stop.wait(0.5):
            if not thread.is_alive():
                raise Unreachable(f"the HTTP server on {self.host}:{self.server.config.port} ended", code="http_ended")
        self.server.should_exit = True
        thread.join(STOP_SECONDS + 1)

    def _serve(self) -> None:
        try:
            self.server.run()
        except SystemExit:
            # uvicorn exits when it cannot bind; the thread's end tells `run`.
            log.error("could not listen", host=self.host, port=self.server.config.port)


def freeze_gc(stop: threading.Event) -> None:
    """Exempt from garbage collection, once, what lives as long as the process: walking it stops requests for 0.1 s.

    Not for processes that hold models: a model may be built by then, and could never be freed.
    """
    if not stop.wait(SETTLED_SECONDS):
        gc.collect()
        gc.freeze()
