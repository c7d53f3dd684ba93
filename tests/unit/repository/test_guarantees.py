"""docs/guarantees.md promises nothing that no test holds, and docs/agents.md says which test accepts what of agents."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENT, AGENTS = ROOT / "docs" / "guarantees.md", ROOT / "docs" / "agents.md"
HOLDS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LEAST_PROMISES = 30


def _promises() -> list[str]:
    """Every bullet of the document, with its continuation lines."""
    return re.findall(r"^- .*(?:\n  .*)*", DOCUMENT.read_text(), re.MULTILINE)


def test_every_promise_names_the_test_that_holds_it() -> None:
    promises = _promises()
    assert len(promises) >= LEAST_PROMISES
    assert [promise for promise in promises if not HOLDS.search(promise)] == []


def test_each_acceptance_of_agents_names_its_tests_or_what_is_missing() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.*) \|$", AGENTS.read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 17))
    assert [number for number, _, tests in rows if not HOLDS.search(tests) and "missing" not in tests] == []


@pytest.mark.parametrize("document", [DOCUMENT, AGENTS], ids=lambda path: path.stem)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    absent = []
    for path, name in HOLDS.findall(document.read_text()):
        file = ROOT / path
        functions = ast.walk(ast.parse(file.read_text())) if file.exists() else ()
        if name not in {node.name for node in functions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}:
            absent.append(f"{path}::{name}")
    assert absent == []
