"""The committed description of the REST API is the one that is served, and says what callers rely on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
METHODS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    place = importlib.util.spec_from_file_location("write_openapi", ROOT / "scripts" / "write_openapi.py")
    assert place
    assert place.loader
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    found: dict[str, Any] = json.loads(module.document())
    return found


def test_the_committed_document_is_the_served_one(served: dict[str, Any]) -> None:
    committed = json.loads((ROOT / "docs" / "openapi.json").read_text())

    assert committed == served, "run `make openapi` and look at what changed: fields are only ever added"


def test_every_operation_declares_its_problems_and_explains_itself(served: dict[str, Any]) -> None:
    operations = [
        (f"{method} {path}", operation)
        for path, item in served["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]
    assert len(operations) > 30
    for name, operation in operations:
        assert "default" in operation["responses"], name
        assert operation.get("description"), name


def test_the_job_spec_and_the_legal_transitions_are_part_of_it(served: dict[str, Any]) -> None:
    schemas = served["components"]["schemas"]

    assert schemas["JobSpec"]["additionalProperties"] is False
    assert "paused" in schemas["JobState"]["x-legal-transitions"]["pausing"]
