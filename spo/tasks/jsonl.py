"""Reader of the platform's own task files: one problem per line (or row), every field named and checked.

{"statement": "Print the sum.", "tests": [{"stdin": "1 2\\n", "stdout": "3\\n", "public": true}],
 "human_solutions": ["print(sum(map(int, input().split())))"]}
{"statement": "What is 12 + 30? Put it into \\\\boxed{}.", "answer": {"expected": ["42"], "extraction": "boxed"}}
{"statement": "Write f(x), twice x.", "code_tests": {"code": "assert f(2) == 4", "entry_point": "f"}}
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from spo.spec.task_sources import ComparisonName, ExtractionName, StyleName
from spo.tasks.answer import ANSWER_LANGUAGE, MAX_MARKER, XML_TAG
from spo.tasks.problem import DEFAULT_LIMITS, Problem, ResponseFormat
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM
from spo.tasks.records import Record, parse_record, read_problems
from spo.tasks.scoring.comparisons import expectation_fault
from spo.tasks.scoring.numbers import LONGEST_ANSWER, number_of
from spo.tasks.scoring.separate_tests import reasons_to_share
from spo.v1.verdict_pb2 import (
    AnswerComparison,
    AnswerExtraction,
    AnswerRule,
    Checker,
    CodeTests,
    CodeTestStyle,
    Limits,
    TestCase,
    TestIsolation,
    TestSet,
)

COMPARISONS = {name: AnswerComparison.Value(f"ANSWER_COMPARISON_{name.upper()}") for name in get_args(ComparisonName)}
CheckerName = Literal["tokens", "exact", "float", "unordered_lines", "case_insensitive", "special"]
# What a verifier is told of a problem travels with its tests.
MOST_ARGUMENTS = 65_536
# Those that a judge may have; which of them one has, it says itself.
LANGUAGES = re.compile(r"python(3\.\d{1,2})?|pypy(3(\.\d{1,2})?)?|cpp|c|java")
LARGEST_CODE = 1 << 20


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

    def rule(self) -> AnswerRule:
        """The rule as the judge knows it."""
        return AnswerRule(
            expected=self.expected,
            comparison=COMPARISONS[self.comparison],
            extraction=AnswerExtraction.Value(f"ANSWER_EXTRACTION_{self.extraction.upper()}"),
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
        if self.isolation == "separate" and (reasons := reasons_to_share(self.tests())):
            raise ValueError(f"the tests cannot be separate from a response: {'; '.join(reasons)}")
        return self

    def tests(self) -> CodeTests:
        """The tests as the judge knows them."""
        style = CodeTestStyle.Value(f"CODE_TEST_STYLE_{self.style.upper()}")
        isolation = TestIsolation.Value(f"TEST_ISOLATION_{self.isolation.upper() or 'UNSPECIFIED'}")
        return CodeTests(
            style=style, before=self.before, code=self.code, entry_point=self.entry_point, isolation=isolation
        )


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


def read_jsonl(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder as they are written."""
    return read_problems(path, ProblemRow.model_fields, jsonl_problem)


def jsonl_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(ProblemRow, record)
    return Problem(
        statement=row.statement,
        tests=_test_set(row),
        language=ANSWER_LANGUAGE if row.answer else row.language,
        response_format="raw" if row.answer else row.response_format,
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


def _test_set(row: ProblemRow) -> TestSet:
    if row.answer:
        return TestSet(answer=row.answer.rule())
    limits = Limits(**row.limits.model_dump())
    if row.code_tests:
        return TestSet(code_tests=row.code_tests.tests(), limits=limits)
    if not row.tests:
        return TestSet()
    return TestSet(
        tests=[
            TestCase(stdin=test.stdin.encode(), stdout=test.stdout.encode(), public=test.public) for test in row.tests
        ],
        checker=Checker.Value(f"CHECKER_{row.checker.upper()}"),
        limits=limits,
        absolute_tolerance=row.absolute_tolerance,
        relative_tolerance=row.relative_tolerance,
        checker_program=row.checker_program.encode(),
        checker_language="python" if row.checker_program else "",
    )
