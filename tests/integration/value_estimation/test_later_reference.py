"""Qhat_0 under a published weight version: sampled from that version, kept apart from the values under pi0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from services.value_estimation.workers import ValueWorker
from spo import redis_keys
from spo.testing.runs import EngineDouble, Surroundings
from spo.v1.prompt_pb2 import Prompt, Sampling
from spo.v1.value_pb2 import EstimateRequest, PromptValue

RUN = "job_TEST"
PROMPT = Prompt(prompt_id="p" * 64, text="sum", tests_digest="t", language="python", response_format="raw")


@dataclass
class Stage:
    """A value worker with a double of the engine, which remembers what it was asked."""

    client: redis.Redis
    worker: ValueWorker
    engine: EngineDouble

    def estimate(self, version: int, digest: str) -> PromptValue:
        sampling = Sampling(samples=20, temperature_min=1, temperature_max=1, top_p=1, max_tokens=44, seed=5)
        request = EstimateRequest(
            run_id=RUN, prompt=PROMPT, sampling=sampling, reference_version=version, reference_hash=digest
        )
        assert self.worker.estimate(request)
        stored: Any = self.client.hget(redis_keys.run_values_under(RUN, version), PROMPT.prompt_id)
        return PromptValue.FromString(stored)


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings]) -> Stage:
    around = surroundings(chunk_samples=8)
    around.start(RUN, "running")
    worker = ValueWorker(around.client, around.references, around.clients, around.settings, "worker")
    return Stage(around.client, worker, around.engine)


def test_the_value_under_a_version_counts_its_samples_and_keeps_none(stage: Stage) -> None:
    value = stage.estimate(3, "digest-of-3")

    assert (value.samples, value.successes) == (20, 2 + 2 + 1)
    assert [(group.policy_version, group.sampling.samples) for group in stage.engine.calls] == [(3, 8), (3, 8), (3, 4)]
    assert len({group.sampling.seed for group in stage.engine.calls}) == 3
    assert not stage.client.exists(redis_keys.run_values(RUN))
    assert not stage.client.exists(redis_keys.replay_ids(RUN))


def test_values_of_different_versions_have_different_keys_and_none_is_estimated_twice(stage: Stage) -> None:
    first, second = stage.estimate(1, "digest-of-1"), stage.estimate(2, "digest-of-2")
    asked = len(stage.engine.calls)

    assert first.value_key != second.value_key
    assert stage.estimate(1, "digest-of-1") == first
    assert len(stage.engine.calls) == asked
