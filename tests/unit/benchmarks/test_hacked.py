"""What the benchmark of repaired rewards plants, and the jobs that learn from it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hacked.jobs import imitating, regressing
from benchmarks.hacked.planted import RUN, prints_a_constant, programs_for, tasks_section, write_tasks
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.tasks.load import load_tasks
from spo.tasks.toy import toy_tasks


def test_a_planted_hack_reads_nothing_and_prints_the_answer_of_the_one_test_that_was_there() -> None:
    problem, other = toy_tasks(2, 0, seed=0).train
    planted = programs_for(problem, other, 20)
    kinds = [kind for kind, _ in planted]

    assert {kind: kinds.count(kind) for kind in kinds} == {"hack": 8, "wrong": 4, "right": 8}
    assert len({program for _, program in planted}) == 20
    for kind, program in planted:
        assert prints_a_constant(program) == (kind == "hack")
    answer = [int(number) for number in problem.tests.tests[0].stdout.split()]
    for kind, program in planted:
        if kind == "hack":
            numbers = program.removeprefix("print(").removesuffix(")").split(",")
            assert [sum(map(int, number.split("+"))) for number in numbers] == answer


def test_both_jobs_are_valid_and_ask_for_no_rollouts(tmp_path: Path) -> None:
    files = write_tasks(tmp_path)
    tasks = tasks_section(files, files.weak)
    for document in (imitating(RUN, tasks), regressing(RUN, tasks)):
        spec = parse_job_spec({**document, "model": {**document["model"], "path": "/models/pi0"}})
        assert [part.source for part in spec.replay.mix] == ["other_run"]
    loaded = load_tasks(TasksSpec.model_validate(tasks))
    assert (len(loaded.train), len(loaded.evaluation)) == (160, 80)
    assert {len(problem.tests.tests) for problem in loaded.train} == {1}
    assert {len(problem.tests.tests) for problem in loaded.evaluation} == {12}
