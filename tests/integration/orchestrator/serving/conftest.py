"""A served orchestrator whose completions come from a double of inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.testing.runs import toy_spec
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

KEY = "the-operators-own-key"


@dataclass
class Counter:
    """Where completions are asked for, and by whom."""

    context: AppContext
    url: str
    job_id: str
    peers: ServiceDoubles

    def ask(self, method: str, path: str, token: str = KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
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
