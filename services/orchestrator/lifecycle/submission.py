"""What is checked before a job is accepted: the spec, its model folder and its problems, all faults at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from services.orchestrator.datasets.library import TaskLibrary
from spo.errors import FieldViolation, InvalidInput
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import JobSpec, parse_job_spec

MAX_DEPTH = 32


def accept(body: bytes, library: TaskLibrary, allowed: Callable[[JobSpec], None] = lambda spec: None) -> JobSpec:
    """Return the resolved spec of a request body; `allowed` refuses what is not the caller's.

    Raises InvalidInput: code "malformed_json" (HTTP 400) or "invalid_job_spec" with a pointer to each fault.
    """
    spec = parse_job_spec(parse_json(body))
    allowed(spec)
    check_spec(spec, library)
    return spec


def check_spec(spec: JobSpec, library: TaskLibrary) -> None:
    """Raise InvalidInput (code "invalid_job_spec") unless the model folder and the problems are there and usable."""
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("/model/path", lambda: inspect_model_folder(spec.model.path)),
        ("/tasks/path", lambda: _load(library, spec)),
    )
    violations: list[FieldViolation] = []
    for pointer, check in checks:
        try:
            check()
        except InvalidInput as error:
            violations += [FieldViolation(violation.pointer, violation.message) for violation in error.violations] or [
                FieldViolation(pointer, error.message)
            ]
    if violations:
        raise InvalidInput(
            "the job cannot run as it is specified", code="invalid_job_spec", violations=tuple(violations)
        )


def parse_json(body: bytes) -> Any:
    """Decode a JSON body. Raises InvalidInput (code "malformed_json").

    NaN, integers of more than 64 bits, a key twice and absurd depth are refused as well.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_unique)
        _check_depth(document, 0)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"the body is not valid JSON: {reason[:200]}", code="malformed_json") from None
    return document


def _load(library: TaskLibrary, spec: JobSpec) -> None:
    tasks = library.load(spec.tasks)
    if not tasks.train:
        raise InvalidInput("there is no training problem in it")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError(f"{text[:30]} needs more than 64 bits")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return members


def _check_depth(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _check_depth(child, depth + 1)
