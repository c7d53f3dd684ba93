"""What a verdict earns under each reward of a spec, and that the training tests may be the public ones only."""

from __future__ import annotations

import struct
from typing import get_args

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import RewardSpec, TasksSpec
from spo.spec.reward import is_success, needs_all_tests, reward_of
from spo.tasks.load import load_tasks
from spo.v1.verdict_pb2 import Outcome, Verdict

DECIDED = [
    value
    for name, value in Outcome.items()
    if name not in ("OUTCOME_UNSPECIFIED", "OUTCOME_INTERNAL_ERROR", "OUTCOME_ACCEPTED")
]


def verdict(outcome: Outcome.ValueType, passed: int = 0, total: int = 8) -> Verdict:
    return Verdict(outcome=outcome, tests_passed=passed, tests_total=total)


def test_by_default_an_accepted_program_earns_0_and_any_other_minus_1() -> None:
    assert str(reward_of(verdict(Outcome.OUTCOME_ACCEPTED, 8), RewardSpec())) == "0.0"
    assert [reward_of(verdict(outcome, 7), RewardSpec()) for outcome in DECIDED] == [-1.0] * len(DECIDED)


def test_the_share_of_passed_tests_earns_its_part() -> None:
    spec = RewardSpec(score="share_of_tests", scale=2.0, shift=-2.5)
    wrong = Outcome.OUTCOME_WRONG_ANSWER
    assert [reward_of(verdict(wrong, passed), spec) for passed in (0, 2, 7)] == [-2.5, -2.0, -0.75]
    assert reward_of(verdict(Outcome.OUTCOME_ACCEPTED, 8), spec) == spec.best == -0.5
    assert reward_of(verdict(Outcome.OUTCOME_COMPILE_ERROR, 0, 0), spec) == -2.5
    assert needs_all_tests(spec)
    assert not needs_all_tests(RewardSpec())


def test_a_program_that_tried_to_break_out_earns_nothing_whatever_it_passed() -> None:
    assert reward_of(verdict(Outcome.OUTCOME_SECURITY_VIOLATION, 7), RewardSpec(score="share_of_tests")) == -1.0


@pytest.mark.parametrize("outcome", [Outcome.OUTCOME_UNSPECIFIED, Outcome.OUTCOME_INTERNAL_ERROR])
def test_a_judge_that_broke_earns_no_reward(outcome: Outcome.ValueType) -> None:
    with pytest.raises(InvalidInput) as refused:
        reward_of(verdict(outcome, 8), RewardSpec())
    assert refused.value.code == "no_verdict"


def test_right_means_the_best_reward_of_the_spec() -> None:
    spec = RewardSpec(score="share_of_tests", scale=1.0, shift=-1.5)
    assert is_success(-0.5, spec)
    assert not is_success(-0.625, spec)
    assert is_success(0.0, RewardSpec())
    assert not is_success(-1.0, RewardSpec())
    assert not is_success(None)


def test_an_outcome_decides_over_a_reward_of_another_scale() -> None:
    assert is_success(-0.5, outcome="accepted")
    assert not is_success(0.0, outcome="wrong_answer")
    # Imported without a verdict.
    assert is_success(0.0, outcome=None)
    assert not is_success(-0.25, outcome="")


def test_a_success_survives_float32() -> None:
    spec = RewardSpec(scale=0.3, shift=-0.7)
    (travelled,) = struct.unpack("f", struct.pack("f", spec.best))
    assert travelled < spec.best
    assert is_success(travelled, spec)


@pytest.mark.parametrize("deciding", get_args(RewardSpec.model_fields["tests"].annotation))
def test_the_deciding_tests_of_training_are_those_of_the_spec_and_of_held_out_problems_all(deciding: str) -> None:
    spec = TasksSpec(train_problems=6, evaluation_problems=4, reward=RewardSpec.model_validate({"tests": deciding}))
    tasks = load_tasks(spec)
    whole = load_tasks(TasksSpec(train_problems=6, evaluation_problems=4))
    assert tasks.evaluation == whole.evaluation
    assert [each.statement for each in tasks.train] == [each.statement for each in whole.train]
    for problem, complete in zip(tasks.train, whole.train, strict=True):
        wanted = complete.public_tests if deciding == "public" else complete.tests
        assert problem.tests == wanted
        assert (problem.problem_id == complete.problem_id) == (deciding == "all")
