"""Fixtures of all tiers. A real Redis-protocol server is always used where Redis is needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from spo.messaging.redis_client import open_server

pytest_plugins = ["tests.support.budget", "tests.support.of_a_day"]

PLATFORMS = "platforms"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers share the tests by file; whole platforms go to one of them, because two at once starve each other.

    These first, as the longest by far, then files by what they cost in earlier runs, then those with many tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    from tests.support.budget import costliest_first

    class OnePlatformAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return PLATFORMS if nodeid.startswith(("tests/chaos/", "tests/e2e/")) else nodeid.split("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            files = [scope for scope in self.workqueue if scope != PLATFORMS]
            ordered = costliest_first(files, lambda file: has_slow_tests(config.rootpath / file))
            for scope in (*reversed(ordered), *({PLATFORMS} & set(self.workqueue))):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return OnePlatformAtATime(config, log)


@cache
def has_slow_tests(file: Path) -> bool:
    """By its text, since a scheduler knows no marks."""
    return "mark.slow" in file.read_text()


@pytest.fixture(autouse=True)
def plain_tracebacks() -> None:
    """Loggers of code under test that nobody configured: rich would draw the locals of a traceback for minutes."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])


# What an httpx.Client that speaks plain HTTP is given as `verify`: it reads all certificates of authorities otherwise,
# 40 ms for each client.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def free_port() -> int:
    """A loopback port that no connection is given before somebody listens there."""
    from spo.local.launcher import free_ports

    return free_ports(["one"], {})["one"]


def require(tool: str) -> str:
    """The path of a program; skips loudly where it is absent, fails when CI=true."""
    path = shutil.which(tool)
    if path is None:
        message = f"{tool} is not installed; `make system-deps` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server, one per test session; use `redis_client` for a clean database."""
    from spo.local.launcher import server_command

    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    process = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            break
        except redis.RedisError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    client.close()
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(20)


@pytest.fixture
def redis_client(redis_server: str) -> Iterator[redis.Redis]:
    """A client on an empty database."""
    client = open_server(redis_server)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte; root may mount one, others skip loudly."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED, a full disk: no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def fill_disk(tiny_disk: Path) -> Callable[[], Path]:
    """Fills the tiny disk to the last page; returns the file to remove."""

    def fill() -> Path:
        ballast = tiny_disk / "ballast"
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"0" * 4096):
                pass
        return ballast

    return fill
