"""The real demo's problems: every sum once, right, and the recipe that reads them is valid."""

from __future__ import annotations

from pathlib import Path

from spo.demo.addition import REAL_RECIPE, write_addition_tasks
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import read_spec
from spo.tasks.answer import fault_of
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem


def terms(problem: Problem) -> frozenset[int]:
    first, _, second, _ = problem.statement.splitlines()[-1].split()
    return frozenset((int(first), int(second)))


def test_held_out_sums_are_not_trained_on_not_even_with_their_terms_swapped(tmp_path: Path) -> None:
    file = tmp_path / "addition.jsonl"
    write_addition_tasks(file)
    document = read_spec(REAL_RECIPE)
    document["tasks"]["path"] = str(file)
    document["model"]["path"] = str(tmp_path)

    tasks = load_tasks(parse_job_spec(document).tasks)

    assert (len(tasks.train), len(tasks.evaluation)) == (96, 64)
    assert len({terms(problem) for problem in (*tasks.train, *tasks.evaluation)}) == 96 + 64
    for problem in tasks.train:
        right = sum(terms(problem)) * (1 if len(terms(problem)) == 2 else 2)
        assert fault_of(problem.tests.answer, f" {right}") is None
        assert fault_of(problem.tests.answer, f" {right + 1}") is not None
