"""What mathematics is read in an answer: forms of one result are right, answers that name several are not paid."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.sandbox_judge.jail.scores_child import Refused, _mathematics
from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks

# An expected answer as MATH writes it, and answers that say the same.
SAME: dict[str, list[str]] = {
    r"\$36": ["36", r"\$36", "$36", r"\$ 36", r"\$36.00", r"36\$", r"\text{\$}36", r"36 \text{ dollars}", "$36$"],
    r"\$32,\!348": ["32348", "32,348", r"32{,}348", r"\$32,348", r"32\,348", "32 348"],
    r"\$18.90": ["18.9", r"\$18.90", "18.90", r"\frac{189}{10}"],
    "-5": [r"-\$5", r"\$-5", "-$5", "\u22125", "-5.0", r"\text{-5}"],
    "36": [r"\(36\)", r"\[36\]", "$$36$$", r"\boxed{36}", "x=36", r"36^\circ", r"36\text{ cm}^2", "6^2", "**36**"],
    r"\frac{3}{4}": [r"\dfrac{3}{4}", r"\tfrac34", "0.75", "3/4", r"75\%", r"\frac34"],
    r"12\text{ and }13": [r"12 \text{ and } 13", "12, 13", "$12$ and $13$"],
    r"\text{Evelyn}": [r"\text{Evelyn}"],
    r"x \in [-2,7]": ["[-2,7]", r"x\in[-2,7]"],
    r"(3,\frac{\pi}{2})": [r"\left( 3, \frac{\pi}{2} \right)"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    r"(-\infty,3)\cup(5,\infty)": [r"(-\infty, 3) \cup (5, \infty)"],
    r"11,\! 111,\! 111,\! 100": ["11111111100"],
    r"x=1 \\ y=2": [r"x=1 \\ y=2"],
    r"\frac{1}{2}": [r"\\frac{1}{2}", r"\\boxed{\\frac{1}{2}}"],
    "2, 3": ["3, 2", r"2 \text{ or } 3", "$2$ and $3$", r"x=2 \text{ or } x=3"],
}
# Two results, of which 2 would be right.
HEDGES = [
    *("1 or 2", "2 or 1", "1, 2", "2, 1", "1 and 2", "x=1 or x=2", "x=1, x=2", r"1 \text{ or } 2", r"2 \text{ or } 1"),
    *(r"\{1,2\}", "(1,2)", "[1,2]", r"\pm 2", "-2, 2", r"2\text{ and }3", "$1$ or $2$", "$2$ or $1$", "$2$, $3$"),
    *("2;3", "3;2", "2/3", r"2\ 3", "2 3", r"2 \vee 3", r"2 \lor 3", r"2\quad 3", r"2\\3", r"3\\2", "2 | 3", "2 vs 3"),
    *(r"\$1 or \$2", r"\$1,\$2", "$1 or $2", "$2 or $1", r"2 \text{ if } x>0, 3 \text{ otherwise}", "2 (or 3)"),
    *(r"\begin{cases}2\\3\end{cases}", r"1 \leq x \leq 2", "1<x<2", r"1\text{ to }2", "1-2", r"x\in\{1,2\}", "1\n2"),
    *(r"\text{either 1 or 2}", r"\text{2 or 3}", r"2\text{, }3", r"2 \text{ maybe } 3", "1?2", "2?3", r"\[1\]\[2\]"),
    *("$1$$2$", r"\(1\) or \(2\)", "2&3", r"2,\ 3", r"2 \text{ unless } x=3, \text{ then } 3", "$2$ $3$"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    yield
    logging.disable(before)


def scorer(*expected: str) -> Callable[[str], Any]:
    return _mathematics({"expected": list(expected), "whole": False})


def is_right(score: Callable[[str], Any], answer: str) -> bool:
    try:
        return bool(score(answer) == 1.0)
    except Refused:
        return False


@pytest.mark.parametrize("expected", SAME)
def test_an_answer_is_right_in_all_its_forms(expected: str) -> None:
    score = scorer(expected)
    assert [answer for answer in SAME[expected] if not is_right(score, answer)] == []
    assert not is_right(score, "41")


def test_an_answer_that_names_several_results_is_not_right_by_one_of_them() -> None:
    assert len(HEDGES) >= 48
    score = scorer("2")
    assert [answer for answer in HEDGES if is_right(score, answer)] == []


def test_expected_answers_that_cannot_be_read_are_refused_by_their_rows(tmp_path: Path) -> None:
    answers = [r"\$36", r"\frac{1}{2}", "7", "\\", r"\text{Evelyn}", "x=1", "$"]
    file = tmp_path / "a.jsonl"
    rule = {"comparison": "math", "extraction": "boxed"}
    rows = [{"statement": f"{place}?", "answer": {**rule, "expected": [each]}} for place, each in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = TasksSpec(kind="jsonl", path=str(file), evaluation_problems=0)

    with pytest.raises(InvalidInput) as refused:
        load_tasks(spec)
    assert refused.value.code == "malformed_task"
    told = sorted(violation.message for violation in refused.value.violations)
    assert {violation.pointer for violation in refused.value.violations} == {"/tasks/path"}
    assert [message.split(": ")[0].rpartition(" ")[2] for message in told] == ["4", "7"]
    assert "nothing that math-verify can read" in told[0]

    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["answer"]["expected"][0] not in ("\\", "$")))
    assert len(load_tasks(spec).train) == 5
