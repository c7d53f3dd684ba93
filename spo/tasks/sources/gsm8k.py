"""GSM8K (Cobbe et al., 2021): word problems at the level of a primary school; the answer stands after "####"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.faults import malformed
from spo.tasks.problem import Problem
from spo.tasks.published import STATEMENT_BYTES_MAXIMUM, Columns
from spo.tasks.records import Record, parse_record, read_problems
from spo.tasks.scoring.numbers import number_of
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule, TestSet

MARKER = "####"
INSTRUCTION = f"Think step by step. End with a line of its own: {MARKER} and then the number."
# What the published solutions note for a calculator, such as <<16-3-4=9>>.
_CALCULATED = re.compile(r"<<[^<>]*>>")


class Gsm8kRecord(Columns):
    question: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    answer: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)


def read_gsm8k(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder in GSM8K's published columns."""
    return read_problems(path, Gsm8kRecord.model_fields, gsm8k_problem)


def gsm8k_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(Gsm8kRecord, record)
    expected = row.answer.rpartition(MARKER)[2].strip() if MARKER in row.answer else ""
    if number_of(expected) is None:
        raise malformed(record.place, f"answer: no number stands after {MARKER}")
    return Problem(
        statement=f"{row.question.strip()}\n\n{INSTRUCTION}",
        tests=TestSet(
            answer=AnswerRule(
                expected=[expected],
                comparison=AnswerComparison.ANSWER_COMPARISON_NUMERIC,
                extraction=AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER,
                marker=MARKER,
            )
        ),
        language=ANSWER_LANGUAGE,
        response_format="raw",
        human_solutions=(_CALCULATED.sub("", row.answer).strip(),),
        place=record.place,
    )
