"""docs/two_machines.md with two network namespaces in place of machines: roles find the orchestrator by a token."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from spo.local.launcher import server_command
from tests.support.two_hosts import HEAD, OTHER, Host, two_hosts_or_skip

PAGE = Path(__file__).parents[3] / "docs" / "two_machines.md"
LIMIT_SECONDS = 90
KEY = "of-the-api"
PASSWORD = "of-redis"
# What people do from the other machine: first the role with another token serves, then the other role is known.
LOOK = f"""
import httpx, json
from spo.rpc.client import is_healthy
from spo.testing.peers import wait_until

def pools():
    try:
        answer = httpx.get("http://{HEAD}:8080/v1/replicas", headers={{"Authorization": "Bearer {KEY}"}}, timeout=10)
        return {{each["pool"]: each["address"] for each in answer.raise_for_status().json()["items"]}}
    except httpx.HTTPError:
        return {{}}

wait_until(lambda: is_healthy("{OTHER}:7076"), "the role with another token serves", {LIMIT_SECONDS})
print("serves", flush=True)
wait_until(lambda: "replay-buffer" in pools(), "the role on the other machine is known", {LIMIT_SECONDS})
print(json.dumps(pools()), flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts_or_skip("docs/two_machines.md") as made:
        yield made


@pytest.fixture
def start(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Start]:
    shared = {**of_the_page(), "SPO_STATE_PATH": str(tmp_path)}
    processes: list[subprocess.Popen[str]] = []

    def start_on(host: Host, *command: str, **extra: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **shared, **extra}
        processes.append(subprocess.Popen(host.on(command), env=environment, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_on
    for process in processes:
        process.terminate()
    for process in processes:
        process.communicate(timeout=60)


def of_the_page() -> Mapping[str, str]:
    """The environment that both machines have; the page's addresses are those of the namespaces."""
    lines = re.findall(
        r"^(SPO_\w+)=(\S+)$", PAGE.read_text().partition("/etc/spo/environment")[2].split("```")[1], re.M
    )
    return {name: value.replace("PASSWORD", PASSWORD) for name, value in lines}


def test_a_role_on_another_machine_is_found_and_one_with_another_token_is_not(
    start: Start, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    head, other = hosts
    start(head, *server_command(6379, tmp_path / "redis"), "--bind", HEAD, "--requirepass", PASSWORD)
    orchestrator = {"HOST": HEAD, "PORT": "7070", "HTTP_PORT": "8080", "API_KEY": KEY}
    role(start, head, "orchestrator", **orchestrator)
    # First the one with another token: when the other is there, this one has had the time to be.
    role(start, other, "verifier", {"SPO_RPC_TOKEN": "of-somebody-else"}, HOST=OTHER, PORT="7076")
    looks = start(other, sys.executable, "-c", LOOK)
    assert looks.stdout is not None
    assert looks.stdout.readline() == "serves\n"
    role(start, other, "replay_buffer", HOST=OTHER, PORT="7073")
    pools = json.loads(looks.stdout.readline())

    assert pools == {"orchestrator": f"{HEAD}:7070", "replay-buffer": f"{OTHER}:7073"}


def role(start: Start, host: Host, service: str, extra: Mapping[str, str] | None = None, **own: str) -> None:
    """A service with the variables of its own file, as systemd starts it."""
    named = {f"SPO_{service.upper()}_{name}": value for name, value in own.items()}
    start(host, sys.executable, "-m", f"services.{service}", **named, **(extra or {}))
