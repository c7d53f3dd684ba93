"""Reader of TACO (Li et al., 2023) in its published columns, from local Arrow, Parquet or JSONL files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from spo.tasks.faults import malformed
from spo.tasks.problem import Problem
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM, Columns, ask_for_program, first_distinct, make_test_set
from spo.tasks.records import Record, parse_json, parse_record, read_problems
from spo.v1.verdict_pb2 import TestCase

_NUMBER = re.compile(r"\d+(\.\d+)?")
_UNITS = {"kilobytes": 1 << 10, "megabytes": 1 << 20, "gigabytes": 1 << 30}


class TacoRecord(Columns):
    """`solutions` and `input_output` are JSON within text; limits are phrases such as "2.0 seconds"."""

    question: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    input_output: str = Field(min_length=1)
    solutions: str = ""
    difficulty: str = "unknown"
    time_limit: str = ""
    memory_limit: str = ""


class TacoSolutions(Columns):
    programs: tuple[str, ...]


class TacoTests(Columns):
    """A side of a test is its text or, in some problems, its lines."""

    inputs: tuple[str | tuple[str, ...], ...]
    outputs: tuple[str | tuple[str, ...], ...]

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.outputs)} outputs")
        if not self.inputs:
            raise ValueError("the problem has no tests")
        return self


def read_taco(path: str | Path) -> Iterator[Problem]:
    """Yield the problems that read standard input and write standard output; calls of a function cannot be judged.

    TACO flags no test as public.
    """
    return read_problems(path, TacoRecord.model_fields, taco_problem)


def taco_problem(record: Record) -> Problem | None:
    """The problem of a row, None when it calls a function. Raises InvalidInput naming its place."""
    row = parse_record(TacoRecord, record)
    tests = _parse_column(record, "input_output", row.input_output)
    if isinstance(tests, dict) and tests.get("fn_name"):
        return None
    columns = parse_record(TacoTests, Record(f"{record.place}, input_output", tests))
    cases = [
        TestCase(stdin=_text(given), stdout=_text(wanted))
        for given, wanted in zip(columns.inputs, columns.outputs, strict=True)
    ]
    return Problem(
        statement=ask_for_program(row.question),
        tests=make_test_set(cases, _cpu_seconds(row, record), _memory_bytes(row, record)),
        response_format="fenced",
        human_solutions=_programs(row, record),
        difficulty=row.difficulty.lower(),
        place=record.place,
    )


def _parse_column(record: Record, column: str, text: str) -> Any:
    return parse_json(text, f"{record.place}, {column}")


def _programs(row: TacoRecord, record: Record) -> tuple[str, ...]:
    if not row.solutions:
        return ()
    programs = _parse_column(record, "solutions", row.solutions)
    return first_distinct(
        parse_record(TacoSolutions, Record(f"{record.place}, solutions", {"programs": programs})).programs
    )


def _text(side: str | tuple[str, ...]) -> bytes:
    return (side if isinstance(side, str) else "\n".join(side)).encode()


def _cpu_seconds(row: TacoRecord, record: Record) -> float:
    if not row.time_limit:
        return 0.0
    return _leading_number(row.time_limit, record)


def _memory_bytes(row: TacoRecord, record: Record) -> int:
    if not row.memory_limit:
        return 0
    unit = row.memory_limit.split()[-1].lower()
    return int(_leading_number(row.memory_limit, record) * _UNITS.get(unit, 1))


def _leading_number(phrase: str, record: Record) -> float:
    found = _NUMBER.match(phrase)
    if found is None:
        raise malformed(record.place, f"{phrase!r} is no limit")
    return float(found.group())
