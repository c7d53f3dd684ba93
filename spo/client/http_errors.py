"""What the SDK makes of the API's answers; a problem+json becomes the SpoError it stands for."""

from __future__ import annotations

from typing import Any

import httpx

from spo import errors

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


def content_of(response: httpx.Response) -> Any:
    """What a successful answer says: decoded JSON, else its text, None when it is empty."""
    if not response.content:
        return None
    return response.json() if "json" in response.headers.get("Content-Type", "") else response.text


def pause_asked(response: httpx.Response) -> float:
    """Seconds that the API asks to wait before the next try (Retry-After), 0 when it does not say."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 0.0
