"""A Redis whose disk was full after it had rewritten its append-only file, then killed: it loads what it knew."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from services.orchestrator.recovery.append_only_file import AppendOnlyFile
from spo.local.redis_server import server_command
from spo.testing.waiting import wait_until
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
