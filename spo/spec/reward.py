"""What a verdict is worth in a run: the one place where judging becomes a number."""

from __future__ import annotations

from spo.errors import InvalidInput
from spo.spec.tasks import RewardSpec
from spo.v1.verdict_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_INTERNAL_ERROR,
    OUTCOME_SECURITY_VIOLATION,
    OUTCOME_UNSPECIFIED,
    Verdict,
)

# Rewards travel as decimal text and float32 in places.
_ROUNDING = 1e-6
_DEFAULT = RewardSpec()
_ACCEPTED = "accepted"


def reward_of(verdict: Verdict, reward: RewardSpec) -> float:
    """scale * score + shift, at most 0; by default 0 for an accepted program and -1 for any other.

    Raises InvalidInput on a verdict that decides nothing: none, or a judge that broke.
    """
    if verdict.outcome in (OUTCOME_UNSPECIFIED, OUTCOME_INTERNAL_ERROR):
        raise InvalidInput("only a verdict on the program earns a reward", code="no_verdict")
    return min(0.0, reward.scale * _score(verdict, reward) + reward.shift)


def is_success(reward: float | None, spec: RewardSpec = _DEFAULT, *, outcome: str | None = None) -> bool:
    """Whether a judged program solved its problem: `success`, `right` and `correct` mean this everywhere.

    Without an outcome the reward decides: it is a success when it is the best that `spec` gives, not merely above the
    worst; None is no success. `spec` is that of the run which gave the reward; the default is that of rewards that
    people import, where a right program earns 0. Where trajectories of several runs meet, their rewards have
    different scales: pass the verdict's `outcome`, as stored experience spells it, which then decides unless empty.
    """
    if outcome:
        return outcome == _ACCEPTED
    return reward is not None and reward >= spec.best - _ROUNDING * spec.scale


def needs_all_tests(reward: RewardSpec) -> bool:
    """Whether the judge must go on after the first failed test."""
    return reward.score == "share_of_tests"


def _score(verdict: Verdict, reward: RewardSpec) -> float:
    """Between 0 and 1. A program that tried to break out earns nothing, whatever it printed before."""
    if verdict.outcome == OUTCOME_ACCEPTED:
        return 1.0
    if reward.score == "all_tests" or verdict.outcome == OUTCOME_SECURITY_VIOLATION or not verdict.tests_total:
        return 0.0
    return verdict.tests_passed / verdict.tests_total
