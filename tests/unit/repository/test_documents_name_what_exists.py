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
MOST_FILES_OF_A_WALK = 11
MOST_LINES_OF_A_QUOTE = 12
# Lines of all files of a walk; they may only fall. The goal is 2,900 for the trajectory.
MOST_LINES_OF_A_WALK = {
    "life_of_a_job.md": 4_480,
    "life_of_a_trajectory.md": 4_430,
    "life_of_weights.md": 4_040,
}
QUOTE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE_LINK = re.compile(r"\]\(\.\./([^)#]+\.(?:py|proto|lua))\)")
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


def _source_of(file: str, symbol: str) -> list[str]:
    """The lines of a symbol, without what is before and after its words."""
    lines = (ROOT / file).read_text().splitlines()
    if file.endswith(".proto"):
        first = next(at for at, line in enumerate(lines) if re.match(rf"(message|enum|service) {symbol} ", line))
        return [line.strip() for line in lines[first : lines.index("}", first)]]
    body: list[ast.stmt] = ast.parse("\n".join(lines)).body
    for name in symbol.split("."):
        named = {getattr(node, "name", ""): node for node in body}
        assigned = {
            ast.unparse(target): node for node in body if isinstance(node, ast.Assign) for target in node.targets
        }
        found = {**named, **assigned}[name]
        body = getattr(found, "body", [])
    return [line.strip() for line in lines[found.lineno - 1 : found.end_lineno]]


def _not_there(quote: str, source: list[str]) -> list[str]:
    """Lines of a quote that do not follow each other so in the source; a line of three dots leaves some out."""
    at = 0
    for part in re.split(r"^ *\.\.\.\n", quote, flags=re.MULTILINE):
        wanted = [line.strip() for line in part.splitlines()]
        fits = (begin for begin in range(at, len(source)) if source[begin : begin + len(wanted)] == wanted)
        begin = next(fits, None)
        if begin is None or not wanted:
            return wanted or ["(nothing is quoted)"]
        at = begin + len(wanted)
    return []


@pytest.mark.parametrize("page", sorted(MOST_LINES_OF_A_WALK))
def test_a_walk_quotes_what_stands_in_at_most_eleven_files(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    quotes = [(title.split(), quote) for title, quote in QUOTE.findall(text)]
    files = list(dict.fromkeys(file for (file, _), _ in quotes))
    assert 10 <= len(files) <= MOST_FILES_OF_A_WALK
    assert files == list(dict.fromkeys(CODE_LINK.findall(text))), "each file is linked and quoted, in this order"
    faults = {f"{file} {symbol}": _not_there(quote, _source_of(file, symbol)) for (file, symbol), quote in quotes}
    assert {name: lines for name, lines in faults.items() if lines} == {}
    assert max(quote.count("\n") for _, quote in quotes) <= MOST_LINES_OF_A_QUOTE
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in files}
    assert sum(lines.values()) <= MOST_LINES_OF_A_WALK[page], lines


@pytest.mark.parametrize(
    ("quote", "faults"),
    [
        ("b\nc\n", []),
        ("a\n...\n    c\n", []),
        ("a\nc\n", ["a", "c"]),
        ("c\n...\na\n", ["a"]),
        ("x\n", ["x"]),
        ("...\n", ["(nothing is quoted)"]),
    ],
)
def test_a_quote_is_lines_that_follow_each_other(quote: str, faults: list[str]) -> None:
    assert _not_there(quote, ["a", "b", "c"]) == faults


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
