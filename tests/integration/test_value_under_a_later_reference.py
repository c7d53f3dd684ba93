"""Qhat_0 under a published weight version: sampled from that version, kept apart from the values under pi0."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from services.value_estimation.peers import Peers
from services.value_estimation.reference import References
from services.value_estimation.settings import Settings
from services.value_estimation.value_worker import ValueWorker
from spo import redis_keys
from spo.job_spec import parse_job_spec, spec_to_json
from spo.policy_model import load_tokenizer
from spo.rpc import Client, RpcServer
from spo.testing_value import Engine, Judge
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import Prompt, Sampling
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_pb2 import EstimateRequest, PromptValue

RUN = "job_TEST"
PROMPT = Prompt(prompt_id="p" * 64, text="sum", tests_digest="t", language="python", response_format="raw")


@dataclass
class Stage:
    """A value worker with a double of the engine, which remembers what it was asked."""

    client: redis.Redis
    worker: ValueWorker
    engine: Engine

    def estimate(self, version: int, digest: str) -> PromptValue:
        sampling = Sampling(samples=20, temperature_min=1, temperature_max=1, top_p=1, max_tokens=44, seed=5)
        request = EstimateRequest(
            run_id=RUN, prompt=PROMPT, sampling=sampling, reference_version=version, reference_hash=digest
        )
        assert self.worker.estimate(request)
        stored: Any = self.client.hget(redis_keys.run_values_under(RUN, version), PROMPT.prompt_id)
        return PromptValue.FromString(stored)


@pytest.fixture
def stage(redis_client: redis.Redis, tiny_model_path: Path) -> Iterator[Stage]:
    spec = parse_job_spec({"model": {"path": str(tiny_model_path)}})
    redis_client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
    redis_client.set(redis_keys.run_state(RUN), "running")
    engine = Engine(load_tokenizer(tiny_model_path))
    server = RpcServer("127.0.0.1", 0)
    add_InferenceServiceServicer_to_server(engine, server.server)
    add_JudgeServiceServicer_to_server(Judge(), server.server)  # type: ignore[abstract]
    server.start()
    settings = Settings(chunk_samples=8, patience_seconds=20)
    inference = Client("inference", server.address, InferenceServiceStub)
    judge = Client("sandbox-judge", server.address, JudgeServiceStub)
    replay = Client("replay-buffer", "127.0.0.1:1", ReplayServiceStub)
    peers = Peers(inference, judge, replay, settings, threading.Event())
    references = References(redis_client, 4096, "cpu")
    yield Stage(redis_client, ValueWorker(redis_client, references, peers, settings, "worker"), engine)
    for client in (inference, judge, replay):
        client.close()
    server.stop(1)


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
