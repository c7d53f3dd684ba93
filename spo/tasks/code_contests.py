"""Reader of CodeContests (Li et al., 2022) in its published columns, from local Parquet, Arrow or JSONL files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from spo.tasks.faults import malformed
from spo.tasks.problem import Problem
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM, Columns, ask_for_program, first_distinct, make_test_set
from spo.tasks.records import Record, parse_record, read_problems
from spo.v1.verdict_pb2 import TestCase

PYTHON3 = 3
DIFFICULTIES = ("unknown", "easy", "medium", "hard", "harder", "hardest", "external", *"ABCDEFGHIJKLMNOPQRSTUV")


class PublishedTests(Columns):
    """Two parallel columns: one input and one output per test."""

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.input) != len(self.output):
            raise ValueError(f"{len(self.input)} inputs but {len(self.output)} outputs")
        return self

    def cases(self, *, public: bool) -> list[TestCase]:
        """Return the tests as the judge knows them."""
        pairs = zip(self.input, self.output, strict=True)
        return [TestCase(stdin=given.encode(), stdout=wanted.encode(), public=public) for given, wanted in pairs]


class PublishedSolutions(Columns):
    """Two parallel columns: one language number and one source per solution."""

    language: tuple[int, ...] = ()
    solution: tuple[str, ...] = ()

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.language) != len(self.solution):
            raise ValueError(f"{len(self.language)} languages but {len(self.solution)} solutions")
        return self

    def in_python(self) -> tuple[str, ...]:
        """Return the Python 3 programs."""
        pairs = zip(self.language, self.solution, strict=True)
        return first_distinct(program for language, program in pairs if language == PYTHON3)


class PublishedTimeLimit(Columns):
    seconds: int = Field(default=0, ge=0, le=3600)
    nanos: int = Field(default=0, ge=0, lt=1_000_000_000)

    def in_seconds(self) -> float:
        """Return the limit as a number of seconds, 0 where none was published."""
        return self.seconds + self.nanos * 1e-9


class CodeContestsRecord(Columns):
    description: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    public_tests: PublishedTests = PublishedTests()
    private_tests: PublishedTests = PublishedTests()
    generated_tests: PublishedTests = PublishedTests()
    solutions: PublishedSolutions = PublishedSolutions()
    incorrect_solutions: PublishedSolutions = PublishedSolutions()
    difficulty: int = Field(default=0, ge=0, lt=len(DIFFICULTIES))
    time_limit: PublishedTimeLimit = PublishedTimeLimit()
    memory_limit_bytes: int = Field(default=0, ge=0, lt=1 << 40)
    input_file: str = ""
    output_file: str = ""


def read_code_contests(path: str | Path) -> Iterator[Problem]:
    """Yield the problems that read standard input and write standard output; others cannot be judged here."""
    return read_problems(path, CodeContestsRecord.model_fields, code_contests_problem)


def code_contests_problem(record: Record) -> Problem | None:
    """The problem of a row, None when it reads or writes files. Raises InvalidInput naming its place."""
    row = parse_record(CodeContestsRecord, record)
    if row.input_file or row.output_file:
        return None
    cases = [
        *row.public_tests.cases(public=True),
        *row.private_tests.cases(public=False),
        *row.generated_tests.cases(public=False),
    ]
    if not cases:
        raise malformed(record.place, "the problem has no tests")
    return Problem(
        statement=ask_for_program(row.description),
        tests=make_test_set(cases, row.time_limit.in_seconds(), row.memory_limit_bytes),
        response_format="fenced",
        human_solutions=row.solutions.in_python(),
        wrong_solutions=row.incorrect_solutions.in_python(),
        difficulty=DIFFICULTIES[row.difficulty],
        place=record.place,
    )
