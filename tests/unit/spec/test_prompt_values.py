"""Qhat_0 of prompts whose samples are neither wholly right nor wholly wrong."""

from __future__ import annotations

import pytest

from services.value_estimation.prompt_estimate import count, total
from spo.spec.job_spec import JobSpec, RewardSpec
from spo.spec.reward import qhat_0
from spo.testing.runs import toy_spec
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue


def spec_with(unsolved: str, beta: float = 0.1) -> JobSpec:
    return toy_spec({"model": {"path": "/models/pi0"}, "algorithm": {"beta": beta}, "value": {"unsolved": unsolved}})


def value_of(rewards: list[float], spec: JobSpec) -> float:
    counted = count([Trajectory(reward=reward) for reward in rewards], RewardSpec())
    value = PromptValue(prompt_id="p", samples=counted.samples, successes=counted.successes, rewards=counted.rewards)
    found = qhat_0(value, spec)
    assert found
    return found.q


@pytest.mark.parametrize("unsolved", ["keep", "floor"])
@pytest.mark.parametrize(("earned", "samples"), [(-0.1, 128), (-0.5, 16)])
def test_samples_that_all_earn_the_same_are_worth_what_they_earn(unsolved: str, earned: float, samples: int) -> None:
    """It was -1 by `floor`, which takes prompts without a success for worthless, and -.38 for -.5 by `keep`."""
    assert value_of([earned] * samples, spec_with(unsolved)) == pytest.approx(earned, abs=1e-6)


def test_a_prompt_without_any_reward_is_at_the_worst_by_floor_and_above_it_by_keep() -> None:
    assert value_of([-1.0] * 16, spec_with("floor")) == -1
    assert -1 < value_of([-1.0] * 16, spec_with("keep")) < -0.3


def test_parts_without_rewards_of_their_own_add_up_with_parts_that_have_them() -> None:
    reward = RewardSpec()
    right_and_wrong = count([Trajectory(reward=0.0), Trajectory(reward=-1.0)], reward)
    halves = count([Trajectory(reward=-0.5)] * 2, reward)

    assert not right_and_wrong.rewards
    assert total([right_and_wrong, halves], reward).rewards == (0.0, -1.0, -0.5, -0.5)
