"""From the counts of a prompt, as services exchange them, to Qhat_0: the one place that knows a job's policy.

No torch: the replay buffer, the orchestrator and value-estimation derive values here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spo.algorithm.monte_carlo import SoftValueEstimate, q_from_rewards
from spo.algorithm.value_posterior import BetaPrior, Evidence, soft_value_estimate, unsolved_posterior
from spo.spec.algorithm import AlgorithmSpec
from spo.spec.job_spec import JobSpec
from spo.v1.value_pb2 import PromptValue


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
