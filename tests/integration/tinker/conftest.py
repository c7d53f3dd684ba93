"""A real Tinker service on a toy model, behind a real orchestrator's HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from services.orchestrator.commit import Leadership
from services.orchestrator.container import AppContext
from services.orchestrator.http.app import HttpServer
from services.orchestrator.settings import Settings as OrchestratorSettings
from services.tinker.service import assemble
from services.tinker.settings import Settings
from spo.rpc.client import is_healthy
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1.tinker_service_pb2_grpc import add_TinkerServiceServicer_to_server
from tests.conftest import free_port

OPERATOR_KEY = "the-operators-own-key"


class TinkerProcessDouble:
    """The service of one process life, in this process; `start` again is the next life, on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop = threading.Event()
        write_random_llama(folder / "pi0", seed=0)

    def start(self, port: int = 0) -> str:
        settings = Settings(state_path=self.folder / "state", model=self.folder / "pi0", autosave_steps=2)
        self.stop = threading.Event()
        self.server = RpcServer("127.0.0.1", port, max_workers=16)
        service, worker = assemble(settings)
        add_TinkerServiceServicer_to_server(service, self.server.server)
        self.server.start()
        self.thread = threading.Thread(target=worker.run, args=(self.stop,), daemon=True)
        self.thread.start()
        return self.server.address

    def end(self) -> None:
        self.stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.server.stop(1)


class TinkerProcess:
    """The real thing, as people start it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "tinker.log"
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = os.environ | {
            "SPO_TINKER_PORT": self.address.rpartition(":")[2],
            "SPO_TINKER_MODEL": str(folder / "pi0"),
            "SPO_TINKER_AUTOSAVE_STEPS": "2",
            "SPO_STATE_PATH": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        write_random_llama(folder / "pi0", seed=0)

    def start(self) -> str:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "services.tinker"]
            self.running = subprocess.Popen(command, env=self.environment, stderr=log, stdout=log)
        wait_until(lambda: is_healthy(self.address), "the Tinker service is ready", 240)
        return self.address

    def kill(self) -> None:
        self.running.kill()
        self.running.wait(30)

    end = kill


@dataclass
class TinkerPlatform:
    """What a client needs, and what is behind it."""

    url: str
    context: AppContext
    process: TinkerProcessDouble | TinkerProcess
    model: str

    def key(self, tenant: str) -> str:
        """A new key of a tenant, as its client sends it."""
        _, token = self.context.authenticator.keys.create(tenant, tenant, ("jobs:read", "jobs:write"))
        return f"tml-{token}"


@pytest.fixture
def platform(redis_server: str, redis_client: redis.Redis, tmp_path: Path) -> Iterator[TinkerPlatform]:
    yield from _served(redis_server, TinkerProcessDouble(tmp_path), tmp_path)


@pytest.fixture
def real_platform(redis_server: str, redis_client: redis.Redis, tmp_path: Path) -> Iterator[TinkerPlatform]:
    """With the service as a process of its own."""
    yield from _served(redis_server, TinkerProcess(tmp_path), tmp_path)


def _served(
    redis_server: str, process: TinkerProcessDouble | TinkerProcess, tmp_path: Path
) -> Iterator[TinkerPlatform]:
    address = process.start()
    settings = OrchestratorSettings(
        redis_url=redis_server,
        http_port=0,
        state_path=tmp_path / "orchestrator",
        api_key=OPERATOR_KEY,
        tinker_address=address,
    )
    client = redis.Redis.from_url(redis_server)
    leadership = Leadership(client, "orchestrator of the test", lease_seconds=3600)
    assert leadership.take()
    context = AppContext(settings, client, threading.Event(), leadership)
    http = HttpServer(context)
    thread = threading.Thread(target=http.run, args=(context.stop,))
    thread.start()
    wait_until(lambda: http.port > 0, "the HTTP server listens")
    yield TinkerPlatform(f"http://127.0.0.1:{http.port}/tinker", context, process, str(tmp_path / "pi0"))
    context.stop.set()
    thread.join(15)
    process.end()
    context.close()
    client.close()
