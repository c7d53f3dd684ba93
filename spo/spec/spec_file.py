"""Spec documents in files: what `spo job submit`, the demos and `spo reproduce` read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spo.errors import InvalidInput


def read_spec(path: Path) -> dict[str, Any]:
    """The document of a YAML or JSON file, not validated.

    Raises InvalidInput (code "unreadable_spec") naming the file.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", code="unreadable_spec") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{path} is neither YAML nor JSON: {error}", code="unreadable_spec") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} must hold a mapping", code="unreadable_spec")
    return document
