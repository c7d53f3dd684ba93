"""docs/guarantees.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "guarantees.md"
HOLDS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LEAST_PROMISES = 30


def _promises() -> list[str]:
    """Every bullet of the document, with its continuation lines."""
    return re.findall(r"^- .*(?:\n  .*)*", DOCUMENT.read_text(), re.MULTILINE)


def test_every_promise_names_the_test_that_holds_it() -> None:
    promises = _promises()
    assert len(promises) >= LEAST_PROMISES
    assert [promise for promise in promises if not HOLDS.search(promise)] == []


def test_every_test_that_a_promise_names_exists() -> None:
    absent = []
    for path, name in HOLDS.findall(DOCUMENT.read_text()):
        file = ROOT / path
        functions = ast.walk(ast.parse(file.read_text())) if file.exists() else ()
        if name not in {node.name for node in functions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}:
            absent.append(f"{path}::{name}")
    assert absent == []
