"""A Redis whose disk was full after it had rewritten its append-only file, then killed: it loads what it knew."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from services.orchestrator.commit import Durability
from services.orchestrator.jobs import JobStore
from services.orchestrator.recovery import AppendOnlyFile, require_append_only_file
from spo.errors import NotReady
from spo.local.launcher import server_command
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import toy_spec
from tests.conftest import free_port

VALUE = b"x" * 900


class Server:
    """A real server on the tiny disk."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.command = server_command(self.port, folder)
        self.client = redis.Redis(port=self.port)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        wait_until(self.answers, "Redis to answer", 20)

    def answers(self) -> bool:
        assert self.process.poll() is None, "Redis ended: it cannot load its append-only file"
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def server(tiny_disk: Path) -> Iterator[Server]:
    found = Server(tiny_disk / "redis")
    yield found
    found.client.close()
    found.kill()


def rewritten(server: Server) -> None:
    server.client.execute_command("BGREWRITEAOF")
    wait_until(lambda: not server.client.info("persistence")["aof_rewrite_in_progress"], "the rewrite to end", 20)


def test_it_is_written_anew_and_survives_a_kill(server: Server, fill_disk: Callable[[], Path]) -> None:
    watch = AppendOnlyFile(server.client)
    server.client.set("before", VALUE)
    rewritten(server)
    # A page that is begun: a write that finds no second one is cut in the middle.
    server.client.set("begun", VALUE)
    watch.look()
    rewrites = server.client.info("stats").get("total_forks", 0)

    ballast = fill_disk()
    wait_until(lambda: refused(server), "Redis to refuse writes", 20)
    ballast.unlink()
    wait_until(lambda: not refused(server), "Redis to write again", 20)
    server.client.set("after", VALUE)
    wait_until(lambda: watch.look() or whole(server, rewrites), "the file to be written anew", 30)
    server.client.set("later", VALUE)
    time.sleep(1.5)

    server.kill()
    server.start()
    assert [server.client.get(name) for name in ("before", "after", "later")] == [VALUE] * 3


def refused(server: Server) -> bool:
    try:
        server.client.set("probe", VALUE)
    except redis.ResponseError as error:
        return "MISCONF" in str(error)
    return False


def whole(server: Server, forks_before: int) -> bool:
    facts = server.client.info("persistence")
    forks = server.client.info("stats").get("total_forks", 0)
    return bool(forks > forks_before and not facts["aof_rewrite_in_progress"])


@pytest.fixture
def without_one(tmp_path: Path) -> Iterator[int]:
    """Port of a server as some are managed: no append-only file, and nobody may ask for its configuration."""
    port = free_port()
    command = server_command(port, tmp_path / "redis")
    command[command.index("--appendonly") + 1] = "no"
    process = subprocess.Popen([*command, "--rename-command", "CONFIG", ""], stdout=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(client.ping())
            return False

        wait_until(answers, "Redis to answer", 20)
        with pytest.raises(redis.ResponseError):
            client.config_get("appendonly")
    yield port
    process.kill()
    process.wait(20)


def test_a_redis_that_keeps_none_is_refused_at_the_start(without_one: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.orchestrator"]
    environment = os.environ | {"SPO_REDIS_URL": f"redis://127.0.0.1:{without_one}/0", "SPO_STATE_PATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode
    assert "no_append_only_file" in ended.stdout + ended.stderr
    assert "SPO_ORCHESTRATOR_DURABLE_WRITES=false" in ended.stdout + ended.stderr


def test_it_is_taken_where_that_is_accepted_and_replicas_are_still_waited_for(without_one: int) -> None:
    with redis.Redis(port=without_one) as client:
        require_append_only_file(client, "there", accept_none=True)
        accepted = JobStore(client, durable=Durability(append_only_file=False))
        spec = toy_spec({"model": {"path": "/pi0"}})
        job_id = accepted.submit(spec)
        assert accepted.state(job_id) is JobState.QUEUED

        with pytest.raises(NotReady, match="0 of 1 replicas"):
            JobStore(client, durable=Durability(append_only_file=False, replicas=1)).submit(spec)
        # One that went away while the orchestrator runs: a failover to a server without it, or CONFIG SET.
        with pytest.raises(NotReady) as refused:
            JobStore(client).submit(spec)
        assert refused.value.code == "no_append_only_file"
