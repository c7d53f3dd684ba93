"""A served orchestrator whose completions come from a double of inference, and one with a real replica."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.service import OrchestratorService
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.testing.runs import toy_spec
from spo.v1.inference_service_pb2 import DescribeReplicaRequest
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server
from tests.conftest import NO_CERTIFICATES
from tests.support.warm_services import start_warm

KEY = "the-operators-own-key"
# A replica needs about 15 s of CPU to start: on a busy machine that is minutes.
WAIT_SECONDS = 200.0


@dataclass
class Counter:
    """Where completions are asked for, and by whom."""

    context: AppContext
    url: str
    job_id: str
    peers: ServiceDoubles

    def ask(self, method: str, path: str, token: str = KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=NO_CERTIFICATES) as client:
            return client.request(method, path, headers=headers, **options)

    def chat(self, text: str, token: str = KEY, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": self.job_id, "messages": [{"role": "user", "content": text}], **fields}
        return self.ask("POST", "/v1/chat/completions", token, json=body, headers=headers or {})

    def key(self, tenant: str, *scopes: str) -> str:
        body = {"name": f"key of {tenant}", "tenant": tenant, "scopes": list(scopes)}
        token: str = self.ask("POST", "/v1/keys", json=body).json()["token"]
        return token


@pytest.fixture
def open_counter(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], peers: ServiceDoubles
) -> Callable[..., Counter]:
    def build(tenant: str = "", **settings: Any) -> Counter:
        context = open_context(api_key=KEY, **{"serving_wait_seconds": 2, **settings})
        spec = toy_spec({"model": {"path": "/models/pi0"}, "tasks": {"train_problems": 6, "evaluation_problems": 0}})
        job_id = context.jobs.submit(spec, tenant=tenant)
        assert context.jobs.transition(job_id, JobState.CANCELLED, "test")
        context.replicas.beat(
            HeartbeatRequest(replica_id="inference-1", pool="inference", address=peers.address, run_id=job_id)
        )
        return Counter(context, serve(context), job_id, peers)

    return build


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter()


@dataclass
class Serving:
    """A served orchestrator with one replica, and a job on it."""

    context: AppContext
    url: str
    job_id: str

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=WAIT_SECONDS)

    def running_sequences(self) -> int:
        (replica,) = self.context.replicas.live()
        client = RpcClient("inference", replica.address, InferenceServiceStub)
        found: int = client.call("DescribeReplica", DescribeReplicaRequest()).running_sequences
        client.close()
        return found


@pytest.fixture
def serve_model(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], redis_server: str, tmp_path: Path
) -> Callable[[dict[str, Any]], AbstractContextManager[Serving]]:
    """Serves a model, fields of a JobSpec's, by a real replica."""

    @contextmanager
    def build(model: dict[str, Any]) -> Iterator[Serving]:
        context = open_context(api_key=KEY, serving_wait_seconds=WAIT_SECONDS)
        server = RpcServer("127.0.0.1", 0, max_workers=64)
        add_OrchestratorServiceServicer_to_server(OrchestratorService(context), server.server)
        server.start()
        job_id = context.jobs.submit(toy_spec({"model": model}))
        # It has ended: that it is asked for brings a replica to it.
        assert context.jobs.transition(job_id, JobState.CANCELLED, "test")
        settings = {
            "SPO_REDIS_URL": redis_server,
            "SPO_ORCHESTRATOR_ADDRESS": server.address,
            "SPO_STATE_PATH": str(tmp_path),
            "SPO_INFERENCE_KV_CACHE_MEMORY_BYTES": str(64 << 20),
            "OMP_NUM_THREADS": "1",
        }
        replica = start_warm("services.inference", os.environ | settings, tmp_path / "replica.log")
        try:
            yield Serving(context, serve(context), job_id)
        finally:
            replica.kill()
            replica.wait(30)
            server.stop(0)

    return build
