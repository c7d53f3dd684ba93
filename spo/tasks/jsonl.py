"""Reader of the platform's own task files: one problem per line (or row), every field named and checked.

{"statement": "Print the sum.", "tests": [{"stdin": "1 2\\n", "stdout": "3\\n", "public": true}],
 "human_solutions": ["print(sum(map(int, input().split())))"]}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spo.tasks.problem import DEFAULT_LIMITS, Problem, ResponseFormat
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM
from spo.tasks.records import Record, parse_record, read_records
from spo.v1.verdict_pb2 import Checker, Limits, TestCase, TestSet

CheckerName = Literal["tokens", "exact", "float", "unordered_lines", "case_insensitive", "special"]


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


class ProblemRow(RowSection):
    """The schema of a line."""

    statement: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    tests: tuple[TestRow, ...] = Field(min_length=1, max_length=10_000)
    language: str = "python"
    response_format: ResponseFormat = "fenced"
    checker: CheckerName = "tokens"
    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    checker_program: str = ""
    limits: LimitsRow = LimitsRow()
    human_solutions: tuple[str, ...] = ()
    wrong_solutions: tuple[str, ...] = ()
    difficulty: str = ""


def read_jsonl(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder as they are written."""
    return map(jsonl_problem, read_records(path, ProblemRow.model_fields))


def jsonl_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(ProblemRow, record)
    return Problem(
        statement=row.statement,
        tests=_test_set(row),
        language=row.language,
        response_format=row.response_format,
        human_solutions=row.human_solutions,
        wrong_solutions=row.wrong_solutions,
        difficulty=row.difficulty,
    )


def _test_set(row: ProblemRow) -> TestSet:
    return TestSet(
        tests=[
            TestCase(stdin=test.stdin.encode(), stdout=test.stdout.encode(), public=test.public) for test in row.tests
        ],
        checker=Checker.Value(f"CHECKER_{row.checker.upper()}"),
        limits=Limits(**row.limits.model_dump()),
        absolute_tolerance=row.absolute_tolerance,
        relative_tolerance=row.relative_tolerance,
        checker_program=row.checker_program.encode(),
        checker_language="python" if row.checker_program else "",
    )
