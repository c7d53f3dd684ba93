"""A real orchestrator process beside doubles of the services that it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from spo.local.warm_parent import WarmProcess
from spo.testing.peers import ServiceDoubles, wait_until
from tests.conftest import free_port
from tests.support.warm_services import start_warm

START_SECONDS = 60


class OrchestratorProcess:
    """A real process that can be started again on the same ports."""

    def __init__(self, redis_url: str, peers: ServiceDoubles, folder: Path, name: str = "orchestrator") -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.log = folder / f"{name}.log"
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
        # What the process is started by, for example bubblewrap.
        self.prefix: tuple[str, ...] = ()
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None

    def launch(self) -> subprocess.Popen[bytes] | WarmProcess:
        if not self.prefix:
            self.process = start_warm("services.orchestrator", self.environment, self.log)
            return self.process
        with self.log.open("ab") as log:
            command = [*self.prefix, sys.executable, "-m", "services.orchestrator"]
            self.process = subprocess.Popen(command, env=self.environment, stderr=log)
        return self.process

    def start(self) -> None:
        process = self.launch()

        def ready() -> bool:
            assert process.poll() is None, self.log.read_text()
            return self.readiness().is_success

        wait_until(ready, "the orchestrator is ready", START_SECONDS)

    def readiness(self) -> httpx.Response:
        """What /readyz says; a status of 599 while nothing answers."""
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False, timeout=2)
        except httpx.TransportError:
            return httpx.Response(599)

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def kill(self) -> None:
        """End it however it is, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
