"""The orchestrator as a process: it starts, dies at any moment, comes back, and stops when told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator.jobs import JobStore
from services.orchestrator.states import JobState
from spo import redis_keys
from spo.rpc import Client
from spo.testing_peers import RIGHT, Peers
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.prompt_pb2 import PromptGroup

pytestmark = pytest.mark.slow

Until = Callable[[Callable[[], Any], str], Any]
START_SECONDS = 60


class Orchestrator:
    """A real process that can be started again on the same ports."""

    def __init__(self, redis_url: str, peers: Peers, folder: Path) -> None:
        self.http_port, self.grpc_port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.log = folder / "orchestrator.log"
        self.environment = os.environ | {
            "SPO_REDIS_URL": redis_url,
            "SPO_REDIS_WAIT_SECONDS": "1",
            "SPO_STATE_PATH": str(folder / "state"),
            "SPO_ORCHESTRATOR_PORT": str(self.grpc_port),
            "SPO_ORCHESTRATOR_HTTP_PORT": str(self.http_port),
            "SPO_ORCHESTRATOR_ADDRESS": f"127.0.0.1:{self.grpc_port}",
            "SPO_INFERENCE_ADDRESS": peers.address,
            "SPO_SANDBOX_JUDGE_ADDRESS": peers.address,
            "SPO_REPLAY_BUFFER_ADDRESS": peers.address,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "services.orchestrator"]
            self.process = subprocess.Popen(command, env=self.environment, stderr=log)
        return self.process

    def start(self, until: Callable[..., Any]) -> None:
        process = self.launch()

        def ready() -> bool:
            assert process.poll() is None, self.log.read_text()
            try:
                return httpx.get(f"{self.url}/readyz", trust_env=False, timeout=2).is_success
            except httpx.TransportError:
                return False

        until(ready, "the orchestrator is ready", START_SECONDS)

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def orchestrator(redis_server: str, redis_client: redis.Redis, peers: Peers, tmp_path: Path) -> Iterator[Orchestrator]:
    running = Orchestrator(redis_server, peers, tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        running.process.kill()
        running.process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_killed_orchestrator_comes_back_to_its_job_and_its_clients(
    orchestrator: Orchestrator, redis_client: redis.Redis, document: dict[str, Any], until: Until
) -> None:
    orchestrator.start(until)
    accepted = httpx.post(f"{orchestrator.url}/v1/jobs", json=document, trust_env=False, timeout=30).json()
    jobs = JobStore(redis_client)
    until(lambda: redis_client.xlen(redis_keys.estimates()) == 6, "the prompts are asked for")
    orchestrator.end(signal.SIGKILL)
    orchestrator.start(until)
    until(lambda: any(event.kind == "adopted" for event in jobs.events(accepted["id"])), "the job is adopted")

    events = jobs.events(accepted["id"])
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.body["to"] for event in events if event.kind == "state"] == ["queued", "validating", "estimating"]
    assert redis_client.xlen(redis_keys.estimates()) == 6
    assert jobs.state(accepted["id"]) is JobState.ESTIMATING


def test_it_answers_heartbeats_and_registers_itself(orchestrator: Orchestrator, until: Until) -> None:
    orchestrator.start(until)
    client = Client("orchestrator", f"127.0.0.1:{orchestrator.grpc_port}", OrchestratorServiceStub)
    client.call("Heartbeat", HeartbeatRequest(replica_id="judge-1", pool="sandbox-judge"), deadline_seconds=5)
    client.close()

    def pools() -> set[str]:
        replicas = httpx.get(f"{orchestrator.url}/v1/replicas", trust_env=False, timeout=10).json()["items"]
        return {replica["pool"] for replica in replicas}

    until(lambda: pools() == {"orchestrator", "sandbox-judge"}, "both are registered")


def test_told_to_stop_it_does_so_even_while_a_peer_hangs(
    orchestrator: Orchestrator, peers: Peers, document: dict[str, Any], until: Until
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(group: PromptGroup, index: int) -> str:
        asked.set()
        release.wait(60)
        return RIGHT

    peers.inference.respond = hang
    orchestrator.start(until)
    httpx.post(f"{orchestrator.url}/v1/jobs", json=document, trust_env=False, timeout=30).raise_for_status()
    assert asked.wait(30), "the evaluation never asked for samples"
    status = orchestrator.end(signal.SIGTERM)
    release.set()

    assert status == 0, orchestrator.log.read_text()
    assert "workers still busy" not in orchestrator.log.read_text()


def test_without_redis_it_says_where_it_looked_and_ends(orchestrator: Orchestrator) -> None:
    orchestrator.environment["SPO_REDIS_URL"] = "redis://127.0.0.1:1/0"

    status = orchestrator.launch().wait(START_SECONDS)

    assert status != 0
    assert "Redis at 127.0.0.1:1/0 did not answer within 1 s" in orchestrator.log.read_text()
