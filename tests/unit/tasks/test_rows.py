"""Rows of task files that cannot be judged: every fault of a row, many rows, in words for whoever wrote them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import check_file, load_tasks
from spo.tasks.records import FAULTS_PER_FILE, FAULTS_PER_ROW, read_jsonl
from spo.v1.verdict_pb2 import AnswerComparison, CodeTestStyle

TESTS = [{"stdin": "", "stdout": "1\n"}]
GOOD = {"statement": "Print 1.", "tests": TESTS}


def written(folder: Path, *lines: str | dict[str, Any]) -> Path:
    file = folder / "tasks.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def faults_of(file: Path) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        load_tasks(TasksSpec(kind="jsonl", path=str(file), evaluation_problems=0))
    assert {violation.pointer for violation in caught.value.violations} == {"/tasks/path"}
    return [violation.message.removeprefix(f"{file}, ") for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"language": "rust"}, "language 'rust' is none that a judge knows: python, cpp, c, java"),
        ({"checker": "special"}, "the checker special and a checker_program go together"),
        ({"checker_program": "print(1)"}, "the checker special and a checker_program go together"),
        (
            {"checker": "special", "checker_program": "x = 1\nprint("},
            "the checker_program cannot be compiled: '(' was never closed, line 2",
        ),
        ({"chekcer": "exact"}, "chekcer: is no field here; did you mean checker?"),
        ({"checker": "fuzzy"}, "checker: must be one of 'tokens', 'exact', 'float'"),
        ({"tests": "none"}, "tests: must be a list, not text"),
        ({"human_solutions": None}, "human_solutions: must be a list, not null"),
        ({"limits": {"processes": 1.5}}, "limits/processes: must be a whole number"),
        ({"answer": {"expected": ["1"]}}, "tests belong to programs, not to a problem with an answer"),
        ({"code_tests": {"code": "assert f()"}}, "tests belong to programs, not to a problem with code_tests"),
    ],
)
def test_what_the_judge_could_not_use_is_refused_at_once(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    (fault,) = faults_of(written(tmp_path, GOOD, {**GOOD, **fields}))
    assert fault.startswith(f"line 2: {told}")


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ({}, "code_tests/code: is missing"),
        ({"code": "assert f("}, "code_tests: the code cannot be compiled: '(' was never closed, line 1"),
        *(
            ({"code": code}, "code_tests: the code defines tests and runs none, so every response would pass")
            for code in (
                "import unittest\nclass T(unittest.TestCase):\n  def test_f(self):\n    self.assertEqual(f(), 1)",
                "from solution import f\n\ndef test_f():\n    assert f() == 1",
                '"""Tests."""\nCASES = [(1, 2), (3, 4)]\nasync def check():\n    assert f(1) == 2',
                "def check(candidate):\n    assert candidate(1) == 2\nMETADATA = {'author': 'x'}",
                "pass",
            )
        ),
        ({"code": "assert 1", "entry_point": "not a name"}, "code_tests: entry_point 'not a name' is no name"),
        ({"code": "assert 1", "style": "completion"}, "code_tests: the style completion needs the entry_point"),
        (
            {"code": "assert 1", "style": "unittest"},
            "code_tests/style: must be one of 'module',",
        ),
    ],
)
def test_tests_in_code_that_cannot_run_are_refused(tmp_path: Path, tests: dict[str, Any], told: str) -> None:
    (fault,) = faults_of(written(tmp_path, {"statement": "Write f.", "code_tests": tests}))
    assert fault.startswith(f"line 1: {told}")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"expected": ["("], "comparison": "regular_expression"}, "'(' is no regular expression: missing )"),
        ({"expected": ["{"], "comparison": "json_schema"}, "'{' is no JSON schema"),
        ({"expected": ["[1]"], "comparison": "json_schema"}, "'[1]' is no JSON schema"),
        ({"expected": ["many"], "comparison": "numeric"}, "'many' is no number, which the numeric comparison needs"),
    ],
)
def test_an_expected_answer_that_cannot_be_compared_is_refused(
    tmp_path: Path, answer: dict[str, Any], told: str
) -> None:
    (fault,) = faults_of(written(tmp_path, {"statement": "How many?", "answer": answer}))
    assert fault.startswith(f"line 1: answer: {told}")


def test_a_key_twice_in_one_object_is_refused(tmp_path: Path) -> None:
    twice = '{"statement": "Print 1.", "tests": [{"stdin": "", "stdout": "1", "stdout": "2"}]}'
    assert faults_of(written(tmp_path, GOOD, twice)) == ["line 2: not valid JSON: 'stdout' appears twice in one object"]


def test_all_faults_of_a_row_are_told_and_of_many_rows(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"statement": 3, "tests": [{"stdin": ""}], "surprise": 1},
        GOOD,
        "{",
        {**GOOD, "language": "rust", "checker": "special"},
    )

    told = faults_of(file)

    assert told[:3] == [
        "line 1: statement: must be text, not a number",
        "line 1: tests/0/stdout: is missing",
        "line 1: surprise: is no field here",
    ]
    assert told[3].startswith("line 3: not valid JSON")
    assert "language 'rust'" in told[4]
    assert "checker special" in told[4]
    report = check_file(file, "jsonl")
    assert (report["rows"], report["problems"], report["faults_total"]) == (3, 1, 5)
    assert [fault["place"] for fault in report["faults"]] == ["line 1", "line 1", "line 1", "line 3", "line 4"]


def test_how_much_is_told_has_a_bound(tmp_path: Path) -> None:
    row = {"statement": "x", "tests": [{"stdin": 1, "stdout": ""}] * 40}
    assert len(faults_of(written(tmp_path, row))) == FAULTS_PER_ROW + 1
    assert len(faults_of(written(tmp_path, *[row] * 40))) == FAULTS_PER_FILE


def test_no_word_of_the_library_behind_the_schema_is_told(tmp_path: Path) -> None:
    wrong: list[Any] = [1, None, "x", [], {}, True, 1.5, [[]], {"x": 1}]
    row = {"statement": "x", "tests": TESTS}
    rows = [{**row, name: value} for name in ("statement", "tests", "limits", "answer", "checker") for value in wrong]
    foreign = re.compile(r"Input should|Field required|valid dictionary|Extra inputs|pydantic|tuple")
    told = [message for one in rows for message in refusals(written(tmp_path, one))]

    assert len(told) > 30
    assert [message for message in told if foreign.search(message)] == []


def refusals(file: Path) -> list[str]:
    try:
        list(read_jsonl(file))
    except InvalidInput as error:
        return [error.message]
    return []


def test_tests_in_code_come_to_the_judge_as_they_are(tmp_path: Path) -> None:
    code_tests = {"style": "pytest", "before": "import math\n", "code": "def test_f(): pass", "entry_point": "f"}
    row = {"statement": "Write f.", "code_tests": code_tests, "limits": {"cpu_seconds": 3}}
    (problem,) = read_jsonl(written(tmp_path, row))

    tests = problem.tests.code_tests
    assert tests.style == CodeTestStyle.CODE_TEST_STYLE_PYTEST
    assert (tests.before, tests.code, tests.entry_point) == ("import math\n", "def test_f(): pass", "f")
    assert problem.tests.limits.cpu_seconds == 3
    assert (problem.language, problem.response_format) == ("python", "fenced")


def test_every_comparison_that_the_contract_knows_can_be_asked_for(tmp_path: Path) -> None:
    expected = {"json_schema": '{"type": "object"}', "numeric": "1", "math": "\\frac12", "choice": "B"}
    for value in AnswerComparison.values()[1:]:
        name = AnswerComparison.Name(value).removeprefix("ANSWER_COMPARISON_").lower()
        answer = {"expected": [expected.get(name, "x")], "comparison": name}
        (problem,) = read_jsonl(written(tmp_path, {"statement": "?", "answer": answer}))
        assert problem.tests.answer.comparison == value


def test_public_tests_decide_programs_alone_and_answers_stay(tmp_path: Path) -> None:
    public = [{"stdin": "", "stdout": "1", "public": True}, {"stdin": "", "stdout": "1"}]
    rows = [
        {"statement": "Print 1 with a public test.", "tests": public},
        {"statement": "Print 1 without.", "tests": TESTS},
        {"statement": "How many?", "answer": {"expected": ["1"]}},
    ]
    spec = TasksSpec(
        kind="jsonl", path=str(written(tmp_path, *rows)), evaluation_problems=0, reward={"tests": "public"}
    )

    tasks = load_tasks(spec)

    assert {problem.statement for problem in tasks.train} == {"Print 1 with a public test.", "How many?"}
    assert [len(problem.tests.tests) for problem in tasks.train if problem.tests.tests] == [1]
    assert tasks.notes == ("1 training problems without public tests are left out",)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"statement": "How many?", "answer": {"expected": ["1"]}}, "no training problem is decided by tests"),
        (GOOD, "no training problem has public tests"),
    ],
)
def test_public_tests_that_nothing_has_are_refused_at_their_field(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    spec = TasksSpec(kind="jsonl", path=str(written(tmp_path, row)), evaluation_problems=0, reward={"tests": "public"})

    with pytest.raises(InvalidInput, match=told) as caught:
        load_tasks(spec)

    assert [fault.pointer for fault in caught.value.violations] == ["/tasks/reward/tests"]


ONE = {"statement": "Guess the word.", "answer": {"expected": ["x"]}}
PROGRAM = {"statement": "Play the game."}
OTHER_ROWS: dict[str, list[dict[str, Any]]] = {
    "arguments": [{**ONE, "arguments": {"task": number}} for number in range(20)],
    "arguments alone": [{"statement": "Guess.", "arguments": {"task": number}} for number in range(20)],
    "answers": [{"statement": "Guess.", "answer": {"expected": [str(number)]}} for number in range(20)],
    "comparisons": [{"statement": "Guess.", "answer": {"expected": ["1"], "absolute_tolerance": n}} for n in range(20)],
    "tests": [{**PROGRAM, "tests": [{"stdin": f"{number}\n", "stdout": "1\n"}]} for number in range(20)],
    "code": [{**PROGRAM, "code_tests": {"code": f"assert f({number})"}} for number in range(20)],
    "languages": [
        {**PROGRAM, "language": name, "tests": [{"stdin": "", "stdout": ""}]} for name in ("python", "cpp", "c")
    ],
}


@pytest.mark.parametrize("differ", OTHER_ROWS)
def test_rows_of_one_statement_that_differ_in_what_decides_are_problems_of_their_own(
    tmp_path: Path, differ: str
) -> None:
    rows = OTHER_ROWS[differ]
    file = written(tmp_path, *rows, rows[0])
    verifier = {"kind": "http", "url": "https://a.example/score"} if differ == "arguments alone" else {}
    spec = {"kind": "jsonl", "path": str(file), **({"verifier": verifier} if verifier else {})}
    whole = load_tasks(TasksSpec.model_validate({**spec, "evaluation_problems": 0}))
    assert len({problem.problem_id for problem in whole.train}) == len(whole.train) == len(rows)
    assert whole.notes == ("1 rows that say what another says are left out",)

    parted = load_tasks(TasksSpec.model_validate({**spec, "evaluation_problems": 2}))
    assert (len(parted.train), len(parted.evaluation)) == (len(rows) - 2, 2)
    report = check_file(file, "jsonl")
    assert (report["problems"], report["duplicates"]) == (len(rows), 1)


def test_rows_that_differ_in_nothing_that_the_verifier_is_told_are_one_problem_and_counted(tmp_path: Path) -> None:
    file = written(tmp_path, *({**ONE, "answer": {"expected": [word]}} for word in "abc"))
    spec = {"kind": "jsonl", "path": str(file), "evaluation_problems": 0}
    expression = {"kind": "composition", "parts": [{"name": "a", "verifier": {"kind": "format", "expression": "x"}}]}
    tasks = load_tasks(TasksSpec.model_validate({**spec, "verifier": expression}))

    assert len(tasks.train) == 1
    assert tasks.notes == ("2 problems that differ from another in nothing that the verifier is told are left out",)
