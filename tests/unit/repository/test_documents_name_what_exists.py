"""Documents name only files and symbols that exist, so that a rename cannot leave them behind."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILE = re.compile(r"`([\w./-]+\.(?:py|lua|proto|yaml|yml|sh|json|md|toml|html|tpl))`")
MOST_FILES_OF_A_WALK = 25
SYMBOL = re.compile(r"`([A-Z][a-z0-9]+[A-Z]\w*)(?:\.(\w+))?(?:\([^`]*\))?`")
# Made by a run, or a person's own.
MADE = re.compile(
    r"^(runs/|build/|report\.(json|md)$|tests\.json$|my_\w+\.yaml$|manifest\.json$|(\w+_)?config\.json$|model\.safetensors\.)"
)
# Names of other people's software.
FOREIGN = frozenset(
    {
        "CodeContests",
        "DeepSpeed",
        "GitHub",
        "OpenAPI",
        "OpenTelemetry",
        "PyTorch",
        "ScaledObject",
        "StatefulSet",
        "TensorBoard",
    }
)


def _documents() -> list[Path]:
    # The changelog and the decisions tell of their time; the results are written by a program.
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return [path for path in sorted(paths) if path.name != "CHANGELOG.md"]


@pytest.fixture(scope="module")
def files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def symbols(files: list[str]) -> set[str]:
    """Every class, function, constant and attribute defined in Python, and every message, call, field and alert."""
    found: set[str] = set()
    for name in files:
        if name.endswith(".proto"):
            text = (ROOT / name).read_text()
            found |= set(re.findall(r"\b(?:message|enum|service|rpc)\s+(\w+)", text))
            found |= set(re.findall(r"(\w+) = \d+;", text))
        elif name.endswith("alerts.yml"):
            found |= set(re.findall(r"\balert: (\w+)", (ROOT / name).read_text()))
        elif name.endswith(".py") and not name.startswith("tests/"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return found


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document: Path, files: list[str]) -> None:
    named = {name for name in FILE.findall(document.read_text()) if not MADE.match(name)}
    ends = tuple(f"/{name}" for name in files)
    assert sorted(name for name in named if not any(end.endswith(f"/{name}") for end in ends)) == []


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.name)
def test_every_symbol_that_a_document_names_exists(document: Path, symbols: set[str]) -> None:
    named = [(owner, member) for owner, member in SYMBOL.findall(document.read_text()) if owner not in FOREIGN]
    absent = {owner for owner, _ in named if owner not in symbols}
    absent |= {f"{owner}.{member}" for owner, member in named if member and member not in symbols}
    assert sorted(absent) == []


def test_every_path_of_the_rest_api_that_a_document_names_exists() -> None:
    parameter = re.compile(r"\{\w*\}")
    written = {parameter.sub("{}", path) for path in json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]}
    # An id, or a name, in place of a parameter is the path too.
    paths = re.compile("|".join(re.escape(path).replace(r"\{\}", "[^/]+") for path in written))
    named = {
        (document.name, path)
        for document in _documents()
        for path in re.findall(r"(?<![\w.])/v1/[\w{}/-]*[a-zA-Z}]", document.read_text())
    }
    assert len(named) > 20
    assert sorted((name, path) for name, path in named if not paths.fullmatch(path)) == []


def test_the_life_of_a_trajectory_is_told_in_few_files() -> None:
    told = (ROOT / "docs" / "life_of_a_trajectory.md").read_text()
    linked = {target for target in re.findall(r"\]\((\.\./[^)]+)\)", told) if not target.endswith("/")}
    assert 15 < len(linked) <= MOST_FILES_OF_A_WALK
