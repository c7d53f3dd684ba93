"""Task files: records one at a time (JSONL, gzip, Parquet or Arrow), the rows of the platform's own format, and what
is wrong with them in words.

Files come from users, so sizes are bounded and nothing is ever unpickled.

Reader of the platform's own task files: one problem per line (or row), every field named and checked.
{"statement": "Print the sum.", "tests": [{"stdin": "1 2\\n", "stdout": "3\\n", "public": true}],
 "human_solutions": ["print(sum(map(int, input().split())))"]}
{"statement": "What is 12 + 30? Put it into \\\\boxed{}.", "answer": {"expected": ["42"], "extraction": "boxed"}}
{"statement": "Write f(x), twice x.", "code_tests": {"code": "assert f(2) == 4", "entry_point": "f"}}
"""

from __future__ import annotations

import ast
import difflib
import gzip
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from spo.errors import FieldViolation, InvalidInput, raise_if_storage_is_away
from spo.spec.tasks import ComparisonName, ExtractionName, StyleName
from spo.tasks.answer import ANSWER_LANGUAGE, LONGEST_ANSWER, MAX_MARKER, XML_TAG, expectation_fault, number_of
from spo.tasks.problem import DEFAULT_LIMITS, STATEMENT_BYTES_MAXIMUM, Problem, ResponseFormat
from spo.tasks.separate_tests import reasons_to_share, runs_nothing
from spo.v1 import verdict_pb2 as wire

if TYPE_CHECKING:
    import pyarrow


FAULTS_PER_ROW = 10
# Reading ends with so many faults: more say nothing new.
FAULTS_PER_FILE = 50
_SHOWN_CHARACTERS = 60

_WORDS = {
    "missing": "is missing",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}

LINE_BYTES_MAXIMUM = 256 << 20
ROW_GROUP_BYTES_MAXIMUM = 4 << 30
ROWS_PER_READ = 16
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Schema = TypeVar("Schema", bound=BaseModel)

COMPARISONS = {
    name: wire.AnswerComparison.Value(f"ANSWER_COMPARISON_{name.upper()}") for name in get_args(ComparisonName)
}
CheckerName = Literal["tokens", "exact", "float", "unordered_lines", "case_insensitive", "special"]
# What a verifier is told of a problem travels with its tests.
MOST_ARGUMENTS = 65_536
# Those that a judge may have; which of them one has, it says itself.
LANGUAGES = re.compile(r"python(3\.\d{1,2})?|pypy(3(\.\d{1,2})?)?|cpp|c|java")
LARGEST_CODE = 1 << 20


def malformed(place: str, *reasons: str) -> InvalidInput:
    """The error for a row that cannot be used, one violation (pointer /tasks/path) for each reason."""
    return InvalidInput(
        f"{place}: {'; '.join(reasons)}",
        code="malformed_task",
        violations=tuple(FieldViolation("/tasks/path", f"{place}: {reason}") for reason in reasons),
    )


def reasons_of(error: ValidationError, known: Iterable[str]) -> list[str]:
    """What a schema found wrong with a row, at most FAULTS_PER_ROW; known: the names of its fields."""
    found = error.errors(include_url=False)
    told = [_reason(entry, known) for entry in found[:FAULTS_PER_ROW]]
    more = len(found) - FAULTS_PER_ROW
    return [*told, f"and {more} more faults"] if more > 0 else told


def _reason(entry: ErrorDetails, known: Iterable[str]) -> str:
    where = "/".join(map(str, entry["loc"]))
    kind = entry["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(where, known, 1)
        return f"{where[:_SHOWN_CHARACTERS]}: is no field here" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":
        reason = entry["msg"].removeprefix("Value error, ")
    elif kind in _WORDS:
        reason = _WORDS[kind].format(**entry.get("ctx", {}))
        if "_type" in kind or "parsing" in kind:
            reason += f", not {_kind_of(entry.get('input'))}"
    else:
        reason = f"cannot be {_kind_of(entry.get('input'))}"
    # A fault of the row as a whole has no place in it.
    return f"{where}: {reason}" if where else f"the row {reason}" if kind in _WORDS else reason


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case dict():
            return "an object"
    return "a list"


def problems_of(
    records: Callable[[Callable[[InvalidInput], None]], Iterator[Record]], parse: Callable[[Record], Problem | None]
) -> Iterator[Problem]:
    """The problems of all rows; when they are read, raises InvalidInput with the faults of all rows.

    records: yields rows, and tells its argument of those that cannot be read at all.
    """
    faults: list[InvalidInput] = []
    for record in records(faults.append):
        try:
            problem = parse(record)
        except InvalidInput as error:
            faults.append(error)
            problem = None
        if sum(len(error.violations) for error in faults) >= FAULTS_PER_FILE:
            break
        if problem is not None:
            yield problem
    if faults:
        raise _all_of(faults)


def _all_of(faults: Sequence[InvalidInput]) -> InvalidInput:
    """One error for several rows."""
    if len(faults) == 1:
        return faults[0]
    violations = tuple(violation for error in faults for violation in error.violations)
    # Reading has ended there, so how many more there are is not known.
    at_least = "at least " if len(violations) >= FAULTS_PER_FILE else ""
    message = f"{at_least}{len(faults)} rows cannot be used, the first: {faults[0].message}"
    return InvalidInput(message, code="malformed_task", violations=violations[:FAULTS_PER_FILE])


@dataclass(frozen=True)
class Record:
    """One row as it was read; `place` says where a person finds it."""

    place: str
    fields: Any


def read_records(
    path: str | Path, columns: Iterable[str] | None, on_fault: Callable[[InvalidInput], None] | None = None
) -> Iterator[Record]:
    """Yield the rows of a file, or of all files of a folder in order of name; of columnar files only `columns`, or all.

    on_fault hears of lines that are no JSON, and reading goes on; without it they are raised.
    """
    for file in _task_files(Path(path)):
        yield from rows_of(file, columns, on_fault)


def read_problems(
    path: str | Path, columns: Collection[str], parse: Callable[[Record], Problem | None]
) -> Iterator[Problem]:
    """The problems that `parse` makes of rows; when all are read, raises InvalidInput with the faults of all rows."""
    return problems_of(lambda on_fault: read_records(path, columns, on_fault), parse)


def rows_of(
    file: Path, columns: Iterable[str] | None, on_fault: Callable[[InvalidInput], None] | None = None
) -> Iterator[Record]:
    """The rows of one regular file; as `read_records`."""
    match file.suffix:
        case ".jsonl" | ".gz":
            yield from _json_lines(file, on_fault)
        case ".parquet":
            yield from _parquet_rows(file, columns)
        case ".arrow":
            yield from _arrow_rows(file)


def parse_record(schema: type[Schema], record: Record) -> Schema:
    """Return the record as its schema reads it; InvalidInput says where it is and what is wrong with it."""
    try:
        return schema.model_validate(record.fields)
    except ValidationError as error:
        raise malformed(record.place, *reasons_of(error, schema.model_fields)) from error


def _task_files(path: Path) -> list[Path]:
    try:
        return _files_at(path)
    except (OSError, ValueError) as error:
        raise_if_storage_is_away(error, path)
        # No right to read it, or a name that no file can have.
        raise malformed(str(path)[:200], f"it cannot be read: {error}"[:300]) from error


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        # To open a FIFO would wait for whoever writes into it.
        special = next((file.name for file in files if not file.is_file()), None)
        if special:
            raise malformed(str(path), f"{special} is no regular file")
        if not files:
            raise malformed(str(path), f"the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.is_file():
        raise malformed(str(path), "no such file or folder")
    if not path.name.endswith(SUFFIXES):
        raise malformed(str(path), f"not one of {', '.join(SUFFIXES)}")
    return [path]


def _json_lines(file: Path, on_fault: Callable[[InvalidInput], None] | None) -> Iterator[Record]:
    try:
        stream: IO[bytes] = gzip.GzipFile(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[assignment]
    except OSError as error:
        raise_if_storage_is_away(error, file)
        raise malformed(str(file), f"it cannot be read: {error.strerror}") from error
    with stream:
        number = 0
        while line := _line(stream, file):
            number += 1
            place = f"{file}, line {number}"
            if len(line) > LINE_BYTES_MAXIMUM:
                raise malformed(place, f"longer than {LINE_BYTES_MAXIMUM} bytes")
            if not line.strip():
                continue
            try:
                fields = parse_json(line, place)
            except InvalidInput as error:
                if on_fault is None:
                    raise
                on_fault(error)
                continue
            yield Record(place, fields)


def _line(stream: IO[bytes], file: Path) -> bytes:
    try:
        return stream.readline(LINE_BYTES_MAXIMUM + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise_if_storage_is_away(error, file)
        raise malformed(str(file), f"it cannot be read to its end: {error}"[:300]) from error


def parse_json(text: str | bytes, place: str) -> Any:
    """Return parsed JSON; integers too long for Python stay text instead of refusing the whole file."""
    try:
        parsed = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
        if _SURROGATE_ESCAPE.search(text if isinstance(text, bytes) else text.encode()):
            # Half a character is valid JSON, but no program could ever read or print it.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise malformed(place, f"not valid JSON: {error}") from error
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twice[:80]!r} appears twice in one object")
    return members


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits


def _parquet_rows(file: Path, columns: Iterable[str] | None) -> Iterator[Record]:
    # Here, because only columnar files need it and the base install goes without.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as source:
            for group in range(source.metadata.num_row_groups):
                if source.metadata.row_group(group).total_byte_size > ROW_GROUP_BYTES_MAXIMUM:
                    raise malformed(f"{file}, row group {group}", f"unpacks to over {ROW_GROUP_BYTES_MAXIMUM} bytes")
            present = None if columns is None else [name for name in columns if name in source.schema_arrow.names]
            yield from _rows(file, source.iter_batches(ROWS_PER_READ, columns=present))
    except (pyarrow.ArrowException, OSError) as error:
        raise malformed(str(file), f"not a readable Parquet file: {error}") from error


def _arrow_rows(file: Path) -> Iterator[Record]:
    import pyarrow

    try:
        # The stream format is what the `datasets` library writes.
        with pyarrow.OSFile(str(file)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from _rows(file, batches)
    except (pyarrow.ArrowException, OSError) as error:
        raise malformed(str(file), f"not a readable Arrow stream: {error}") from error


def _rows(file: Path, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Record(f"{file}, row {number}", fields)


class RowSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TestRow(RowSection):
    stdin: str
    stdout: str
    public: bool = False


class LimitsRow(RowSection):
    cpu_seconds: float = Field(default=DEFAULT_LIMITS.cpu_seconds, gt=0, le=600)
    wall_seconds: float = Field(default=DEFAULT_LIMITS.wall_seconds, gt=0, le=3600)
    memory_bytes: int = Field(default=DEFAULT_LIMITS.memory_bytes, ge=1 << 20, le=1 << 40)
    output_bytes: int = Field(default=DEFAULT_LIMITS.output_bytes, ge=1, le=1 << 30)
    processes: int = Field(default=DEFAULT_LIMITS.processes, ge=1, le=4096)


class AnswerRow(RowSection):
    """Where a response's answer stands, and what it must be."""

    expected: tuple[str, ...] = Field(min_length=1, max_length=1000)
    comparison: ComparisonName = "exact"
    extraction: ExtractionName = "whole"
    marker: str = Field(default="", max_length=MAX_MARKER)
    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def can_be_decided(self) -> Self:
        for text in self.expected:
            if not 0 < len(text.strip()) <= LONGEST_ANSWER:
                raise ValueError(f"an expected answer is blank or longer than {LONGEST_ANSWER} characters")
            if reason := _unfit(text, self.comparison):
                raise ValueError(f"{text[:80]!r} {reason}")
        if bool(self.marker) != (self.extraction in ("after_marker", "xml_tag")):
            raise ValueError("marker belongs to the extractions after_marker and xml_tag, which need one")
        if self.extraction == "xml_tag" and not re.fullmatch(XML_TAG, self.marker):
            raise ValueError(f"{self.marker[:80]!r} is no name of an XML tag")
        return self

    def rule(self) -> wire.AnswerRule:
        """The rule as the judge knows it."""
        return wire.AnswerRule(
            expected=self.expected,
            comparison=COMPARISONS[self.comparison],
            extraction=wire.AnswerExtraction.Value(f"ANSWER_EXTRACTION_{self.extraction.upper()}"),
            marker=self.marker,
            absolute_tolerance=self.absolute_tolerance,
            relative_tolerance=self.relative_tolerance,
        )


class CodeTestsRow(RowSection):
    """Code that people wrote and that meets the response: wrong when it raises, or its tests fail."""

    style: StyleName = "module"
    before: str = Field(default="", max_length=LARGEST_CODE)
    code: str = Field(min_length=1, max_length=LARGEST_CODE)
    entry_point: str = Field(default="", max_length=200)
    isolation: Literal["", "separate", "shared"] = Field(
        default="", description="`separate`: refused where the tests need the very objects of the response."
    )

    @model_validator(mode="after")
    def can_be_run(self) -> Self:
        if reason := syntax_fault(self.code):
            raise ValueError(f"the code cannot be compiled: {reason}")
        if self.entry_point and not self.entry_point.isidentifier():
            raise ValueError(f"entry_point {self.entry_point[:80]!r} is no name of a function")
        if self.style == "completion" and not self.entry_point:
            raise ValueError("the style completion needs the entry_point, the function that is completed")
        if runs_nothing(self.tests()):
            raise ValueError(
                "the code defines tests and runs none, so every response would pass: call them, or say style: pytest"
            )
        if self.isolation == "separate" and (reasons := reasons_to_share(self.tests())):
            raise ValueError(f"the tests cannot be separate from a response: {'; '.join(reasons)}")
        return self

    def tests(self) -> wire.CodeTests:
        """The tests as the judge knows them."""
        style = wire.CodeTestStyle.Value(f"CODE_TEST_STYLE_{self.style.upper()}")
        isolation = wire.TestIsolation.Value(f"TEST_ISOLATION_{self.isolation.upper() or 'UNSPECIFIED'}")
        return wire.CodeTests(
            style=style, before=self.before, code=self.code, entry_point=self.entry_point, isolation=isolation
        )


_OF_TESTS = {"tests", "language", "checker", "absolute_tolerance", "relative_tolerance", "checker_program"}
_FOREIGN: dict[str, set[str]] = {
    "tests": set(),
    "answer": _OF_TESTS | {"response_format", "limits"},
    "code_tests": _OF_TESTS | {"answer"},
}
_NAMED = {"tests": "tests", "answer": "an answer", "code_tests": "code_tests"}


def syntax_fault(source: str) -> str | None:
    """Why Python cannot compile a source, with the line; None where it can."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{error or 'it is nested too deep'}"[:200]
    return None


def _unfit(expected: str, comparison: ComparisonName) -> str | None:
    """Why an expected answer cannot be compared in this way; None where it can."""
    if comparison == "numeric" and number_of(expected) is None:
        return "is no number, which the numeric comparison needs"
    return expectation_fault(COMPARISONS[comparison], expected)


class ProblemRow(RowSection):
    """The schema of a line: tests of a program, tests in code of a function, or an answer, and the response is text."""

    statement: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    tests: tuple[TestRow, ...] = Field(default=(), max_length=10_000)
    answer: AnswerRow | None = None
    code_tests: CodeTestsRow | None = None
    language: str = "python"
    response_format: ResponseFormat = "fenced"
    checker: CheckerName = "tokens"
    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    checker_program: str = Field(default="", max_length=LARGEST_CODE)
    limits: LimitsRow = LimitsRow()
    human_solutions: tuple[str, ...] = ()
    wrong_solutions: tuple[str, ...] = ()
    difficulty: str = ""
    arguments: dict[str, JsonValue] | None = Field(
        default=None, description="What a scoring function or service of the job is told of this problem."
    )

    verifier: str = Field(default="", max_length=64, description="Which of the job's verifiers decides, by its name.")

    @field_validator("arguments")
    @classmethod
    def arguments_are_small(cls, arguments: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        reserved = sorted({"expected", "response", "statement"} & set(arguments or ()))
        if reserved:
            raise ValueError(f"{reserved[0]} is given by the platform itself")
        if len(json.dumps(arguments)) > MOST_ARGUMENTS:
            raise ValueError(f"longer than {MOST_ARGUMENTS} characters as JSON")
        return arguments

    @model_validator(mode="after")
    def can_be_judged(self) -> Self:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        given = [name for name in ("tests", "answer", "code_tests") if getattr(self, name)]
        if not given and self.arguments is None and not self.verifier:
            yield "a problem needs tests, an answer, code_tests, arguments for the job's verifier, or the name of one"
        elif given and (foreign := sorted(self.model_fields_set & _FOREIGN[given[-1]])):
            yield f"{', '.join(foreign)} belong to programs, not to a problem with {_NAMED[given[-1]]}"
        if not LANGUAGES.fullmatch(self.language):
            yield f"language {self.language[:40]!r} is none that a judge knows: python, cpp, c, java"
        if (self.checker == "special") != bool(self.checker_program):
            yield "the checker special and a checker_program go together"
        if self.checker_program and (reason := syntax_fault(self.checker_program)):
            yield f"the checker_program cannot be compiled: {reason}"


def read_jsonl(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder as they are written."""
    return read_problems(path, ProblemRow.model_fields, jsonl_problem)


def jsonl_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(ProblemRow, record)
    # What only a function or service of the job judges is no program, unless the row says how it stands in a response.
    is_program = bool(row.tests or row.code_tests) or "response_format" in row.model_fields_set
    return Problem(
        statement=row.statement,
        tests=_test_set(row),
        language=ANSWER_LANGUAGE if row.answer else row.language,
        response_format="raw" if row.answer or not is_program else row.response_format,
        human_solutions=row.human_solutions,
        wrong_solutions=row.wrong_solutions,
        difficulty=row.difficulty,
        arguments_json=_arguments(row),
        verifier=row.verifier,
        place=record.place,
    )


def _arguments(row: ProblemRow) -> str:
    if not row.arguments:
        return ""
    return json.dumps(row.arguments, sort_keys=True, separators=(",", ":"))


def _test_set(row: ProblemRow) -> wire.TestSet:
    if row.answer:
        return wire.TestSet(answer=row.answer.rule())
    limits = wire.Limits(**row.limits.model_dump())
    if row.code_tests:
        return wire.TestSet(code_tests=row.code_tests.tests(), limits=limits)
    if not row.tests:
        return wire.TestSet()
    return wire.TestSet(
        tests=[
            wire.TestCase(stdin=test.stdin.encode(), stdout=test.stdout.encode(), public=test.public)
            for test in row.tests
        ],
        checker=wire.Checker.Value(f"CHECKER_{row.checker.upper()}"),
        limits=limits,
        absolute_tolerance=row.absolute_tolerance,
        relative_tolerance=row.relative_tolerance,
        checker_program=row.checker_program.encode(),
        checker_language="python" if row.checker_program else "",
    )
