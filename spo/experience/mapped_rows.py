"""Rows of other programs' logs in our columns: which of their fields is which of ours, and nothing else of them.

A path goes into objects and lists: `request.messages.-1.content` is the content of the last message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from spo.errors import FieldViolation, InvalidInput
from spo.experience.import_row import ImportRow
from spo.experience.uploads import UploadedRow

MOST_FIELDS = 40
_PATH = re.compile(r"[^.]{1,200}(\.[^.]{1,200}){0,15}")
_NUMBER = re.compile(r"-?[0-9]{1,6}")


def check_mapping(fields: Mapping[str, str]) -> None:
    """Raises InvalidInput with a pointer to each name that is no column of ours, and each path that is none."""
    known = set(ImportRow.model_fields)
    violations = [
        FieldViolation(f"/fields/{name}", message)
        for name, path in fields.items()
        for wrong, message in (
            (name not in known, f"no column of an import; there are {', '.join(sorted(known))}"),
            (_PATH.fullmatch(path) is None, "a path is names with dots between them"),
        )
        if wrong
    ]
    if len(fields) > MOST_FIELDS:
        violations.append(FieldViolation("/fields", f"at most {MOST_FIELDS}"))
    if violations:
        raise InvalidInput("the fields cannot be mapped", code="bad_mapping", violations=tuple(violations))


def mapped(row: UploadedRow, fields: Mapping[str, str]) -> UploadedRow:
    """The row with the fields that the mapping names, where it has them; the row itself without a mapping."""
    if row.fields is None or not fields:
        return row
    found = {name: _at(row.fields, path) for name, path in fields.items()}
    reward = found.get("reward")
    if isinstance(reward, bool):
        found["reward"] = float(reward)
    return replace(row, fields={name: value for name, value in found.items() if value is not None})


def _at(value: object, path: str) -> object:
    """What lies at a path; None where nothing does. A field whose name has dots in it is found by its whole name."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and _NUMBER.fullmatch(step) and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
