"""Errors as RFC 9457 problem+json; the one place where SpoErrors become HTTP statuses."""

from __future__ import annotations

import json
from collections.abc import Sequence

import redis
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match

from services.orchestrator.http.openai_errors import as_openai_error, is_openai_path
from services.orchestrator.http.pages.rendering import error_page, wants_page
from spo import errors
from spo.observability.logs import get_logger

log = get_logger("http")

MEDIA_TYPE = "application/problem+json"
_STATUSES: tuple[tuple[type[errors.SpoError], int], ...] = (
    (errors.InvalidInput, 422),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.PreconditionFailed, 412),
    (errors.NotReady, 503),
    (errors.ResourceExhausted, 429),
    (errors.SpoError, 500),
)
# Codes with a more precise HTTP status than that of their kind.
_BY_CODE = {
    "malformed_json": 400,
    "malformed_request": 400,
    "unauthorized": 401,
    "cross_site": 403,
    "forbidden": 403,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "head_timeout": 408,
    # Clients of the Tinker API stop their heartbeats at this status alone.
    "tinker_session_over": 410,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "head_too_large": 431,
}
_CODES_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}


class FieldProblem(BaseModel):
    pointer: str
    message: str


class ProblemDocument(BaseModel):
    """RFC 9457 problem details; errors point at each faulty field (RFC 6901)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    errors: list[FieldProblem] = []


def problem(error: errors.SpoError) -> JSONResponse:
    """The error as an HTTP response."""
    status = _BY_CODE.get(error.code) or next(number for kind, number in _STATUSES if isinstance(error, kind))
    body = ProblemDocument(
        type=f"/errors/{error.code}",
        title=error.code.replace("_", " "),
        status=status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        errors=[FieldProblem(pointer=violation.pointer, message=violation.message) for violation in error.violations],
    )
    headers = {"Retry-After": str(error.retry_after_seconds)} if error.retryable else {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="spo", charset="UTF-8"'
    return JSONResponse(body.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def as_page(path: str, headers: Headers, response: JSONResponse) -> Response:
    """The problem as an HTML page where a browser asked for a page, in OpenAI's form on its paths, else unchanged."""
    if is_openai_path(path):
        return as_openai_error(response)
    if not wants_page(path, headers):
        return response
    body = json.loads(bytes(response.body))
    page = HTMLResponse(error_page(body["status"], body["code"], body["detail"]), response.status_code)
    page.headers.update({name: value for name, value in response.headers.items() if not name.startswith("content-")})
    return page


def install(app: FastAPI) -> None:
    """Register handlers that turn every error of the application into a problem document."""

    @app.exception_handler(errors.SpoError)
    def spo_error(request: Request, error: errors.SpoError) -> Response:
        return _respond(request, error)

    @app.exception_handler(RequestValidationError)
    def invalid_request(request: Request, error: RequestValidationError) -> Response:
        violations = tuple(_violation(fault["loc"], fault["msg"]) for fault in error.errors())
        return _respond(
            request, errors.InvalidInput("the request is not valid", code="invalid_request", violations=violations)
        )

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        code = _CODES_BY_STATUS.get(error.status_code, "bad_request")
        kind = errors.NotFound if error.status_code == 404 else errors.InvalidInput
        response = _respond(request, kind(str(error.detail), code=code))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            # Starlette lists the methods of one route, but a path may have several routes.
            response.headers["Allow"] = ", ".join(_allowed(request))
        return response

    @app.exception_handler(redis.RedisError)
    def redis_error(request: Request, error: redis.RedisError) -> Response:
        log.warning("Redis did not answer a request", reason=str(error))
        return _respond(request, errors.Unreachable("Redis does not answer; try again", code="redis_unreachable"))

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        log.error("request failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
        return _respond(
            request, errors.InternalError("something went wrong on our side; the log of the orchestrator has it")
        )


def _respond(request: Request, error: errors.SpoError) -> Response:
    return as_page(request.url.path, request.headers, problem(error))


def _allowed(request: Request) -> list[str]:
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _violation(location: Sequence[str | int], message: str) -> errors.FieldViolation:
    place, *path = location
    steps = path if place == "body" else [place, *path]
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return errors.FieldViolation(pointer or "/", message)
