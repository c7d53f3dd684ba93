"""Two temperatures: the values follow `value_beta`, the regression follows `beta`."""

from __future__ import annotations

import math

import pytest

from services.trainer.batches import TrainingSample, token_batch
from spo.algorithm.values import q_from_success_rate
from spo.spec.job_spec import JobSpec
from spo.spec.reward import qhat_0
from spo.testing.runs import toy_spec
from spo.v1.trajectory_pb2 import Annotation, Trajectory
from spo.v1.value_pb2 import PromptValue

LOW, HIGH = 0.2, 50.0


def spec_with(**algorithm: float) -> JobSpec:
    return toy_spec({"model": {"path": "/models/pi0"}, "algorithm": algorithm})


def value_under(spec: JobSpec, successes: int = 6) -> float:
    found = qhat_0(PromptValue(prompt_id="p", samples=24, successes=successes), spec)
    assert found
    return found.q


def test_without_it_values_follow_beta() -> None:
    spec = spec_with(beta=LOW)
    assert spec.algorithm.temperature_of_values == LOW
    assert value_under(spec) == pytest.approx(q_from_success_rate(0.25, LOW), abs=1e-9)


def test_a_high_one_takes_values_to_the_mean_reward() -> None:
    spec = spec_with(beta=LOW, value_beta=HIGH)
    assert spec.algorithm.beta == LOW
    assert value_under(spec) == pytest.approx(q_from_success_rate(0.25, HIGH), abs=1e-9)
    assert value_under(spec) == pytest.approx(-0.75, abs=2 / HIGH)
    # At the low one the value of a prompt that is solved now and then is far above its mean reward.
    assert value_under(spec_with(beta=LOW)) > -0.3


def test_a_question_with_another_beta_is_answered_with_it() -> None:
    found = qhat_0(PromptValue(prompt_id="p", samples=24, successes=6), spec_with(value_beta=HIGH), beta=LOW)
    assert found
    assert found.q == pytest.approx(q_from_success_rate(0.25, LOW), abs=1e-9)


def test_values_of_prefixes_follow_it_too() -> None:
    spec = spec_with(beta=LOW, value_beta=HIGH)
    trajectory = Trajectory(prompt_token_ids=[1], response_token_ids=[2, 3], reward=-1.0)
    trajectory.annotations.append(Annotation(position=1, rollouts=4, successes=1))
    row = TrainingSample(trajectory, qhat_0=-0.5, group=0)

    batch = token_batch([row], spec.algorithm.temperature_of_values, spec.tasks.reward)

    assert batch.annotated_q_BL is not None
    assert batch.annotated_q_BL[0, 1].item() == pytest.approx(q_from_success_rate(0.25, HIGH), abs=1e-6)
    assert not math.isclose(q_from_success_rate(0.25, HIGH), q_from_success_rate(0.25, LOW), abs_tol=0.1)
