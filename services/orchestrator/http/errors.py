"""What is rendered for whoever asks: errors as RFC 9457 problem+json, in OpenAI's form or as pages; the one place
where SpoErrors become HTTP statuses.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import redis
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match

from services.orchestrator.damaged_jobs import keys_of_another_kind
from services.orchestrator.job_records import ACTIONS
from spo import errors
from spo.errors import SpoError, catalogue
from spo.messaging.redis_client import as_spo_error
from spo.observability import get_logger
from spo.spec.section import JobState

if TYPE_CHECKING:
    from services.orchestrator.container import AppContext

# The first steps of the paths of each API, whether they are served or not; a base URL with /v1 at its end twice, too.
_OPENAI = re.compile(
    r"/v1/(assistants|audio|batches|chat|chatkit|completions|containers|conversations|edits|embeddings|engines|evals"
    r"|files|fine-tunes|fine_tuning|images|models|moderations|organization|projects|realtime|responses|skills|threads"
    r"|uploads|v1|vector_stores|videos)(/|$)"
)
_ANTHROPIC = re.compile(r"/v1/(complete|messages)(/|$)")
_SHARED = re.compile(r"/v1/(files|models|organizations|skills|v1/messages)(/|$)")
# Where a session's calls go; its address may carry its key.
SESSION = re.compile(r"/s/(ses_[0-9A-Z]{26})(\.[A-Za-z0-9_-]+)?(?=/|$)")
# An address that no session can have is answered in the same form.
_OF_SESSION = re.compile(r"/s/[^/]*(?=/|$)")
_OF = {"responses": "OpenAI's Responses", "messages": "Anthropic's Messages"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# What a client hears of Redis; its own words, with addresses and commands, are for the log.
_REDIS_WORDS = {
    "redis_full": "Redis is full and refuses writes; try again when there is room",
    "redis_refuses": "Redis takes no such command now; try again",
    "redis_failover": "Redis has no primary that is up; try again",
    "redis_unreachable": "Redis does not answer; try again",
}
_DAMAGED = "holds another kind of value in Redis than it should; the job can still be cancelled"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CODES = {"unauthorized": "invalid_api_key", "prompt_too_long": "context_length_exceeded"}

FOLDER = Path(__file__).parent / "pages"
STATIC = FOLDER / "static"

templates = Jinja2Templates(FOLDER / "templates")

# Remedies that differ in a browser from those for a program.
ADVICE = {
    "unauthorized": "Reload and sign in: any user name, and your API key as the password.",
    "forbidden": "Ask an administrator for a key with this scope.",
    "cross_site": "Open the page by the address that the platform printed when it started.",
    "job_not_found": "It may have been deleted, or belong to somebody else. The list of jobs has those you may see.",
}
OTHERWISE = "Go back to the jobs; if it happens again, the log of the orchestrator has more."

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


def dialect(path: str, headers: Headers) -> Literal["openai", "anthropic"] | None:
    """Whose clients ask a path, and so whose form its errors have; None: a path of the platform's own API.

    A session's own paths are those of both below its address, and all others there are taken for OpenAI's.
    """
    if session := _OF_SESSION.match(path):
        return dialect(path[session.end() :], headers) or "openai"
    if _ANTHROPIC.match(path) or ("anthropic-version" in headers and _SHARED.match(path)):
        return "anthropic"
    return "openai" if _OPENAI.match(path) else None


def _unserved(path: str) -> str:
    """What is said of a path of theirs that is not served; "" of any other."""
    if found := re.search(r"/v1/(responses|messages)(?=/)", path):
        return f"of {_OF[found[1]]} API {path[:100]} is not served: only POST {found[0]} is"
    return ""


def as_openai_error(response: JSONResponse) -> JSONResponse:
    """A problem document in OpenAI's form: what is wrong with a request is a 400 there."""
    message, code, status, pointer = _problem_of(response)
    return _shaped(response, _document(message, code, status, pointer), status)


def as_anthropic_error(response: JSONResponse) -> JSONResponse:
    """A problem document in Anthropic's form: what is wrong with a request is a 400 there."""
    message, _, status, _ = _problem_of(response)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _shaped(response, {"type": "error", "error": {"type": kind, "message": message}}, status)


def _problem_of(response: JSONResponse) -> tuple[str, str, int, str]:
    """Message, code, status and pointer of a problem document, as both APIs have them."""
    problem = json.loads(bytes(response.body))
    status = 400 if response.status_code == 422 else response.status_code
    faults = problem["errors"]
    message = "; ".join(f"{fault['pointer'][1:]}: {fault['message']}" for fault in faults[:3]) or problem["detail"]
    return message, problem["code"], status, faults[0]["pointer"] if faults else ""


def _shaped(response: JSONResponse, document: dict[str, object], status: int) -> JSONResponse:
    shaped = JSONResponse(document, status)
    kept = ("retry-after", "www-authenticate", "connection", "allow")
    shaped.headers.update({name: value for name, value in response.headers.items() if name.lower() in kept})
    # Both packages obey it; without it they try again whatever is a 409 or 429, also where that is of no use.
    shaped.headers["x-should-retry"] = "true" if json.loads(bytes(response.body))["retryable"] else "false"
    return shaped


def error_document(error: SpoError, status: int) -> dict[str, object]:
    """An error after the answer has begun."""
    return _document(error.message, error.code, status, "")


def anthropic_error(error: SpoError) -> dict[str, object]:
    """The same in Anthropic's form."""
    return {"type": "error", "error": {"type": "api_error", "message": error.message}}


def _document(message: str, code: str, status: int, pointer: str) -> dict[str, object]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = pointer[1:].replace("/", ".") or None
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(code, code)}}


def show(request: Request, template: str, **facts: object) -> Response:
    """A page, or the part of one that htmx asked for; no cache keeps it, since it may show what a model wrote."""
    # Error codes are explained to anybody; nobody is known there.
    principal = getattr(request.state, "principal", None)
    response = templates.TemplateResponse(
        request, template, {"principal": principal, "path": request.url.path, "notice": _notice(request), **facts}
    )
    response.headers["Cache-Control"] = "no-store"
    response.headers["Vary"] = "HX-Request"
    return response


def _notice(request: Request) -> str:
    """What everybody should know of lost data; nothing where Redis does not answer."""
    try:
        context: AppContext = request.app.state.context
        return context.watch.notice()
    except (redis.RedisError, OSError):
        return ""


def is_part(request: Request) -> bool:
    """Whether htmx asks for a part, not a person for the whole page."""
    headers = request.headers
    return headers.get("hx-request") == "true" and headers.get("hx-history-restore-request") != "true"


def wants_page(path: str, headers: Headers) -> bool:
    """Whether an error should come as a page: a browser navigates, and not to the API."""
    return "text/html" in headers.get("accept", "") and not path.startswith(("/v1/", "/static/", "/metrics"))


def error_page(status: int, code: str, detail: str) -> str:
    """What went wrong and what to do about it, as HTML."""
    known = catalogue().get(code)
    advice = ADVICE.get(code) or (known.remedy if known else OTHERWISE)
    facts = {"status": status, "code": code, "detail": detail, "advice": advice}
    return templates.get_template("errors/page.html").render(facts)


def _clock(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _moment(rfc3339: str) -> str:
    return rfc3339[:19].replace("T", " ")


def _ago(rfc3339: str) -> str:
    return _span(time.time() - datetime.fromisoformat(rfc3339).timestamp())


def _span(seconds: float) -> str:
    """A length of time in its two largest units."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def legal_actions(state: JobState) -> list[str]:
    """What may be asked of a job now, by the one table of transitions."""
    actions = [action.name for action in ACTIONS if state in action.moves]
    return [*sorted(actions, reverse=True), *(["checkpoint"] if state is JobState.RUNNING else [])]


templates.env.globals["legal_actions"] = legal_actions
templates.env.filters |= {
    "clock": _clock,
    "moment": _moment,
    "ago": _ago,
    "span": _span,
    "size": _size,
    "number": _number,
}


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
    """The problem as a page if a browser asked for one, in OpenAI's or Anthropic's form on theirs, else unchanged."""
    if spoken := dialect(path, headers):
        return as_openai_error(response) if spoken == "openai" else as_anthropic_error(response)
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
        detail = _unserved(request.url.path) if error.status_code in (404, 405) else ""
        response = _respond(request, kind(detail or str(error.detail), code="path_not_served" if detail else code))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            # Starlette lists the methods of one route, but a path may have several routes.
            response.headers["Allow"] = ", ".join(_allowed(request))
        return response

    @app.exception_handler(redis.RedisError)
    def redis_error(request: Request, error: redis.RedisError) -> Response:
        log.warning("Redis did not do what a request needs", reason=str(error))
        found = _damaged(request, str(request.path_params.get("job_id", ""))) if "WRONGTYPE" in str(error) else None
        return _respond(request, found or said_of_redis(error))

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        found = errors.storage_error(error)
        if found:
            log.warning("a file cannot be used", path=request.url.path, reason=found.message)
            return _respond(request, found)
        log.error("request failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
        return _respond(request, _internal())


def said_of_redis(error: redis.RedisError) -> SpoError:
    """What a client hears of a command that failed: whether Redis is away, full or refuses; else that it is ours."""
    found = as_spo_error(error)
    words = _REDIS_WORDS.get(found.code)
    return type(found)(words, code=found.code) if words else _internal()


def _damaged(request: Request, job_id: str) -> SpoError | None:
    """What a client hears where keys of the job that it asks for hold another kind of value; of shared ones the log."""
    context: AppContext = request.app.state.context
    with suppress(redis.RedisError):
        if job_id and (keys := keys_of_another_kind(context.redis, job_id)):
            return errors.IntegrityError(f"{', '.join(keys)} {_DAMAGED}", code="keys_damaged")
        if keys := keys_of_another_kind(context.redis, ""):
            log.error("keys that all jobs share hold another kind of value than they should", keys=keys)
    return None


def _internal() -> errors.InternalError:
    return errors.InternalError("something went wrong on our side; the log of the orchestrator has it")


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
