"""What is wrong with a spec, as JSON pointers (RFC 6901): said by validators, read from pydantic."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from spo.errors import FieldViolation

_IMPOSSIBLE = "impossible_combination"


def impossible(*violations: tuple[str, str]) -> PydanticCustomError:
    """The error a model validator raises: pairs (pointer below the validated section without its slash, message)."""
    return PydanticCustomError(_IMPOSSIBLE, "{violations}", {"violations": violations})


def violations_of(error: ValidationError) -> tuple[FieldViolation, ...]:
    """Translate pydantic's findings to JSON pointers; messages never repeat the input."""
    found: list[FieldViolation] = []
    for entry in error.errors(include_url=False, include_input=False):
        at = "".join(f"/{_escape(part)}" for part in entry["loc"])
        if entry["type"] == _IMPOSSIBLE:
            found += [FieldViolation(f"{at}/{field}", message) for field, message in entry["ctx"]["violations"]]
        else:
            found.append(FieldViolation(at or "/", entry["msg"]))
    return tuple(found)


def _escape(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")
