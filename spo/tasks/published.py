"""What the published contest sets share: how a statement asks for a program, and how outputs are compared."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from spo.tasks.problem import DEFAULT_LIMITS
from spo.v1.verdict_pb2 import CHECKER_FLOAT, CHECKER_TOKENS, Limits, TestCase, TestSet

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
