"""Small JSON files that are whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def read_json(path: Path) -> dict[str, object]:
    """The object in a file; empty where there is none, or it is damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write it aside, to the disk, and put it in place in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".writing-{path.name}")
    with open(aside, "w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(aside, path)
