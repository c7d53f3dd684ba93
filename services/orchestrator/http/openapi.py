"""What the OpenAPI document says beyond the routes: who may ask, how operations fail, the JobSpec, the states."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from services.orchestrator.http.errors import MEDIA_TYPE, ProblemDocument
from services.orchestrator.http.middleware import OPEN_PATHS
from services.orchestrator.jobs.states import legal_transitions
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


def describe(app: FastAPI) -> None:
    """Complete the document that the application serves and `make openapi` writes."""
    generate = app.openapi

    def openapi() -> JsonObject:
        if app.openapi_schema is None:
            document = generate()
            _add_schemas(document)
            _add_failures(document)
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
    schemas["JobState"]["x-legal-transitions"] = legal_transitions()


def _add_failures(document: JsonObject) -> None:
    components = document["components"]
    components["securitySchemes"] = SCHEMES
    components["responses"] = {_name(status): _problem(status) for status in _MEANINGS}
    document["security"] = [{name: []} for name in SCHEMES]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in METHODS:
                continue
            responses = operation["responses"]
            responses["default"] = _problem(None)
            if path in OPEN_PATHS:
                operation["security"] = []
            for status in _failures(path, method, operation):
                responses.setdefault(str(status), {"$ref": f"#/components/responses/{_name(status)}"})


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


def _problem(status: int | None) -> JsonObject:
    description = _MEANINGS[status] if status else "RFC 9457 problem"
    found: JsonObject = {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
    return found
