"""What the counts that value-estimation stored say of prompts; beta comes from the run's spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spo.algorithm.monte_carlo import q_from_rewards, q_from_success_rate
from spo.algorithm.replay_sampling import value_spread
from spo.job_spec import AlgorithmSpec, ValueSpec
from spo.v1.value_pb2 import PromptValue


class PromptFacts(NamedTuple):
    """Qhat_0 in reward units; value_spread is sqrt(p (1 - p)) of the success rate."""

    qhat_0: float
    value_spread: float


def facts_of_prompts(
    values: Iterable[PromptValue], algorithm: AlgorithmSpec, policy: ValueSpec
) -> dict[str, PromptFacts]:
    """By prompt id; prompts that are dropped, or have no samples, are left out.

    A prompt that no sample solved follows policy.unsolved. keep: at the posterior mean of the success rate,
    (0 + 1/2) / (N + 1) under the Jeffreys prior, since the plain estimate, -1, is the lowest of all values the data
    allow. floor: -1. drop: not served from any source.
    """
    served = (each for each in values if each.samples and not (policy.unsolved == "drop" and _unsolved(each)))
    return {
        each.prompt_id: PromptFacts(_qhat_0(each, algorithm.beta, policy), value_spread(each.successes / each.samples))
        for each in served
    }


def _qhat_0(value: PromptValue, beta: float, policy: ValueSpec) -> float:
    if value.rewards:
        return q_from_rewards(list(value.rewards), beta)
    if policy.unsolved == "keep" and _unsolved(value):
        return q_from_success_rate(0.5 / (value.samples + 1), beta)
    return q_from_success_rate(value.successes / value.samples, beta)


def _unsolved(value: PromptValue) -> bool:
    return value.successes == 0 and not any(reward >= 0 for reward in value.rewards)
