"""Rows of the store before a judge: what many of them say is asked once, and what cannot be decided is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.orchestrator.scoring import PROGRAMS_PER_CALL, RowJudge
from spo.errors import InvalidInput
from spo.experience.columns import StoredTrajectory
from spo.experience.imports import ProblemIndex
from spo.rpc.pools import JudgePools
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem
from spo.testing.peers import BREAKS, ServiceDoubles
from spo.testing.runs import toy_spec
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

PROBLEMS = load_tasks(TasksSpec(kind="toy", train_problems=3, evaluation_problems=0)).train


def rows(problem: Problem, *texts: str) -> list[StoredTrajectory]:
    prompt = Prompt(prompt_id=problem.problem_id, text=problem.statement)
    return [StoredTrajectory(Trajectory(response_text=text), prompt) for text in texts]


@pytest.fixture
def judge(peers: ServiceDoubles) -> RowJudge:
    return RowJudge(JudgePools(peers.address, peers.address), ProblemIndex(PROBLEMS))


def test_what_many_rows_say_is_judged_once_for_each_problem(judge: RowJudge, peers: ServiceDoubles) -> None:
    first = [row for problem in PROBLEMS for row in rows(problem, "right", "wrong", "right")]
    later = rows(PROBLEMS[0], "wrong", "right 2")

    assert (judge.judge(first), judge.judge(later)) == (9, 2)

    assert peers.judge.programs == 2 * len(PROBLEMS) + 1
    for row in (*first, *later):
        right = row.trajectory.response_text.startswith("right")
        assert (row.trajectory.verdict.outcome == OUTCOME_ACCEPTED) is right
        assert row.trajectory.reward == (0 if right else -1)


def test_many_programs_are_judged_in_several_calls_and_each_has_its_own_verdict(judge: RowJudge) -> None:
    texts = [f"{'right' if number % 3 else 'wrong'} {number}" for number in range(3 * PROGRAMS_PER_CALL + 1)]
    found = rows(PROBLEMS[1], *texts)

    judge.judge(found)

    assert [row.trajectory.reward for row in found] == [0 if number % 3 else -1 for number in range(len(texts))]


def test_a_program_that_the_judge_cannot_decide_on_is_an_error_and_is_asked_again(
    judge: RowJudge, peers: ServiceDoubles
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidInput, match="the verifier failed"):
            judge.judge(rows(PROBLEMS[0], BREAKS))
    assert peers.judge.programs == 2


def test_the_job_of_the_page_on_repairing_rewards_is_valid_and_asks_for_no_rollouts() -> None:
    page = (Path(__file__).parents[4] / "docs" / "experience.md").read_text()
    block = page.partition("### Repairing hacked rewards")[2].partition("```yaml")[2].partition("```")[0]

    spec = toy_spec({"model": {"path": "/models/pi0"}, "tasks": {"kind": "toy"}, **yaml.safe_load(block)})

    assert spec.replay.online_share == 0
    assert spec.offline.experience[0].run == "repaired"
