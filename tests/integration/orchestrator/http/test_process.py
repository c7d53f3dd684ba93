"""The orchestrator as a process: it starts, dies at any moment, comes back, and stops when told."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.rpc.client import RpcClient
from spo.spec.section import JobState
from spo.testing.peers import RIGHT, Collector, ServiceDoubles, wait_until
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.prompt_pb2 import PromptGroup
from tests.support.orchestrator_process import START_SECONDS, OrchestratorProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def orchestrator(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, tmp_path: Path
) -> Iterator[OrchestratorProcess]:
    running = OrchestratorProcess(redis_server, peers, tmp_path)
    yield running
    running.kill()


def test_a_killed_orchestrator_comes_back_to_its_job_and_its_clients(
    orchestrator: OrchestratorProcess, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    orchestrator.start()
    accepted = httpx.post(f"{orchestrator.url}/v1/jobs", json=document, trust_env=False, timeout=30).json()
    jobs = JobStore(redis_client)
    wait_until(lambda: redis_client.xlen(redis_keys.estimates()) == 6, "the prompts are asked for")
    orchestrator.end(signal.SIGKILL)
    orchestrator.start()
    wait_until(lambda: any(event.kind == "adopted" for event in jobs.events(accepted["id"])), "the job is adopted")

    events = jobs.events(accepted["id"])
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.body["to"] for event in events if event.kind == "state"] == ["queued", "validating", "estimating"]
    assert redis_client.xlen(redis_keys.estimates()) == 6
    assert jobs.state(accepted["id"]) is JobState.ESTIMATING


def test_it_answers_heartbeats_and_registers_itself(orchestrator: OrchestratorProcess) -> None:
    orchestrator.start()
    client = RpcClient("orchestrator", f"127.0.0.1:{orchestrator.grpc_port}", OrchestratorServiceStub)
    client.call("Heartbeat", HeartbeatRequest(replica_id="judge-1", pool="sandbox-judge"), deadline_seconds=5)
    client.close()

    def pools() -> set[str]:
        replicas = httpx.get(f"{orchestrator.url}/v1/replicas", trust_env=False, timeout=10).json()["items"]
        return {replica["pool"] for replica in replicas}

    wait_until(lambda: pools() == {"orchestrator", "sandbox-judge"}, "both are registered")


def test_told_to_stop_it_does_so_even_while_a_peer_hangs(
    orchestrator: OrchestratorProcess, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(group: PromptGroup, index: int) -> str:
        asked.set()
        release.wait(60)
        return RIGHT

    peers.inference.respond = hang
    orchestrator.start()
    httpx.post(f"{orchestrator.url}/v1/jobs", json=document, trust_env=False, timeout=30).raise_for_status()
    assert asked.wait(30), "the evaluation never asked for samples"
    status = orchestrator.end(signal.SIGTERM)
    release.set()

    assert status == 0, orchestrator.log.read_text()
    assert "workers still busy" not in orchestrator.log.read_text()


def test_without_redis_it_says_where_it_looked_and_ends(orchestrator: OrchestratorProcess) -> None:
    orchestrator.environment["SPO_REDIS_URL"] = "redis://127.0.0.1:1/0"

    status = orchestrator.launch().wait(START_SECONDS)

    assert status != 0
    assert "Redis at 127.0.0.1:1/0 did not answer within 1 s" in orchestrator.log.read_text()


# --- secrets ---

CANARY = "canary5ecret"


def filled(schema: Any, components: Any, name: str = "", depth: int = 0) -> Any:
    """A body whose every text is a canary, as deep as its description goes."""
    schema = components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    schema = next((each for each in schema.get("anyOf", []) if each.get("type") != "null"), schema)
    if depth > 5 or "$ref" in schema:
        return filled(schema, components, name, depth + 1) if depth < 5 else {}
    if "properties" in schema:
        return {key: filled(each, components, key, depth + 1) for key, each in schema["properties"].items()}
    match schema.get("type"):
        case "array":
            return [filled(schema.get("items", {}), components, name, depth + 1)]
        case "integer" | "number":
            return 1
        case "boolean":
            return True
        case "object":
            return {f"{CANARY}-key": f"{CANARY}-value"}
        case _:
            return f"{CANARY}-{name}"


def send_canaries(api: httpx.Client, accepted: dict[str, Any]) -> int:
    """Every operation with canaries in headers, queries and bodies; the number of requests."""
    described = api.get("/openapi.json").json()
    components = described["components"]["schemas"]
    sent = 0
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            place = path.replace("{job_id}", accepted["id"]).replace("{", "").replace("}", "")
            query = {each["name"]: CANARY for each in operation.get("parameters", []) if each["in"] == "query"}
            kinds = operation.get("requestBody", {}).get("content", {})
            for kind in kinds or [""]:
                body = json.dumps(filled(kinds[kind]["schema"], components)).encode() if kind else None
                for headers in ({"Idempotency-Key": CANARY}, {"Authorization": f"Bearer {CANARY}"}):
                    for asked in ({}, query):
                        kind_header = {"Content-Type": kind, "Last-Event-ID": CANARY, "Cookie": f"session={CANARY}"}
                        api.request(method, place, params=asked, content=body, headers={**kind_header, **headers})
                        sent += 1
    return sent


def test_canary_secrets_of_requests_appear_in_no_log_metric_event_or_trace(
    orchestrator: OrchestratorProcess, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    key = f"{CANARY}-operator-key"
    document |= {"name": f"{CANARY} name", "labels": {CANARY: f"{CANARY}-label"}}
    with Collector() as collector:
        orchestrator.environment |= {
            "SPO_ORCHESTRATOR_API_KEY": key,
            "SPO_TRACES_ENDPOINT": collector.endpoint,
            "SPO_ORCHESTRATOR_RATE_LIMIT": "1000000/minute",
            "SPO_LOG_LEVEL": "debug",
        }
        orchestrator.start()
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=orchestrator.url, headers=headers, trust_env=False, timeout=60) as api:
            accepted = api.post("/v1/jobs", json=document, headers={"Idempotency-Key": CANARY}).json()
            sent = send_canaries(api, accepted)
            wait_until(
                lambda: JobStore(redis_client).state(accepted["id"]) is not JobState.QUEUED, "the job is taken up"
            )
            told = {
                "metrics": api.get("/metrics").text,
                "audit": api.get("/v1/audit?limit=1000").text,
                "events": api.get(f"/v1/jobs/{accepted['id']}/events").text,
                "logs": api.get(f"/v1/jobs/{accepted['id']}/logs?level=debug").text,
            }
        orchestrator.end(signal.SIGTERM)
        told["traces"] = repr(collector.bodies)
    told["process log"] = orchestrator.log.read_text()

    assert sent > 100
    assert told["process log"]
    assert {
        place: text[max(0, text.find(CANARY) - 200) :][:400] for place, text in told.items() if CANARY in text
    } == {}
