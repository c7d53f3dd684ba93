"""What a task set is made of: problems, the program in a response, and how published contests ask for one.

Which text of a response is the program: the rules of the format `fenced`, as docs/extraction.md tells them.
A response comes from a model and may hold anything: nothing here raises on one, and time is linear in it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, model_validator

from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, Trajectory
from spo.v1.verdict_pb2 import CHECKER_FLOAT, CHECKER_TOKENS, OUTCOME_UNSPECIFIED, Limits, TestCase, TestSet

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

ResponseFormat = Literal["raw", "fenced", "fenced_last"]
# What is told a row's arguments, so that its tests hold them.
_TOLD: tuple[Literal["scoring_function", "http", "composition"], ...] = ("scoring_function", "http", "composition")

DEFAULT_LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=256 << 20, output_bytes=1 << 20, processes=16)

# Some problems come with thousands of submissions; the first ones are enough for offline experience.
SOLUTIONS_MAXIMUM = 100
STATEMENT_BYTES_MAXIMUM = 1 << 20
WALL_PER_CPU_SECOND = 5.0
# What AlphaCode's judge allowed.
ABSOLUTE_TOLERANCE = 1e-5

INSTRUCTION = (
    "Write a Python 3 program that reads from standard input and writes to standard output. "
    "Answer with the program in one ```python code block."
)
_DECIMAL = re.compile(rb"(?<!\S)-?\d+\.\d+(?!\S)")


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
    """The block without the indentation that all its lines share, as within a list, or their marks of a quotation."""
    lines = body.split("\n")
    if all(line.startswith(">") and not line.startswith(">>") for line in lines if line):
        body = "\n".join(line.removeprefix(">").removeprefix(" ") for line in lines)
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


@dataclass(frozen=True)
class Problem:
    """One problem of a task set; `difficulty` is the published level or, in the toy contest, the tier.

    tests: of a program in `language`, or the rule for an answer in the language "text", whose solutions are responses.
    arguments_json: what else of it a scoring function or service is told, as a JSON object. verifier: the name of that
    of the job's which decides, where it has several. place: where a person finds it in its file.
    """

    statement: str
    tests: TestSet
    language: str = "python"
    response_format: ResponseFormat = "raw"
    human_solutions: tuple[str, ...] = ()
    wrong_solutions: tuple[str, ...] = ()
    difficulty: str = ""
    arguments_json: str = ""
    verifier: str = ""
    place: str = field(default="", compare=False)
    # The environment that answers the policy's turns, and how it is set up; "": a single turn.
    environment: str = ""
    environment_json: str = ""

    @cached_property
    def tests_digest(self) -> str:
        """Return the address of this problem's tests."""
        return tests_digest(self.tests)

    @cached_property
    def problem_id(self) -> str:
        """Return the digest of all that decides a reward, so that values of this problem outlive a run."""
        parts = [self.statement, self.language, self.response_format, self.tests_digest]
        if self.environment:
            parts += [self.environment, self.environment_json]
        elif self.arguments_json and not any(self.tests.HasField(told) for told in _TOLD):
            parts.append(self.arguments_json)
        return _digest_of(parts)

    @cached_property
    def row_digest(self) -> str:
        """Return the digest of all that makes its row another problem than others, before a verifier has been applied:
        what decides, and what of it a verifier or an environment is told."""
        return _digest_of([self.problem_id, self.arguments_json, self.verifier])

    @property
    def public_tests(self) -> TestSet:
        """Return the same judge settings with only the tests that may be shown to the policy."""
        public = TestSet()
        public.CopyFrom(self.tests)
        del public.tests[:]
        public.tests.extend(test for test in self.tests.tests if test.public)
        return public

    @property
    def shows_public_tests(self) -> bool:
        """Whether a program has public tests whose outcome may be shown."""
        return any(test.public for test in self.tests.tests)

    @cached_property
    def public_tests_digest(self) -> str:
        """Return the address of the public tests alone."""
        return tests_digest(self.public_tests)


def _digest_of(parts: Iterable[str]) -> str:
    digest = blake3()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def tests_digest(test_set: TestSet) -> str:
    """Return the blake3 hex digest of the deterministic serialisation: the address of a TestSet everywhere."""
    return blake3(test_set.SerializeToString(deterministic=True)).hexdigest()


@dataclass(frozen=True)
class TaskSets:
    """Training and held-out problems of one job; notes: what its person should know of how they were chosen."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)


def write_response(program: str, response_format: ResponseFormat, language: str = "python") -> str:
    """Return the response that holds `program`, for programs that people wrote: the inverse of `extract_program`."""
    return program if response_format == "raw" else f"```{language_tag(language)}\n{program.rstrip()}\n```"


def program_of(trajectory: Trajectory, response_format: str, language: str = "") -> str:
    """Cut the program out of a trajectory's response; what was reasoned before the answer holds none.

    Of a conversation, the last action is the answer.
    """
    begin, end = _last_action(trajectory)
    text = trajectory.response_text[max(begin, trajectory.reasoning_characters) : end]
    return extract_program(text, response_format, language)


def has_verdict(trajectory: Trajectory) -> bool:
    """Whether its environment has decided about the trajectory, so that no judge is asked."""
    return trajectory.HasField("verdict") and trajectory.verdict.outcome != OUTCOME_UNSPECIFIED


def _last_action(trajectory: Trajectory) -> tuple[int, int]:
    """Where the last action begins and ends in the response's text; all of it where there was a single turn."""
    place, found = 0, (0, len(trajectory.response_text))
    for segment in trajectory.segments:
        if segment.kind == SEGMENT_KIND_ACTION:
            found = place, place + segment.characters
        place += segment.characters
    return found


def extract_program(response_text: str, response_format: str, language: str = "") -> str:
    """Cut the program out of an answer: `raw` is the text itself, `fenced` a block of code or else the text.

    `fenced_last` takes the last good block where `fenced` takes the first; docs/extraction.md says which are good.
    language: as the task names it; "": not known. Time linear in the text, whatever it holds.
    """
    last = response_format == "fenced_last"
    found = None if response_format == "raw" else fenced_program(response_text, language, last=last)
    return response_text if found is None else found


class Columns(BaseModel):
    """Published columns; a null means the same as an absent column, and columns nobody reads are ignored."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def nulls_are_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


def ask_for_program(description: str) -> str:
    """Return the statement shown to the policy."""
    return f"{description.strip()}\n\n{INSTRUCTION}"


def make_test_set(cases: list[TestCase], cpu_seconds: float, memory_bytes: int) -> TestSet:
    """Return the tests with their limits (0 = not published); decimal fractions are compared with a tolerance."""
    limits = Limits()
    limits.CopyFrom(DEFAULT_LIMITS)
    if cpu_seconds > 0:
        limits.cpu_seconds, limits.wall_seconds = cpu_seconds, cpu_seconds * WALL_PER_CPU_SECOND
    if memory_bytes > 0:
        limits.memory_bytes = memory_bytes
    if any(_DECIMAL.search(case.stdout) for case in cases):
        return TestSet(tests=cases, limits=limits, checker=CHECKER_FLOAT, absolute_tolerance=ABSOLUTE_TOLERANCE)
    return TestSet(tests=cases, limits=limits, checker=CHECKER_TOKENS)


def first_distinct(programs: Iterable[str]) -> tuple[str, ...]:
    """Return the first programs without repeats."""
    return tuple(dict.fromkeys(program for program in programs if program.strip()))[:SOLUTIONS_MAXIMUM]
