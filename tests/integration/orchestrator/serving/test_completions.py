"""OpenAI's paths at the REST door: answers, errors in their form, scopes, tenants, quotas, and callers that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from spo.testing.peers import wait_until
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.integration.orchestrator.serving.conftest import KEY, Counter


def error(response: httpx.Response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/json"
    told = response.json()["error"]
    return response.status_code, told["type"], told["code"]


def test_a_completion_is_whole_or_in_events(counter: Counter) -> None:
    whole = counter.chat("hello", n=2).json()
    streamed = counter.chat("hello", stream=True)

    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one two three"] * 2
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert whole["system_fingerprint"] == f"{counter.job_id}@0"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_errors_are_openais_on_its_paths_and_problems_elsewhere(counter: Counter) -> None:
    assert error(counter.chat("x", token="wrong")) == (401, "authentication_error", "invalid_api_key")
    assert error(counter.chat("x", model="nobody")) == (404, "not_found_error", "model_not_found")
    assert error(counter.chat("x", temperature=3))[:2] == (400, "invalid_request_error")
    assert counter.chat("x", tools=[]).json()["error"]["param"] == "tools"
    assert error(counter.ask("POST", "/v1/chat/completions", content=b"{"))[:2] == (400, "invalid_request_error")
    assert error(counter.chat("x", stop=["a"] * 5))[0] == 400
    assert counter.ask("GET", "/v1/nothing").headers["content-type"] == "application/problem+json"


def test_only_a_key_for_it_may_ask_and_only_of_its_own_tenants_jobs(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(tenant="red")
    red, blue = counter.key("red", "models:query"), counter.key("blue", "models:query")

    assert counter.chat("x", red).status_code == 200
    assert error(counter.chat("x", blue)) == (404, "not_found_error", "model_not_found")
    assert error(counter.chat("x", counter.key("red", "jobs:read"))) == (403, "permission_error", "forbidden")
    assert [each["id"] for each in counter.ask("GET", "/v1/models", red).json()["data"]] == [counter.job_id]
    assert counter.ask("GET", "/v1/models", blue).json()["data"] == []


def test_more_at_once_than_a_tenant_may_have_is_refused(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_streams_per_tenant=2)
    double = counter.peers.inference
    double.goes_on = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(counter.chat, "x") for _ in range(2)]
        wait_until(lambda: double.serving == 2, "both are sampled")
        refused = counter.chat("x")
        double.goes_on.set()
        assert [each.result().status_code for each in waiting] == [200, 200]

    assert error(refused) == (429, "rate_limit_error", "rate_limited")
    assert counter.chat("x").status_code == 200


def test_the_tokens_of_a_minute_are_counted(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_tokens_per_minute=6)

    found = [counter.chat("x").status_code for _ in range(3)]

    assert found[0] == 200
    assert found[-1] == 429


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_leaves_ends_its_sampling(counter: Counter, *, stream: bool) -> None:
    double = counter.peers.inference
    double.goes_on = threading.Event()
    body = {"model": counter.job_id, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=counter.url, headers=key, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.5))
    wait_until(lambda: double.serving == 0, "nothing is sampled any more", 30)


def test_a_caller_that_leaves_before_the_first_part_frees_its_place(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_streams_per_tenant=1)
    released = threading.Event()
    counter.peers.inference.says = lambda _: "late" if released.wait(60) else ""
    body = {"model": counter.job_id, "messages": [{"role": "user", "content": "x"}], "stream": True}
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=counter.url, headers=key, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.5))

    counter.peers.inference.says = lambda _: "soon"
    wait_until(lambda: counter.chat("x").status_code == 200, "its place is free", 20)
    released.set()


def test_a_request_wakes_a_pool_that_was_scaled_to_zero_and_is_answered_once_it_is_up(
    open_counter: Callable[..., Counter],
) -> None:
    counter = open_counter(serving_wait_seconds=60)
    context = counter.context
    leaving = HeartbeatRequest(replica_id="inference-1", pool="inference", address=counter.peers.address, draining=True)
    context.replicas.beat(leaving)
    assert context.autoscaling.observe(0.0)["inference"] == 0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(counter.chat, "x")
        wait_until(lambda: context.autoscaling.observe(time.monotonic())["inference"] == 1, "a replica is wanted")
        assert not asked.done()
        # What KEDA starts joins, is told what to serve, and serves it.
        joining = HeartbeatRequest(replica_id="inference-2", pool="inference", address=counter.peers.address)
        context.replicas.beat(joining)
        assert context.assigner.run_of("inference-2") == counter.job_id
        joining.run_id = counter.job_id
        context.replicas.beat(joining)
        assert asked.result().status_code == 200


def test_a_request_whose_pool_stays_at_zero_is_told_what_it_waited_for(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter()
    leaving = HeartbeatRequest(replica_id="inference-1", pool="inference", address=counter.peers.address, draining=True)
    counter.context.replicas.beat(leaving)

    refused = counter.chat("x")

    assert error(refused) == (503, "server_error", "policy_not_served")
    assert refused.headers["retry-after"] == "10"
    assert "after 2 s: no inference replica is running yet" in refused.json()["error"]["message"]


def test_replicas_that_stay_for_a_name_are_an_administrators_to_give(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(tenant="red")
    red = counter.key("red", "weights:push")
    body = {"job_id": counter.job_id, "min_replicas": 1}

    refused = counter.ask("PUT", "/v1/served-models/assistant", red, json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert counter.ask("PUT", "/v1/served-models/assistant", red, json=body | {"min_replicas": 0}).status_code == 200
    too_many = counter.ask("PUT", "/v1/served-models/assistant", json=body | {"min_replicas": 9})
    assert too_many.json()["errors"][0]["pointer"] == "/min_replicas"
    assert counter.ask("PUT", "/v1/served-models/mine", json=body).json()["min_replicas"] == 1


def test_a_policy_that_no_replica_serves_is_named(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter()
    other = counter.context.jobs.submit(counter.context.jobs.spec(counter.job_id).model_copy(update={"name": "b"}))
    # Of the same model: the replica that serves the first serves it too.
    assert counter.chat("x", model=other).status_code == 200
    away = counter.context.jobs.spec(counter.job_id)
    elsewhere = away.model_copy(update={"model": away.model.model_copy(update={"path": "/models/other"})})
    refused = counter.chat("x", model=counter.context.jobs.submit(elsewhere))
    assert error(refused) == (503, "server_error", "policy_not_served")
    assert refused.headers["retry-after"] == "10"
    assert f"the replicas serve {counter.job_id}" in refused.json()["error"]["message"]
    theirs = counter.context.jobs.submit(elsewhere, tenant="blue")
    told = counter.chat("x", counter.key("blue", "models:query"), model=theirs).json()["error"]["message"]
    assert "the replicas serve other jobs" in told
    assert counter.job_id not in told, "another tenant's job is not named"
