"""A process that cannot do its work says why: with a wrong Redis password, and where no space is left for weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
import torch

from spo.errors import ResourceExhausted, Unreachable
from spo.local.launcher import free_ports, server_command
from spo.messaging.redis_client import connect
from spo.testing.peers import wait_until
from spo.weights.store import WeightStore

PASSWORD, WRONG = "the-right-one", "a-wrong-one"
LIMIT_SECONDS = 120


@pytest.fixture
def guarded(tmp_path: Path, free_port: int) -> Iterator[redis.Redis]:
    """An administrator's client of a server that wants a password."""
    command = [*server_command(free_port, tmp_path / "redis"), "--requirepass", PASSWORD]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        yield connect(f"redis://:{PASSWORD}@127.0.0.1:{free_port}/0")
        server.terminate()


def url_of(client: redis.Redis, password: str) -> str:
    port = client.get_connection_kwargs()["port"]
    return f"redis://:{password}@127.0.0.1:{port}/0"


def environment(tmp_path: Path, url: str) -> dict[str, str]:
    return {**os.environ, "SPO_REDIS_URL": url, "SPO_STATE_PATH": str(tmp_path)}


@pytest.mark.parametrize("password", [WRONG, ""])
def test_a_refused_password_is_told_at_once_and_is_not_taken_for_a_server_that_is_away(
    guarded: redis.Redis, password: str
) -> None:
    with pytest.raises(Unreachable, match=r"refuses the user or password in SPO_REDIS_URL") as refused:
        connect(url_of(guarded, password), wait_seconds=60)

    assert refused.value.code == "redis_refused"
    assert WRONG not in refused.value.message


@pytest.mark.parametrize("service", ["orchestrator", "sandbox_judge", "replay_buffer", "verifier"])
def test_a_service_with_a_wrong_redis_password_ends_with_the_reason_in_its_last_line(
    guarded: redis.Redis, tmp_path: Path, service: str
) -> None:
    command = [sys.executable, "-m", f"services.{service}"]
    settings = environment(tmp_path, url_of(guarded, WRONG))
    ended = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)

    last = json.loads(ended.stderr.splitlines()[-1])
    assert ended.returncode == 1
    assert (last["level"], last["code"]) == ("error", "redis_refused")
    assert "SPO_REDIS_URL" in last["reason"]
    assert WRONG not in ended.stderr + ended.stdout


def test_readiness_names_a_password_that_was_changed_while_the_service_ran(
    guarded: redis.Redis, tmp_path: Path
) -> None:
    settings = environment(tmp_path, url_of(guarded, PASSWORD))
    port = free_ports(["http"], {})["http"]
    settings["SPO_ORCHESTRATOR_HTTP_PORT"] = str(port)
    url = f"http://127.0.0.1:{port}/readyz"
    with subprocess.Popen([sys.executable, "-m", "services.orchestrator"], env=settings) as process:
        try:
            wait_until(lambda: status_of(url) == 200, "the orchestrator to be ready", LIMIT_SECONDS)
            guarded.config_set("requirepass", "another")
            guarded.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            wait_until(lambda: status_of(url) == 503, "the refusal to be seen", LIMIT_SECONDS)
            problem = httpx.get(url, trust_env=False, timeout=30).json()
        finally:
            process.terminate()
    assert problem["code"] == "redis_unreachable"
    assert "password" in problem["detail"].lower()


def status_of(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False, timeout=30).status_code
    except httpx.HTTPError:
        return 0


def write(store: WeightStore, values: int) -> None:
    shards = [("model-00001.safetensors", {"layer.weight": torch.ones(values)})]
    store.write("job_a", 1, parent=0, step=1, dtype="float32", shards=shards)


def test_a_full_disk_is_named_leaves_no_half_of_a_version_and_is_tried_again(tiny_disk: Path) -> None:
    store = WeightStore(tiny_disk)

    with pytest.raises(ResourceExhausted, match=f"no space is left in {tiny_disk}.* are free") as full:
        write(store, 1 << 20)

    assert (full.value.code, full.value.retryable) == ("disk_full", True)
    assert store.versions("job_a") == []
    write(store, 1000)
    assert store.versions("job_a") == [1]
