"""Errors in OpenAI's form, for the paths that OpenAI's clients ask; all others get problem documents."""

from __future__ import annotations

import json
import re

from fastapi.responses import JSONResponse

from spo.errors import SpoError

_PATHS = re.compile(r"/v1/(chat/completions|completions|models(/[^/]*)?)/?")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_CODES = {"unauthorized": "invalid_api_key", "prompt_too_long": "context_length_exceeded"}


def is_openai_path(path: str) -> bool:
    """Whether a path is one of those that OpenAI's clients ask."""
    return _PATHS.fullmatch(path) is not None


def as_openai_error(response: JSONResponse) -> JSONResponse:
    """A problem document in OpenAI's form: what is wrong with a request is a 400 there."""
    problem = json.loads(bytes(response.body))
    status = 400 if response.status_code == 422 else response.status_code
    faults = problem["errors"]
    message = "; ".join(f"{fault['pointer'][1:]}: {fault['message']}" for fault in faults[:3]) or problem["detail"]
    shaped = JSONResponse(_document(message, problem["code"], status, faults[0]["pointer"] if faults else ""), status)
    kept = ("retry-after", "www-authenticate", "connection", "allow")
    shaped.headers.update({name: value for name, value in response.headers.items() if name.lower() in kept})
    return shaped


def error_document(error: SpoError, status: int) -> dict[str, object]:
    """An error after the answer has begun."""
    return _document(error.message, error.code, status, "")


def _document(message: str, code: str, status: int, pointer: str) -> dict[str, object]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = pointer[1:].replace("/", ".") or None
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(code, code)}}
