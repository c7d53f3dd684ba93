"""How well the values of a job's prompts are known so far."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import JobSpec
from spo.spec.prompt_values import qhat_0
from spo.spec.section import SAMPLED_SOURCES
from spo.v1.value_pb2 import PromptValue

REMEMBERED = 64


def prompts_known(client: RedisClient, job_id: str) -> int:
    """Prompts whose value batches may read by now, provisional or final; one that becomes final in between counts."""
    with client.pipeline(transaction=True) as pipe:
        pipe.hlen(redis_keys.run_values(job_id))
        pipe.hlen(redis_keys.provisional_values(job_id))
        final, provisional = pipe.execute()
    return int(final) + int(provisional)


def prompts_before_training(spec: JobSpec, total: int) -> int:
    """Prompts that must have a value before a job trains: as many as a batch holds groups, all, or none."""
    value = spec.value
    if value is None or value.start == "all" or not spec.trainer.steps:
        return total
    if value.pivotal is not None and value.pivotal.when == "before_training":
        return total
    sources = {part.source for part in spec.replay.mix if part.share > 0}
    if not spec.reads_values and sources <= SAMPLED_SOURCES:
        return 0
    # Rounds reach every prompt soon, and rollouts set the pace. Elsewhere training would mostly see the first prompts.
    if value.start is None and (value.sequential is None or not sources & SAMPLED_SOURCES):
        return total
    groups = math.ceil(spec.trainer.batch_size / spec.rollout.samples_per_prompt)
    return min(total, max(groups, math.ceil(value.start_share * total)))


class ValueProgress:
    """Remembers each job's figures by how many values there are: they are only added, and jobs are looked at often."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._known: OrderedDict[str, tuple[int, dict[str, Any]]] = OrderedDict()

    def of(self, job_id: str, spec: JobSpec, done: int) -> dict[str, Any]:
        """values_done, value_samples, and the mean interval width over prompts, reward units (None without any)."""
        known = self._known.get(job_id)
        if known and known[0] == done:
            return known[1]
        found = {"values_done": done, **self._summary(job_id, spec, done)}
        self._known[job_id] = (done, found)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _summary(self, job_id: str, spec: JobSpec, done: int) -> dict[str, Any]:
        stored = self.client.hvals(redis_keys.run_values(job_id)) if done else []
        values = [PromptValue.FromString(payload) for payload in stored]
        widths = [found.high - found.low for found in (qhat_0(value, spec) for value in values) if found]
        return {
            "value_samples": sum(value.samples for value in values),
            "value_interval_width": sum(widths) / len(widths) if widths else None,
        }
