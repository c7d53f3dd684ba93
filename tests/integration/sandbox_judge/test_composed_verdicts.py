"""Compositions at the real judge: a program in a sandbox, a format, penalties; parts that break and are cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.errors import InvalidInput
from spo.spec.job_spec import RewardSpec, TasksSpec
from spo.spec.reward import reward_of
from spo.tasks.problem import Problem
from spo.tasks.records import Record, jsonl_problem
from spo.tasks.verifier import decided_by
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Outcome, Verdict

PROGRAM = {"statement": "Double.", "tests": [{"stdin": "2", "stdout": "4"}, {"stdin": "3", "stdout": "6"}]}
RIGHT = "Here it is.\n```python\nprint(2 * int(input()))\n```"
WRONG = "```python\nprint(4)\n```"
UNFENCED = "print(2 * int(input()))"
PARTS: list[dict[str, Any]] = [
    {"name": "right", "weight": 3, "verifier": {"kind": "program"}},
    {"name": "fenced", "weight": 1, "gate": True, "verifier": {"kind": "format", "expression": "(?s).*```.*```\\s*"}},
    {"name": "short", "weight": 0.5, "length": {"free_characters": 100, "most_characters": 300}},
    {"name": "english", "weight": 0.25, "language": {"script": "latin"}},
]


@pytest.fixture
def scheduler(redis_client: redis.Redis) -> Iterator[JudgeScheduler]:
    scheduler = JudgeScheduler(redis_client, Settings(), choose_tier(Settings()), workers=1)
    yield scheduler
    scheduler.close(5)


def composed(row: dict[str, Any], parts: list[dict[str, Any]], pass_score: float = 1.0) -> Problem:
    verifier = {"kind": "composition", "parts": parts, "pass_score": pass_score}
    spec = TasksSpec.model_validate({"verifier": verifier})
    (problem,) = decided_by([jsonl_problem(Record("a.jsonl, line 1", row))], spec.verifier)
    return problem


def judged(scheduler: JudgeScheduler, problem: Problem, responses: list[str], **options: bool) -> list[Verdict]:
    digest = scheduler.test_sets.upload(problem.tests)
    assert digest == problem.tests_digest
    training = Priority.PRIORITY_TRAINING
    return scheduler.submit(responses, problem.language, digest, training, **options).verdicts(60)


def test_a_programs_part_runs_in_the_sandbox_and_the_others_beside_it(scheduler: JudgeScheduler) -> None:
    problem = composed(PROGRAM, PARTS)
    long = f"{'Да. ' * 50}\n{RIGHT}"

    right, wrong, unfenced, penalised, again = judged(scheduler, problem, [RIGHT, WRONG, UNFENCED, long, RIGHT])

    assert (right.outcome, right.score) == (Outcome.OUTCOME_ACCEPTED, 1.0)
    assert right == again
    assert (wrong.outcome, wrong.score) == (Outcome.OUTCOME_WRONG_ANSWER, 0.25)
    assert wrong.detail.startswith("right: test 2")
    assert [(part.name, part.score) for part in wrong.parts] == [
        *(("right", 0.0), ("fenced", 1.0), ("short", 0.0), ("english", 0.0)),
    ]
    assert (unfenced.score, [part.name for part in unfenced.parts]) == (0.0, ["fenced", "short", "english"])
    assert unfenced.detail.startswith("gate fenced:")
    taken_off = {part.name: part.score for part in penalised.parts}
    assert penalised.score == pytest.approx(1 - taken_off["short"] - taken_off["english"])
    assert 0.5 > taken_off["short"] > 0.25 > taken_off["english"] > 0.1
    assert right.isolation
    assert right.tests_total == 3
    assert [reward_of(verdict, RewardSpec()) for verdict in (right, wrong, unfenced)] == [0.0, -0.75, -1.0]


def test_parts_are_cached_and_details_come_of_all_of_them(scheduler: JudgeScheduler) -> None:
    only_program = composed(PROGRAM, PARTS[:1])
    assert not judged(scheduler, only_program, [RIGHT])[0].cached
    assert judged(scheduler, only_program, [RIGHT])[0].cached
    (detailed,) = judged(scheduler, composed(PROGRAM, PARTS), [WRONG], want_details=True)
    assert len(detailed.tests) == 3


def test_a_part_that_broke_is_an_error_of_the_whole_by_name(scheduler: JudgeScheduler) -> None:
    row = {"statement": "?", "answer": {"expected": ['{"$ref": "#/x"}'], "comparison": "json_schema"}}
    problem = composed(row, [{"name": "json", "verifier": {"kind": "program"}}, PARTS[2]])
    (verdict,) = judged(scheduler, problem, ["1"])
    assert verdict.outcome == Outcome.OUTCOME_INTERNAL_ERROR
    assert verdict.detail.startswith("part json: the schema refers to")
    with pytest.raises(InvalidInput):
        reward_of(verdict, RewardSpec())


def test_a_part_that_no_judge_decides_by_is_refused_at_its_place(scheduler: JudgeScheduler) -> None:
    problem = composed(PROGRAM, PARTS)
    problem.tests.composition.parts[0].verifier.tests[0].ClearField("stdin")
    problem.tests.composition.parts[0].verifier.limits.cpu_seconds = -1
    problem.tests.composition.parts[1].verifier.answer.expected[:] = ["a("]
    with pytest.raises(InvalidInput) as refused:
        scheduler.test_sets.upload(problem.tests)
    assert [fault.pointer for fault in refused.value.violations] == [
        "/composition/parts/0/verifier/limits/cpu_seconds",
        "/composition/parts/1/verifier/answer/expected/*",
    ]


def test_what_nobody_waits_for_is_not_judged(scheduler: JudgeScheduler) -> None:
    problem = composed(PROGRAM, PARTS[:1])
    digest = scheduler.test_sets.upload(problem.tests)
    busy = "```python\nwhile True: pass\n```"
    others = [f"```python\nprint({n})\n```" for n in range(50)]
    batch = scheduler.submit([busy, *others], "python", digest, Priority.PRIORITY_TRAINING)
    batch.cancel()
    assert all(future.cancelled() for future in batch.futures.values())
    assert sum(future.cancelled() for future in batch.parts[0].futures.values()) >= 49
