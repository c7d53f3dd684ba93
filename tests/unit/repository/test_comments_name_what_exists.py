"""Comments and docstrings name only what the code has, so that a rename cannot leave them behind."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("spo", "services")
WORD = re.compile(r"[A-Za-z_]\w*")
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
# What other languages of the product define, and where settings and commands are named.
OTHER_SOURCES = ("proto/**/*.proto", "spo/**/*.lua", "services/**/*.lua", "spo/v1/*.pyi", "pyproject.toml")
# Names of other people's software, and values that stand for what an old release does not know.
FOREIGN = frozenset({"PeftModel", "Pipeline", "client", "from_pretrained", "preexec_fn", "save_to_disk", "unknown_17"})


def _sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if ROOT / "spo" / "v1" not in path.parents]


def _parts(source: str) -> tuple[set[str], list[tuple[int, str]]]:
    """The words of the code, and the line and text of each comment and docstring."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (node for node in ast.walk(ast.parse(source)) if isinstance(node, nodes) and ast.get_docstring(node))
    firsts = [node.body[0] for node in documented]
    docstrings = [first.value for first in firsts if isinstance(first, ast.Expr)]
    starts = {(node.lineno, node.col_offset) for node in docstrings}
    prose = [(node.lineno, str(ast.literal_eval(node))) for node in docstrings]
    words: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            prose.append((token.start[0], token.string))
        elif token.type in (tokenize.NAME, tokenize.STRING) and token.start not in starts:
            words.update(WORD.findall(token.string))
    return words, prose


def _unknown(prose: list[tuple[int, str]], known: set[str]) -> Iterator[tuple[int, str]]:
    for line, text in prose:
        for quoted in QUOTED.findall(text):
            if any(part and part not in known for part in quoted.split(".")):
                yield line, quoted


def test_a_name_that_the_code_lacks_is_found_in_comments_and_docstrings() -> None:
    words, prose = _parts('"""Of `there` and `gone`."""\nthere = 1  # like `lost.name`, not `there`\n')
    assert list(_unknown(prose, words)) == [(1, "gone"), (2, "lost.name")]


def test_comments_and_docstrings_name_what_the_code_has() -> None:
    known: set[str] = set(FOREIGN)
    prose: dict[str, list[tuple[int, str]]] = {}
    for path in _sources():
        words, prose[path.relative_to(ROOT).as_posix()] = _parts(path.read_text())
        known |= words
    for pattern in OTHER_SOURCES:
        for path in ROOT.glob(pattern):
            known.update(WORD.findall(path.read_text()))
    unknown = [f"{name}:{line}: `{quoted}`" for name, found in prose.items() for line, quoted in _unknown(found, known)]
    assert not unknown, unknown
