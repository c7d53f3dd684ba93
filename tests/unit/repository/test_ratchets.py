"""Counts that may only fall: lower the number here whenever the code allows it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_PARAMETERS = 6
# Rule of ruff -> how often spo and services may still break it.
MOST = {
    "PLR0913": 7,  # functions with more than MAX_PARAMETERS parameters
    "FBT001": 2,  # booleans by position
    "FBT002": 1,  # and with a default
    "FBT003": 13,  # True or False by position in a call
    "ANN401": 34,  # Any in a signature
}
# Uses of Any per 1,000 lines.
MOST_ANY = {"spo": 6.8, "services": 3.0}
# Modules written by hand, so that one is the size of a concept: merge two before adding another.
MOST_MODULES = 264
# Of their lines those of import statements: many small modules import each other more than they say.
MOST_IMPORTS = 0.0600
# Modules in the longest chain of which each imports the next while it is loaded itself.
LONGEST_CHAIN = 16


def _by_hand() -> dict[Path, str]:
    generated = (ROOT / "spo" / "v1", ROOT / "spo" / "client" / "_sync")
    paths = [path for root in ("spo", "services") for path in (ROOT / root).rglob("*.py")]
    return {path: path.read_text() for path in paths if not set(generated) & set(path.parents)}


@pytest.fixture(scope="module")
def broken() -> dict[str, list[str]]:
    """Places that break a rule, by rule."""
    limit = f"lint.pylint.max-args={MAX_PARAMETERS}"
    chosen = ["--select", ",".join(MOST), "--config", limit, "--extend-exclude", "spo/v1", "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", *chosen, "spo", "services"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    found: dict[str, list[str]] = {rule: [] for rule in MOST}
    for entry in json.loads(ran.stdout):
        place = Path(entry["filename"]).relative_to(ROOT)
        found[entry["code"]].append(f"{place}:{entry['location']['row']}")
    return found


@pytest.mark.parametrize("rule", sorted(MOST))
def test_a_rule_is_broken_no_more_often_than_before(rule: str, broken: dict[str, list[str]]) -> None:
    assert len(broken[rule]) <= MOST[rule], broken[rule]


@pytest.mark.parametrize("root", sorted(MOST_ANY))
def test_any_becomes_no_more_frequent(root: str) -> None:
    texts = [path.read_text() for path in (ROOT / root).rglob("*.py") if ROOT / "spo" / "v1" not in path.parents]
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for text in texts for node in ast.walk(ast.parse(text)))
    lines = sum(text.count("\n") for text in texts)
    assert 1000 * uses / lines <= MOST_ANY[root], f"{uses} uses of Any in {lines} lines of {root}"


def test_modules_become_no_more() -> None:
    assert len(_by_hand()) <= MOST_MODULES


def test_imports_take_no_greater_share_of_the_lines() -> None:
    lines = imported = 0
    for text in _by_hand().values():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported += len({line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)})
        lines += text.count("\n")
    assert imported / lines <= MOST_IMPORTS, f"{imported} of {lines} lines"


def _loaded(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module does: none within a function, none for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        ):
            yield from _loaded(child)


def _named(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Every module that it may mean."""
    if isinstance(statement, ast.Import):
        return {each.name for each in statement.names}
    return {f"{statement.module}.{each.name}" for each in statement.names} | {str(statement.module)}


def test_no_modules_import_each_other_in_a_circle_and_no_chain_of_them_becomes_longer() -> None:
    texts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): text
        for path, text in _by_hand().items()
    }
    imports = {
        name: {found for each in _loaded(ast.parse(text)) for found in _named(each) if found in texts} - {name}
        for name, text in texts.items()
    }
    chains: dict[str, list[str]] = {}
    # Raises CycleError, which names the circle.
    for name in TopologicalSorter(imports).static_order():
        chains[name] = [name, *max((chains[each] for each in imports[name]), key=len, default=[])]
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)
