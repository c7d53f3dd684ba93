"""What is wrong with rows of a task file, in words for the person who wrote them: all faults of a row, many rows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from spo.errors import FieldViolation, InvalidInput

if TYPE_CHECKING:
    from spo.tasks.problem import Problem
    from spo.tasks.records import Record

FAULTS_PER_ROW = 10
# Reading ends with so many faults: more say nothing new.
FAULTS_PER_FILE = 50
_SHOWN_CHARACTERS = 60

_WORDS = {
    "missing": "is missing",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}


def malformed(place: str, *reasons: str) -> InvalidInput:
    """The error for a row that cannot be used, one violation (pointer /tasks/path) for each reason."""
    return InvalidInput(
        f"{place}: {'; '.join(reasons)}",
        code="malformed_task",
        violations=tuple(FieldViolation("/tasks/path", f"{place}: {reason}") for reason in reasons),
    )


def reasons_of(error: ValidationError, known: Iterable[str]) -> list[str]:
    """What a schema found wrong with a row, at most FAULTS_PER_ROW; known: the names of its fields."""
    found = error.errors(include_url=False)
    told = [_reason(entry, known) for entry in found[:FAULTS_PER_ROW]]
    more = len(found) - FAULTS_PER_ROW
    return [*told, f"and {more} more faults"] if more > 0 else told


def _reason(entry: ErrorDetails, known: Iterable[str]) -> str:
    where = "/".join(map(str, entry["loc"]))
    kind = entry["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(where, known, 1)
        return f"{where[:_SHOWN_CHARACTERS]}: is no field here" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":
        reason = entry["msg"].removeprefix("Value error, ")
    elif kind in _WORDS:
        reason = _WORDS[kind].format(**entry.get("ctx", {}))
        if "_type" in kind or "parsing" in kind:
            reason += f", not {_kind_of(entry.get('input'))}"
    else:
        reason = f"cannot be {_kind_of(entry.get('input'))}"
    # A fault of the row as a whole has no place in it.
    return f"{where}: {reason}" if where else f"the row {reason}" if kind in _WORDS else reason


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case dict():
            return "an object"
    return "a list"


def problems_of(
    records: Callable[[Callable[[InvalidInput], None]], Iterator[Record]], parse: Callable[[Record], Problem | None]
) -> Iterator[Problem]:
    """The problems of all rows; when they are read, raises InvalidInput with the faults of all rows.

    records: yields rows, and tells its argument of those that cannot be read at all.
    """
    faults: list[InvalidInput] = []
    for record in records(faults.append):
        try:
            problem = parse(record)
        except InvalidInput as error:
            faults.append(error)
            problem = None
        if sum(len(error.violations) for error in faults) >= FAULTS_PER_FILE:
            break
        if problem is not None:
            yield problem
    if faults:
        raise _all_of(faults)


def _all_of(faults: Sequence[InvalidInput]) -> InvalidInput:
    """One error for several rows."""
    if len(faults) == 1:
        return faults[0]
    violations = tuple(violation for error in faults for violation in error.violations)
    # Reading has ended there, so how many more there are is not known.
    at_least = "at least " if len(violations) >= FAULTS_PER_FILE else ""
    message = f"{at_least}{len(faults)} rows cannot be used, the first: {faults[0].message}"
    return InvalidInput(message, code="malformed_task", violations=violations[:FAULTS_PER_FILE])
