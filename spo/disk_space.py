"""A full disk as one typed error, whichever library met it first; folders removed, or an error."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from spo.errors import ResourceExhausted

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def told_when_full(folder: str | Path, needed_bytes: int = 0) -> Iterator[None]:
    """Raise ResourceExhausted (code "disk_full"), naming folder and bytes needed, where the block finds no room.

    needed_bytes: about how much the block writes; 0: unknown.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise ResourceExhausted(_message(Path(folder), needed_bytes), code="disk_full") from error


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it; one that is not there is removed. Raises OSError: what is left is no secret."""
    while folder.exists():
        # What somebody else removes meanwhile is no fault.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _is_full(error: Exception) -> bool:
    # safetensors' and Rust libraries' errors have no errno, only its text.
    return getattr(error, "errno", None) in _FULL or any(f"os error {number})" in str(error) for number in _FULL)


def _message(folder: Path, needed_bytes: int) -> str:
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    needed = f"{needed_bytes} bytes are needed, " if needed_bytes else ""
    return f"no space is left in {folder}: {needed}{shutil.disk_usage(there).free} are free"
