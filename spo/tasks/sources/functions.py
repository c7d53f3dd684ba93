"""HumanEval (Chen et al., 2021) and MBPP (Austin et al., 2021): a function to be completed, and asserts that decide.

The statement is the beginning of the function. A response may go on from there or write the function anew, as it is or
in a block of code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from spo.tasks.faults import malformed
from spo.tasks.jsonl import syntax_fault
from spo.tasks.problem import DEFAULT_LIMITS, Problem
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM, Columns
from spo.tasks.records import Record, parse_record, read_problems
from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, TestSet


class FunctionRecord(Columns):
    """`prompt` and `canonical_solution` are the two halves of a function; `test` defines check(candidate)."""

    prompt: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    entry_point: str = Field(min_length=1, max_length=200)
    test: str = Field(min_length=1, max_length=1 << 20)
    canonical_solution: str = ""


def read_functions(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder in the columns that HumanEval was published in."""
    return read_problems(path, FunctionRecord.model_fields, function_problem)


def function_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(FunctionRecord, record)
    if not row.entry_point.isidentifier():
        raise malformed(record.place, f"entry_point: {row.entry_point[:80]!r} is no name of a function")
    if reason := syntax_fault(row.test):
        raise malformed(record.place, f"test: cannot be compiled: {reason}")
    whole = row.prompt + row.canonical_solution
    # Two of MBPP's solutions mix tabs and spaces, so that they do not go on from their prompts.
    solved = bool(row.canonical_solution.strip()) and not syntax_fault(whole)
    return Problem(
        statement=row.prompt,
        tests=TestSet(
            code_tests=CodeTests(
                style=CodeTestStyle.CODE_TEST_STYLE_COMPLETION,
                before=row.prompt,
                code=f"{row.test.rstrip()}\n\n{_call(row.entry_point)}\n",
                entry_point=row.entry_point,
            ),
            limits=DEFAULT_LIMITS,
        ),
        response_format="fenced",
        human_solutions=(whole.strip() + "\n",) if solved else (),
        place=record.place,
    )


def _call(entry_point: str) -> str:
    # Two of MBPP's functions have the name of what tests them.
    return "import solution\n\ncheck(solution.check)" if entry_point == "check" else f"check({entry_point})"
