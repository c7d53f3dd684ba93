"""What a verdict is worth in a run, and what the counts of a prompt say of Qhat_0: the one place where judging
becomes numbers.

From the counts of a prompt, as services exchange them, to Qhat_0: the one place that knows a job's policy.
No torch: the replay buffer, the orchestrator and value-estimation derive values here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spo.algorithm.values import (
    BetaPrior,
    Evidence,
    SoftValueEstimate,
    q_from_rewards,
    soft_value_estimate,
    unsolved_posterior,
)
from spo.errors import InvalidInput
from spo.spec.section import AlgorithmSpec
from spo.spec.tasks import RewardSpec
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_INTERNAL_ERROR,
    OUTCOME_SECURITY_VIOLATION,
    OUTCOME_UNSPECIFIED,
    Verdict,
)

if TYPE_CHECKING:
    from spo.spec.job_spec import JobSpec

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


def evidence_of(value: PromptValue, spec: JobSpec) -> Evidence:
    """The samples behind a value, with the prior it was estimated under."""
    reward = spec.tasks.reward
    has_prior = value.prior_successes > 0 or value.prior_failures > 0
    return Evidence(
        value.samples,
        value.successes,
        tuple(value.rewards),
        BetaPrior(value.prior_successes, value.prior_failures) if has_prior else None,
        best=reward.best,
        worst=reward.shift,
    )


def qhat_0(value: PromptValue, spec: JobSpec, beta: float | None = None) -> SoftValueEstimate | None:
    """Qhat_0 with its interval, reward units; None for a prompt without samples, or one that is dropped.

    A prompt that no sample solved follows value.unsolved. keep, retry_hotter: at the posterior mean under Jeffreys'
    prior, since the plain estimate is the lowest of all values that the data allow. floor: the paper's formula, so the
    worst reward where all samples earned it. drop: none. While more samples are on their way, floor is as keep: the
    floor of a few samples would be far too low for most prompts.
    `beta` in place of the job's temperature of values re-derives Q without new samples.
    """
    if not value.samples or spec.value is None:
        return None
    evidence = evidence_of(value, spec)
    if not evidence.solved and spec.value.unsolved == "drop":
        return None
    used = spec.algorithm.temperature_of_values if beta is None else beta
    found = soft_value_estimate(unsolved_posterior(evidence), used)
    if not evidence.solved and spec.value.unsolved == "floor" and not value.provisional:
        # Partly right samples are worth more than the worst reward; the paper's formula says how much.
        q = q_from_rewards(evidence.rewards, used) if evidence.rewards else evidence.worst
        return replace(found, q=q)
    return found


def qhat_0_of_group(rewards: Sequence[float], algorithm: AlgorithmSpec) -> float:
    """beta ln mean exp(r / beta) of a group's rewards, reward units: Qhat_0 under the policy that sampled them.

    The paper's formula, whose exponential is unbiased. A sample counts in its own group's value, as in OAPL
    (arXiv 2602.19362).
    """
    return q_from_rewards(rewards, algorithm.temperature_of_values)
