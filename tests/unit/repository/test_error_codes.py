"""The catalogue of error codes: whatever is raised anywhere can be looked up, and nothing else is in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from services.orchestrator.http import errors
from spo.errors import catalogue

ROOT = Path(__file__).parents[3]


def _words(node: ast.expr) -> Iterator[str]:
    """The strings that an expression may become."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from (*_words(body), *_words(other))
        case ast.BoolOp(values=values):
            yield from (word for each in values for word in _words(each))
        case ast.Call(args=[_, fallback]):
            # answer.get("code", "not_ready")
            yield from _words(fallback)


@cache
def _raised() -> dict[str, str]:
    """Code -> where it is raised: `code=` of any call, the default of an error's class, the reason of a failed job."""
    found = dict.fromkeys((*errors._BY_CODE, *errors._CODES_BY_STATUS.values()), "errors.py")
    for path in [*(ROOT / "spo").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        if ROOT / "spo" / "v1" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            expressions: list[ast.expr] = []
            if isinstance(node, ast.Call):
                expressions = [each.value for each in node.keywords if each.arg in ("code", "failure_code")]
                if isinstance(node.func, ast.Attribute) and node.func.attr == "fail" and len(node.args) == 3:
                    expressions.append(node.args[1])
            elif isinstance(node, ast.Assign) and any(ast.unparse(to) == "default_code" for to in node.targets):
                expressions = [node.value]
            found |= {word: str(path.relative_to(ROOT)) for each in expressions for word in _words(each)}
    return found


def test_every_code_that_is_raised_is_in_the_catalogue() -> None:
    raised = _raised()

    assert len(raised) > 100
    assert {code: place for code, place in raised.items() if code not in catalogue()} == {}


def test_no_code_of_the_catalogue_is_never_raised() -> None:
    assert set(catalogue()) - set(_raised()) == set()


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    assert list(catalogue()) == sorted(catalogue())
    assert [code for code, entry in catalogue().items() if not (entry.meaning.endswith(".") and entry.remedy)] == []
