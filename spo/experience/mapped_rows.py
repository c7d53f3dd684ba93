"""Rows of other programs' logs in our columns: which of their fields is which of ours, and nothing else of them.

A path goes into objects and lists, and into text that is JSON: `request.messages.-1.content` is the content of the last
message. `a.b|c` is what lies at c where nothing that suits the column lies at a.b.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spo.errors import FieldViolation, InvalidInput
from spo.experience.import_row import ImportRow
from spo.experience.uploads import UploadedRow

MOST_FIELDS = 40
_ONE_PATH = r"[^.|]{1,200}(\.[^.|]{1,200}){0,15}"
_PATH = re.compile(rf"{_ONE_PATH}(\|{_ONE_PATH}){{0,7}}")
_NUMBER = re.compile(r"-?[0-9]{1,6}")
# What an object or a list cannot be: then the next path of several is looked at.
_TEXTS = ("statement", "response_text", "trajectory_id", "sampler")


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
    found = {name: _first(row.fields, paths, text=name in _TEXTS) for name, paths in fields.items()}
    reward = found.get("reward")
    if isinstance(reward, bool):
        found["reward"] = float(reward)
    return replace(row, fields={name: value for name, value in found.items() if value is not None})


def _first(row: object, paths: str, *, text: bool) -> object:
    """What lies at the first path at which something suitable lies; None where nothing does."""
    lying = (_at(row, path.split(".")) for path in paths.split("|"))
    return next((found for found in lying if found is not None and (not text or isinstance(found, str))), None)


def _at(value: object, steps: Sequence[str]) -> object:
    """What lies at a path; None where nothing does. A field whose name has dots in it is found by its whole name."""
    if not steps:
        return value
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        taken = next((n for n in range(len(steps), 0, -1) if ".".join(steps[:n]) in value), 0)
        return _at(value[".".join(steps[:taken])], steps[taken:]) if taken else None
    if isinstance(value, list) and _NUMBER.fullmatch(steps[0]) and -len(value) <= int(steps[0]) < len(value):
        return _at(value[int(steps[0])], steps[1:])
    return None


def _parsed(text: str) -> object:
    """The object or list that a text is as JSON; None where it is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
