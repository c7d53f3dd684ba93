"""Answers: where they stand, what is the same, and that no response breaks or stalls the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spo.errors import InvalidInput
from spo.tasks.answer import answer_in, fault_of, number_of
from spo.tasks.load import check_file
from spo.tasks.records import AnswerRow, Record, jsonl_problem
from spo.v1.verdict_pb2 import AnswerRule


def rule_of(expected: str = "42", **fields: Any) -> AnswerRule:
    return AnswerRow(expected=(expected,), **fields).rule()


BOXED = {"extraction": "boxed"}
TAG = {"extraction": "xml_tag", "marker": "answer"}
MARKER = {"extraction": "after_marker", "marker": "####"}
LAST_NUMBER = {"extraction": "last_number"}
FIRST_LINE = {"extraction": "first_line"}


@pytest.mark.parametrize(
    ("fields", "response", "answer"),
    [
        ({}, "  42 \n", "42"),
        ({}, "", ""),
        (FIRST_LINE, " 57\n12 + 3 = 15\n", "57"),
        (FIRST_LINE, "\n \n57\n", "57"),
        (LAST_NUMBER, "First 3 apples, then 4, so all are 7.", "7"),
        (LAST_NUMBER, "It is 12-5", "12-5"),
        (LAST_NUMBER, "It is -5", "-5"),
        (LAST_NUMBER, "It is \u22125", "-5"),
        (LAST_NUMBER, "In all 1,234,567 of them", "1,234,567"),
        (LAST_NUMBER, "the pair 1,2", "1,2"),
        (LAST_NUMBER, "about 6.02e23 of them", "6.02e23"),
        (LAST_NUMBER, "no idea", ""),
        (MARKER, "#### 1\nno: #### 2 \nthat is it", "2"),
        (MARKER, "# 42", ""),
        (BOXED, r"thus \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (BOXED, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (BOXED, r"\boxed{42", ""),
        (TAG, "<answer>1</answer> <answer> 2 </answer>", "2"),
        (TAG, "<answer>1", ""),
        (TAG, "1</answer>", ""),
    ],
)
def test_the_answer_stands_where_the_rule_says(fields: dict[str, str], response: str, answer: str) -> None:
    assert answer_in(rule_of(**fields), response) == answer


@pytest.mark.parametrize("text", ["42", " 42. ", "$42", "42.0", "+42", "4.2e1", "042"])
def test_a_number_is_the_same_however_it_is_written(text: str) -> None:
    assert fault_of(rule_of(comparison="numeric"), text) is None
    assert text == "42" or fault_of(rule_of(comparison="exact"), text) or text.strip() == "42"


@pytest.mark.parametrize(
    "text", ["", "forty-two", "42 or 43", "1/0", "4 2", "nan", "inf", "0x2a", "42x", "\u56db\u5341\u4e8c"]
)
def test_what_is_not_one_number_is_no_number(text: str) -> None:
    assert number_of(text) is None
    assert fault_of(rule_of(comparison="numeric"), text) is not None


def test_tolerances_are_absolute_plus_relative() -> None:
    rule = rule_of("1000", comparison="numeric", absolute_tolerance=0.5, relative_tolerance=0.001)
    assert [fault_of(rule, text) is None for text in ("998.5", "998.4", "1001.5", "1001.6")] == [
        True,
        False,
        True,
        False,
    ]
    assert fault_of(rule_of("1" + "0" * 80, comparison="numeric"), "1" + "0" * 79 + "1"), "no tolerance is none"


def test_any_of_the_expected_answers_is_right_and_a_wrong_one_tells_why() -> None:
    rule = AnswerRow(expected=("Paris", "paris")).rule()
    assert fault_of(rule, " paris\n") is None
    assert fault_of(rule, "Lyon") == "expected 'Paris', found 'Lyon'"
    assert fault_of(rule_of(**BOXED), "42") == r"no answer found: the response holds no whole \boxed{...}"


RULES = [
    rule_of(comparison=comparison, **where)
    for comparison in ("exact", "numeric")
    for where in ({}, FIRST_LINE, LAST_NUMBER, MARKER, BOXED, TAG)
]


@given(st.text() | st.text(alphabet="0123456789.,-+eE{}\\<>/#\ud800 \n") | st.just("\\boxed{" * 50))
def test_no_response_raises(response: str) -> None:
    for rule in RULES:
        fault = fault_of(rule, response)
        assert fault is None or fault.encode()


@pytest.mark.parametrize(
    "piece",
    ["1", "1,", "111,", "1e", ".", "-", "\\boxed{", "{", "}", "\\", "<answer>", "</answer>", "####", "1e999999999 "],
)
def test_a_hostile_response_takes_no_longer_than_another_of_its_length(piece: str) -> None:
    """In quadratic time this would not end before the suite's limit for a test."""
    response = piece * (500_000 // len(piece))
    for rule in RULES:
        fault_of(rule, response)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expected": []}, "at least 1 item"),
        ({"expected": [" "]}, "blank"),
        ({"expected": ["x"], "comparison": "numeric"}, "is no number"),
        ({"expected": ["1"], "extraction": "xml_tag"}, "marker belongs"),
        ({"expected": ["1"], "marker": "x"}, "marker belongs"),
        ({"expected": ["1"], "extraction": "xml_tag", "marker": "a>b"}, "XML tag"),
        ({"expected": ["1"], "extraction": "guess"}, "Input should be"),
    ],
)
def test_a_rule_that_cannot_decide_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswerRow.model_validate(fields)


def test_a_row_with_an_answer_is_a_problem_without_a_program() -> None:
    row = {"statement": "6 * 7 =", "answer": {"expected": ["42"]}, "human_solutions": ["42"], "difficulty": "easy"}
    problem = jsonl_problem(Record("a.jsonl, line 1", row))

    assert (problem.language, problem.response_format, problem.human_solutions) == ("text", "raw", ("42",))
    assert problem.tests.answer.expected == ["42"]
    assert not problem.tests.tests
    assert jsonl_problem(Record("", {**row, "answer": {"expected": ["43"]}})).problem_id != problem.problem_id


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a problem needs tests, an answer"),
        ({"answer": {"expected": ["1"]}, "tests": [{"stdin": "", "stdout": "1"}]}, "tests belong to programs"),
        ({"answer": {"expected": ["1"]}, "language": "python", "checker": "exact"}, "checker, language belong"),
    ],
)
def test_a_row_is_decided_by_one_thing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        jsonl_problem(Record("a.jsonl, line 1", {"statement": "x", **fields}))


def test_the_report_on_a_file_counts_answers(tmp_path: Path) -> None:
    rows = [{"statement": f"{n} + 1 =", "answer": {"expected": [str(n + 1)]}} for n in range(3)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"statement": "x", "answer": {"expected": []}}]))

    report = check_file(file, "jsonl")
    assert (report["problems"], report["answers"], report["tests"], report["faults_total"]) == (3, 3, 0, 1)
    assert report["faults"][0]["place"] == "line 4"
