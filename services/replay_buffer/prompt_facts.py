"""What the counts that value-estimation stored say of prompts; beta and the policy come from the run's spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spo.algorithm.replay_sampling import value_spread
from spo.spec.job_spec import JobSpec
from spo.spec.prompt_values import qhat_0
from spo.v1.value_pb2 import PromptValue


class PromptFacts(NamedTuple):
    """Qhat_0 in reward units; value_spread is sqrt(p (1 - p)) of the success rate."""

    qhat_0: float
    value_spread: float


def facts_of_prompts(values: Iterable[PromptValue], spec: JobSpec) -> dict[str, PromptFacts]:
    """By prompt id; prompts that are dropped, or have no samples, are left out and never served."""
    derived = ((each, qhat_0(each, spec)) for each in values)
    return {
        each.prompt_id: PromptFacts(found.q, value_spread(each.successes / each.samples))
        for each, found in derived
        if found
    }
