"""Answers written by hand with the right verdicts: numbers, units, LaTeX, percentages, choices, expressions, traps.

The rows of the comparison `math` are decided in the sandbox: tests/integration/sandbox_judge/test_answer_table.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spo.tasks.answer import fault_of
from spo.tasks.records import AnswerRow

TABLE: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()
]
HERE = [row for row in TABLE if row["rule"].get("comparison") != "math"]


@pytest.mark.parametrize("row", HERE, ids=lambda row: f"{row['rule']['expected'][0][:20]} <- {row['response'][:40]}")
def test_an_answer_is_right_or_wrong(row: dict[str, Any]) -> None:
    fault = fault_of(AnswerRow.model_validate(row["rule"]).rule(), row["response"])
    assert (fault is None) == row["right"], fault


def test_the_table_is_large_and_even() -> None:
    assert len(TABLE) >= 200
    assert 0.35 < sum(row["right"] for row in TABLE) / len(TABLE) < 0.65
