"""Which files of this machine a tenant's specs may name: those in the folders that the operator allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spo.errors import FieldViolation, InvalidInput


def require_within(folders: Sequence[Path], named: Mapping[str, str | None]) -> None:
    """Refuse paths outside the folders, after following links; `named` maps JSON pointers of fields to paths.

    Raises InvalidInput (code "invalid_job_spec"), whether the file exists or not, so that nobody can probe for files.
    """
    opened = [folder.resolve() for folder in folders]
    outside = [
        pointer
        for pointer, path in named.items()
        if path is not None and not any(_resolved(path).is_relative_to(folder) for folder in opened)
    ]
    if not outside:
        return
    message = f"this key may name files in {', '.join(map(str, folders)) or 'no folder'} only"
    raise InvalidInput(
        message, code="invalid_job_spec", violations=tuple(FieldViolation(pointer, message) for pointer in outside)
    )


def _resolved(path: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        # A NUL byte or a circle of links leads nowhere, so not into a folder.
        return Path("/")
