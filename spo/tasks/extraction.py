"""Which text of a response is the program: the rules of the format `fenced`, as docs/extraction.md tells them.

A response comes from a model and may hold anything: nothing here raises on one, and time is linear in it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# Of one response no more is parsed; the block after that is taken unread.
MAX_PARSED_CHARACTERS = 40_000
# And each counts for so many more.
BLOCK_CHARACTERS = 100
MAX_LABEL_CHARACTERS = 100

_FENCE = re.compile(r"`{3,}|^[ \t]*~{3,}")
# The first word of a label: "Python3", "{.python}", "language-c++", "python:main.py", "cpp17".
_TAG = re.compile(r"[\s{.]*(?:language-|lang-)?([a-z]+(?:-[a-z]+)*[+#]*)")
# Labels of blocks that show something else than the program.
_NO_PROGRAMS = frozenset(
    {
        *("bash", "console", "diff", "example", "input", "json", "log", "markdown", "md", "output", "plain"),
        *("plaintext", "pycon", "python-repl", "result", "sample", "sh", "shell", "stderr", "stdin", "stdout"),
        *("terminal", "text", "toml", "txt", "xml", "yaml", "yml", "zsh"),
    }
)
_SAME_LANGUAGE = {
    **dict.fromkeys(("py", "pypy", "python"), "python"),
    **dict.fromkeys(("c++", "cc", "cpp", "cxx", "g++"), "cpp"),
    **dict.fromkeys(("c", "gcc"), "c"),
    **dict.fromkeys(("java", "jdk", "openjdk"), "java"),
}
_LANGUAGES = frozenset(
    {
        *_SAME_LANGUAGE.values(),
        *("c#", "clojure", "cs", "csharp", "css", "dart", "elixir", "erlang", "f#", "fortran", "go", "golang"),
        *("haskell", "hs", "html", "javascript", "js", "julia", "kotlin", "kt", "lua", "matlab", "node", "objective-c"),
        *(
            "ocaml",
            "pascal",
            "perl",
            "php",
            "r",
            "rb",
            "rs",
            "ruby",
            "rust",
            "scala",
            "sql",
            "swift",
            "ts",
            "typescript",
            "zig",
        ),
    }
)
# Those whose strings may hold lines that look like fences; "": a block that names no language.
_TRIPLE = frozenset({"python", ""})
_OUTSIDE = re.compile(r"""#.*|\"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""")
_IN_STRING = {'"""': re.compile(r'\\.|"{3}'), "'''": re.compile(r"\\.|'{3}")}
# What every program of these languages holds.
_BRACED = frozenset({"c", "cpp", "java"})
# `warnings.catch_warnings` changes the whole process.
_PARSER = threading.Lock()


@dataclass(frozen=True)
class FencedBlock:
    """A block of code of a Markdown text with its label as it was written."""

    label: str
    body: str

    @cached_property
    def tag(self) -> str:
        """The first word of the label, languages in one spelling."""
        return language_tag(self.label)


def fenced_program(response_text: str, language: str = "", *, last: bool = False) -> str | None:
    """The program in a response: of its best blocks the first that compiles, or else the first; None where none may be.

    last: the last in place of the first, for policies that correct themselves.
    language: as a task names it, such as "python3.12" or "cpp"; "": any. Blocks that name it go before those that name
    none that is known, and these before those that name another.
    """
    wanted = language_tag(language)
    by_rank: dict[int, list[FencedBlock]] = {}
    for block in fenced_blocks(response_text):
        if block.body and not block.body.isspace() and (block.tag == wanted or block.tag not in _NO_PROGRAMS):
            by_rank.setdefault(_rank(block.tag, wanted), []).append(block)
    if not by_rank:
        return None
    best = by_rank[min(by_rank)][:: -1 if last else 1]
    return _first_that_compiles(best, wanted) if len(best) > 1 else best[0].body


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """The blocks between fences of three or more backticks or tildes, in order; the last one need not be closed.

    A fence within a string of several lines, such as a docstring, ends no block of Python.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    place, minds_strings = 0, True
    while place < len(lines):
        fence, label = _opening(lines[place])
        place += 1
        if not fence:
            continue
        end, before = _closing(lines, place, fence, minds_strings=minds_strings and language_tag(label) in _TRIPLE)
        if end is None and minds_strings:
            # A string that never ends: then fences are fences, here and in all that follows.
            minds_strings = False
            end, before = _closing(lines, place, fence, minds_strings=False)
        if end is None:
            yield FencedBlock(label, _without_indentation("\n".join(lines[place:])))
            return
        yield FencedBlock(label, _without_indentation("".join(f"{line}\n" for line in lines[place:end]) + before))
        place = end + 1


def _closing(lines: Sequence[str], start: int, fence: str, *, minds_strings: bool) -> tuple[int | None, str]:
    """The line that closes a block, and what stands there before the fence; None where none does."""
    quotes = ""
    for place in range(start, len(lines)):
        if not quotes and (before := _before_closing(lines[place], fence)) is not None:
            return place, before
        if minds_strings:
            quotes = _open_quotes(lines[place], quotes)
    return None, ""


def _open_quotes(line: str, quotes: str) -> str:
    """The three quotation marks of a string that goes on behind a line, "" for none; quotes: before it."""
    place = 0
    while found := (_IN_STRING[quotes] if quotes else _OUTSIDE).search(line, place):
        place = found.end()
        if found[0] == quotes:
            quotes = ""
        elif not quotes and found[0] in _IN_STRING:
            quotes = found[0]
    return quotes


def language_tag(label: str) -> str:
    """The language of a label or of a task in one spelling: "cpp" of "C++17", "python" of "py3 title=a.py"."""
    found = _TAG.match(label[:MAX_LABEL_CHARACTERS].lower())
    return _SAME_LANGUAGE.get(found[1], found[1]) if found else ""


def _rank(tag: str, wanted: str) -> int:
    if tag in _LANGUAGES or (tag and tag == wanted):
        return 0 if wanted in ("", tag) else 2
    return 1


def _opening(line: str) -> tuple[str, str]:
    """The fence that a line opens and its label; "" for the fence where it opens none."""
    if "```" not in line and "~~~" not in line:
        return "", ""
    runs = list(_FENCE.finditer(line))
    # Two runs on a line are code within a sentence.
    return (runs[-1][0].strip(), line[runs[-1].end() :]) if len(runs) % 2 else ("", "")


def _before_closing(line: str, fence: str) -> str | None:
    """What stands before the fence that closes a block on this line; None where the line does not close it."""
    if fence not in line:
        return None
    bare = line.strip()
    if bare.startswith(fence):
        # "```python" within a block is text of the program, such as a docstring.
        return None if bare.lstrip(fence[0])[:1].isalpha() else ""
    # Models forget the line break: `print(1)```` ends a block, a fence within a string does not.
    return line.rstrip().rstrip("`") if fence[0] == "`" and bare.endswith(fence) else None


def _without_indentation(body: str) -> str:
    """The block without the indentation that all its lines share, as within a list."""
    return textwrap.dedent(body) if body.lstrip("\n")[:1] in (" ", "\t") else body


def _first_that_compiles(blocks: Sequence[FencedBlock], wanted: str) -> str:
    unread = MAX_PARSED_CHARACTERS
    for block in blocks:
        unread -= BLOCK_CHARACTERS + len(block.body)
        if unread < 0 or _compiles(block.body, block.tag if block.tag in _LANGUAGES else wanted):
            return block.body
    return blocks[0].body


def _compiles(program: str, language: str) -> bool:
    """Whether a text can be a program of the language and not only what one prints; true where nothing is known."""
    if language in _BRACED:
        return "main" in program and "{" in program
    if language == "python":
        return _is_python(program)
    return bool(language) or "{" in program or _is_python(program)


def _is_python(program: str) -> bool:
    try:
        # Programs with odd escapes warn on stderr, which belongs to the log.
        with _PARSER, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return False
    # Output such as "42" or "YES" is Python too, but does nothing.
    return any(not isinstance(each, ast.Expr) or _calls(each) for each in tree.body)


def _calls(statement: ast.Expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))
