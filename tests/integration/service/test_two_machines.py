"""docs/two_machines.md with two loopback addresses in place of machines: roles find the orchestrator by a token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from spo.rpc.client import is_healthy
from spo.testing.waiting import wait_until
from tests.conftest import free_port

LIMIT_SECONDS = 90.0
HEAD, OTHER = "127.0.0.1", "127.0.0.2"
KEY = "of-the-api"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def head_port() -> int:
    return free_port()


@pytest.fixture
def start(redis_server: str, redis_client: redis.Redis, tmp_path: Path, head_port: int) -> Iterator[Start]:
    shared = {
        "SPO_REDIS_URL": redis_server,
        "SPO_RPC_TOKEN": "of-both-machines",
        "SPO_STATE_PATH": str(tmp_path),
        "SPO_ORCHESTRATOR_ADDRESS": f"{HEAD}:{head_port}",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start_role(service: str, host: str, port: int, **extra: str) -> subprocess.Popen[bytes]:
        own = {f"SPO_{service.upper()}_HOST": host, f"SPO_{service.upper()}_PORT": str(port)}
        environment = {**os.environ, **shared, **own, **extra}
        processes.append(subprocess.Popen([sys.executable, "-m", f"services.{service}"], env=environment))
        return processes[-1]

    yield start_role
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(60)


def test_a_role_on_another_machine_is_found_and_one_with_another_token_is_not(start: Start, head_port: int) -> None:
    http_port, good, bad = free_port(), free_port(), free_port()
    start(
        "orchestrator",
        HEAD,
        head_port,
        SPO_ORCHESTRATOR_HTTP_PORT=str(http_port),
        SPO_ORCHESTRATOR_API_KEY=KEY,
    )
    # First the one with another token: when the other is there, this one has had the time to be.
    start("verifier", OTHER, bad, SPO_RPC_TOKEN="of-somebody-else")
    headers = {"Authorization": f"Bearer {KEY}"}

    def pools() -> dict[str, str]:
        try:
            answer = httpx.get(f"http://{HEAD}:{http_port}/v1/replicas", headers=headers, timeout=10).raise_for_status()
        except httpx.HTTPError:
            return {}
        return {each["pool"]: each["address"] for each in answer.json()["items"]}

    wait_until(lambda: is_healthy(f"{OTHER}:{bad}"), "the role with another token serves", LIMIT_SECONDS)
    start("replay_buffer", OTHER, good)
    wait_until(lambda: "replay-buffer" in pools(), "the role on the other machine is known", LIMIT_SECONDS)

    assert pools() == {"orchestrator": f"{HEAD}:{head_port}", "replay-buffer": f"{OTHER}:{good}"}
