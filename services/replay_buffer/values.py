"""Qhat_0 of prompts, derived from the counts that value-estimation stored; beta comes from the run's spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from spo import redis_keys
from spo.algorithm.monte_carlo import q_from_rewards, q_from_success_rate
from spo.errors import NotReady
from spo.job_spec import JobSpec
from spo.v1.value_pb2 import PromptValue


class PromptValues:
    """Reads values once per run and prompt: they do not change within a run."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._known: dict[tuple[str, str], float] = {}

    def qhat_0(self, run_id: str, spec: JobSpec, prompt_ids: Sequence[str]) -> list[float]:
        """Qhat_0 per prompt, reward units; 0 where the spec estimates no values. Raises NotReady for absent ones."""
        if spec.value is None:
            return [0.0] * len(prompt_ids)
        missing = sorted({prompt_id for prompt_id in prompt_ids if (run_id, prompt_id) not in self._known})
        if missing:
            stored: Any = self.client.hmget(redis_keys.run_values(run_id), missing)
            for prompt_id, payload in zip(missing, stored, strict=True):
                if payload is None:
                    raise NotReady(f"prompt {prompt_id} of run {run_id} has no value yet")
                self._known[run_id, prompt_id] = derive_qhat_0(PromptValue.FromString(payload), spec)
        return [self._known[run_id, prompt_id] for prompt_id in prompt_ids]


def derive_qhat_0(value: PromptValue, spec: JobSpec) -> float:
    """Qhat_0 in reward units; a prompt no sample solved follows the spec's `unsolved` policy.

    keep: at the posterior mean of the success rate, (0 + 1/2) / (N + 1) under the Jeffreys prior, since the plain
    estimate, -1, is the lowest of all values the data allow. floor and drop: -1 (dropped prompts are not fed).
    """
    beta = spec.algorithm.beta
    if value.rewards:
        return q_from_rewards(list(value.rewards), beta)
    if value.successes == 0 and spec.value is not None and spec.value.unsolved == "keep":
        return q_from_success_rate(0.5 / (value.samples + 1), beta)
    return q_from_success_rate(value.successes / value.samples, beta)
