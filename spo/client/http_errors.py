"""What the SDK makes of the API's answers: a model, or the SpoError that a problem+json stands for."""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from spo import errors

Answer = TypeVar("Answer", bound=BaseModel)

_BY_STATUS: dict[int, type[errors.SpoError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    412: errors.PreconditionFailed,
    413: errors.ResourceExhausted,
    429: errors.ResourceExhausted,
    502: errors.NotReady,
    503: errors.NotReady,
    504: errors.NotReady,
}


def error_of(response: httpx.Response) -> errors.SpoError:
    """The SpoError that a problem+json answer (RFC 9457) stands for."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    server_fault = errors.InternalError if response.status_code >= 500 else errors.InvalidInput
    kind = _BY_STATUS.get(response.status_code, server_fault)
    violations = tuple(
        errors.FieldViolation(str(fault.get("pointer", "")), str(fault.get("message", "")))
        for fault in problem.get("errors") or ()
    )
    message = problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}"
    return kind(str(message), code=problem.get("code"), violations=violations)


def parsed(answer: type[Answer], content: object) -> Answer:
    """The content as a model. Raises InternalError (code "unexpected_answer") naming the first field that is wrong."""
    try:
        return answer.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/" + "/".join(map(str, first["loc"]))
        message = f"the API's answer is no {answer.__name__}: {place}: {first['msg']}"
        raise errors.InternalError(message, code="unexpected_answer") from None


def content_of(response: httpx.Response) -> object:
    """What a successful answer says: decoded JSON, else its text, None when it is empty.

    Raises InternalError (code "unexpected_answer") for what calls itself JSON and is not.
    """
    if not response.content:
        return None
    if "json" not in response.headers.get("Content-Type", ""):
        return response.text
    try:
        found: object = response.json()
    except ValueError as error:
        raise errors.InternalError(f"the API's answer is not JSON: {error}", code="unexpected_answer") from None
    return found


def pause_asked(response: httpx.Response) -> float:
    """Seconds that the API asks to wait before the next try (Retry-After), 0 when it does not say."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 0.0
