"""Small JSON files that are whole or absent."""

from __future__ import annotations

import json
from collections.abc import Mapping

from spo.service.state_place import StatePlace


def read_json(place: StatePlace, name: str) -> dict[str, object]:
    """The object in a file; empty where there is none, or it is damaged. Raises OSError, Unreachable."""
    try:
        document = json.loads(place.read(name) or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def write_json(place: StatePlace, name: str, document: Mapping[str, object]) -> None:
    """Write it in one step. Raises OSError, Unreachable."""
    place.write(name, json.dumps(document, indent=1, sort_keys=True).encode())
