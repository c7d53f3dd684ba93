"""What benchmarks.api asks: a real Redis, a real orchestrator process and the bare service beside it, on two cores."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.testing.runs import write_model_without_weights

KEY = "the-key-of-the-benchmark"
START_SECONDS = 60.0
OPEN_FILES = 8192
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Platform:
    """Ports, processes and a client of their Redis."""

    client: RedisClient
    folder: Path
    http_port: int
    grpc_port: int
    bare_port: int
    orchestrator: subprocess.Popen[bytes]
    bare: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def spec(self) -> dict[str, Any]:
        """A job that can be accepted: a model folder without weights to speak of and a small toy contest."""
        model = self.folder / "pi0"
        if not model.exists():
            write_model_without_weights(model)
        tasks = {"kind": "toy", "train_problems": 6, "evaluation_problems": 3}
        return {"name": "benchmark", "labels": {"team": "a"}, "model": {"path": str(model)}, "tasks": tasks}


@contextlib.contextmanager
def platform() -> Iterator[Platform]:
    """All of it on one pair of cores, this process included; jobs stay queued, since no work is to be measured."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, most), most))
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        redis_port, http_port, grpc_port, bare_port = _free_ports(4)
        stack.enter_context(_running(server_command(redis_port, folder / "redis"), {}, folder / "redis.log"))
        url = f"redis://127.0.0.1:{redis_port}/0"
        client = connect(url)
        environment = {
            "SPO_REDIS_URL": url,
            "SPO_STATE_PATH": str(folder / "state"),
            "SPO_ORCHESTRATOR_PORT": str(grpc_port),
            "SPO_ORCHESTRATOR_HTTP_PORT": str(http_port),
            "SPO_ORCHESTRATOR_ADDRESS": f"127.0.0.1:{grpc_port}",
            "SPO_ORCHESTRATOR_API_KEY": KEY,
            "SPO_ORCHESTRATOR_RATE_LIMIT": "100000000/minute",
            "SPO_LOG_LEVEL": "warning",
        }
        command = [sys.executable, "-m", "services.orchestrator"]
        orchestrator = stack.enter_context(_running(command, environment, folder / "orchestrator.log"))
        command = [sys.executable, "-m", "benchmarks.http_load.bare", url, str(bare_port)]
        bare = stack.enter_context(_running(command, {}, folder / "bare.log"))
        found = Platform(client, folder, http_port, grpc_port, bare_port, orchestrator, bare)
        _await(f"{found.url}/readyz", folder / "orchestrator.log")
        _await(f"http://127.0.0.1:{bare_port}/openapi.json", folder / "bare.log")
        yield found


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)


def _await(url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(url, trust_env=False, timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not answer within {START_SECONDS:g} s: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
