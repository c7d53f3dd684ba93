"""What a verdict is worth in a run: the one place where judging becomes a number."""

from __future__ import annotations

from collections.abc import Iterable

from spo.errors import InvalidInput
from spo.spec.tasks import RewardSpec
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_INTERNAL_ERROR,
    OUTCOME_SECURITY_VIOLATION,
    OUTCOME_UNSPECIFIED,
    Verdict,
)

# Rewards travel as decimal text and float32 in places.
_ROUNDING = 1e-6
# Means and sums of float64 lie so far out by rounding alone: .7 + .2 + .1 of weights that sum to 1 may be 1 + 2e-16.
_SCORE_ROUNDING = 1e-9
_DEFAULT = RewardSpec()
_ACCEPTED = "accepted"


def reward_of(verdict: Verdict, reward: RewardSpec) -> float:
    """scale * score + shift, at most 0; by default 0 for an accepted program and -1 for any other.

    The score is the verdict's own where it has one. Raises InvalidInput on a verdict that decides nothing: none, a
    judge or verifier that broke, or a score that is not between 0 and 1.
    """
    require_decided([verdict])
    if verdict.outcome in (OUTCOME_UNSPECIFIED, OUTCOME_INTERNAL_ERROR):
        raise InvalidInput("only a verdict on the program earns a reward", code="no_verdict")
    return min(0.0, reward.scale * _score(verdict, reward) + reward.shift)


def require_decided(verdicts: Iterable[Verdict]) -> None:
    """Raises InvalidInput (code "verifier_failed") where what people wrote to decide by has failed.

    The judge has tried it again: tomorrow it fails too. What failed of the judge itself has no reason here.
    """
    broken = next((each for each in verdicts if each.outcome == OUTCOME_INTERNAL_ERROR and each.detail), None)
    if broken:
        raise InvalidInput(f"the verifier failed: {broken.detail}", code="verifier_failed")


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


def has_succeeded(trajectory: Trajectory, spec: RewardSpec) -> bool:
    """Whether a trajectory solved its problem: its verdict decides, or its reward where it was rewarded without one."""
    outcome = trajectory.verdict.outcome
    return outcome == OUTCOME_ACCEPTED if outcome != OUTCOME_UNSPECIFIED else is_success(trajectory.reward, spec)


def reaches(score: float, pass_score: float) -> bool:
    """Whether a verifier's score makes a response right; a pass_score of 0 stands for 1."""
    return score >= (pass_score or 1.0) - _ROUNDING


def score_in_range(score: float) -> float | None:
    """The score, between 0 and 1 also where rounding has taken it out of there; None where it lies beyond that."""
    # False for NaN as well.
    if not -_SCORE_ROUNDING <= score <= 1 + _SCORE_ROUNDING:
        return None
    return min(1.0, max(0.0, float(score)))


def needs_all_tests(reward: RewardSpec) -> bool:
    """Whether the judge must go on after the first failed test."""
    return reward.score == "share_of_tests"


def _score(verdict: Verdict, reward: RewardSpec) -> float:
    """Between 0 and 1. What tried to break out earns nothing, whatever it printed before."""
    score = score_in_range(verdict.score) if verdict.HasField("score") else None
    if verdict.HasField("score") and score is None:
        raise InvalidInput(f"a score of {verdict.score:g} is not between 0 and 1", code="no_verdict")
    if verdict.outcome == OUTCOME_SECURITY_VIOLATION:
        return 0.0
    if score is not None:
        return score
    if verdict.outcome == OUTCOME_ACCEPTED:
        return 1.0
    if reward.score == "all_tests" or not verdict.tests_total:
        return 0.0
    return verdict.tests_passed / verdict.tests_total
