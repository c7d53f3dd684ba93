"""The platform that the campaign disturbs: what `spo up` starts, behind a network, clocks and disks that can fail."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil
import redis

from services.agent_runner.confined import landlock_version
from spo.local.judge_client import Child
from spo.local.launcher import REDIS, SERVICES, LauncherSettings, LocalPlatform, free_ports
from spo.rpc.client import is_healthy
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disk, StorageFaults
from tests.chaos.network import Network

# The ranks' and judges' waits of a production platform, cut short as the campaign is.
LEASE_SECONDS = 6.0
QUICK = {
    "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": "5",
    "SPO_SANDBOX_JUDGE_RECLAIM_SECONDS": "5",
    "SPO_REPLAY_BUFFER_RECLAIM_SECONDS": "5",
    "SPO_VALUE_ESTIMATION_RECLAIM_SECONDS": "5",
    "SPO_REPLAY_BUFFER_STORE_SECONDS": "10",
    "SPO_ORCHESTRATOR_LEASE_SECONDS": str(LEASE_SECONDS),
    "SPO_ORCHESTRATOR_REPLICA_SILENCE_SECONDS": "6",
    "SPO_ORCHESTRATOR_STALL_SECONDS": "60",
}
STATE_BYTES = 1 << 30
REDIS_BYTES = 1 << 30
START_SECONDS = 400
# pi0 is shared with the demo's cache, so that it is built once.
MODELS = Path(__file__).parents[2] / ".spo" / "cache" / "models"
MARK = "CHAOS_PLATFORM"
RUNNER = "agent-runner"
HARNESS = "script"
EPISODES_AT_ONCE = 3


# Redis begins with the files of a snapshot, where one was laid ready.
RESTORE = """if [ -d "$0.restore" ]; then
    rm -rf "$0/appendonlydir" && mv "$0.restore/appendonlydir" "$0/"
    rm -rf "$0.restore"
fi
exec "$@"
"""


class _Launcher(LocalPlatform):
    """The launcher, with a clock of its own for Redis and each service, and storage that each may lose."""

    clocks: Clocks
    storage: StorageFaults
    # What the runner of agents is told; None: there is none.
    runner: dict[str, str] | None = None

    def _plan(self) -> list[Child]:
        children = super()._plan()
        if self.runner is not None:
            ports = free_ports(["grpc", "metrics"], {})
            told = {"PORT": ports["grpc"], "METRICS_PORT": ports["metrics"], "API_URL": self.http_url}
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("SPO_")},
                **{f"SPO_AGENT_RUNNER_{name}": str(value) for name, value in told.items()},
                **self.runner,
            }
            address, command = f"127.0.0.1:{ports['grpc']}", [sys.executable, "-m", "services.agent_runner"]
            log = self._log_path(RUNNER)
            children.append(Child(RUNNER, command, environment, log, address, lambda: is_healthy(address)))
        return children

    def _service(self, name: str, service: str, address: str, ports: dict[str, int], shared: dict[str, str]) -> Child:
        child = super()._service(name, service, address, ports, shared)
        child.environment = {
            **child.environment,
            **_together(self.clocks.environment(name), self.storage.environment(name)),
        }
        return child

    def _redis(self, port: int) -> Child:
        child = super()._redis(port)
        child.environment = {**child.environment, **self.clocks.environment(REDIS)}
        child.command = ["/bin/sh", "-c", RESTORE, os.fspath((self.state_path / "redis").resolve()), *child.command]
        return child


def _together(*environments: dict[str, str]) -> dict[str, str]:
    """Of processes that preload all their libraries."""
    both = {name: value for environment in environments for name, value in environment.items()}
    libraries = [environment["LD_PRELOAD"] for environment in environments if environment]
    return {**both, "LD_PRELOAD": ":".join(libraries)} if libraries else both


class ChaosPlatform:
    """A whole platform under a temporary folder; nothing of it is left when the context ends but its logs."""

    def __init__(self, logs: Path, *, trainer_ranks: int = 1, agent: str = "", score: str = "") -> None:
        """agent, score: programs of a runner that the platform has too; "": it has none."""
        self.logs = logs
        self.programs = {"agent.py": agent, "score.py": score} if agent else {}
        self.trainer_ranks = trainer_ranks
        # Of who looks on and submits; tenants have keys of their own.
        self.api_key = secrets.token_hex(16)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="spo-chaos-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.clocks = Clocks(self.folder / "clocks")
        self.state_disk = self._disk("state", STATE_BYTES)
        self.storage = StorageFaults(self.folder / "faults", self.state_disk.folder)
        self.redis_disk = self._disk("redis", REDIS_BYTES)
        # The launcher keeps Redis' file in the state folder; here it has a disk of its own, to be filled by itself.
        (self.state_disk.folder / "redis").symlink_to(self.redis_disk.folder)
        self.network = self._stack.enter_context(Network([REDIS, *SERVICES]))
        settings = LauncherSettings(
            http_port=0,
            runs_path=self.logs.parent,
            start_seconds=START_SECONDS,
            drain_seconds=10,
            trainer_ranks=self.trainer_ranks,
            # Clocks and storage faults are libraries that a process preloads; a fork has its parent's. Kills of forks
            # are the end-to-end tests' (tests/e2e/test_demo_survives_kills.py, tests/integration/local).
            warm=False,
        )
        self.launcher = _Launcher(self.logs.name, self.state_disk.folder, settings, self._environment())
        self.launcher.clocks, self.launcher.storage = self.clocks, self.storage
        self.launcher.runner = self._runner() if self.programs else None
        own_redis = os.environ.pop("SPO_REDIS_URL", None)
        try:
            self._stack.enter_context(self.launcher)
        finally:
            if own_redis is not None:
                os.environ["SPO_REDIS_URL"] = own_redis
        for name in (REDIS, *SERVICES):
            self.network.lead(name, self.launcher.addresses[name])
        self.launcher.wait_until_ready()
        self.redis: redis.Redis = redis.Redis.from_url(self.redis_url, socket_timeout=10)
        self._stack.callback(self.redis.close)

    def _disk(self, name: str, size_bytes: int) -> Disk:
        disk = Disk(self.folder / name, size_bytes)
        self._stack.callback(disk.unmount)
        return disk

    def _environment(self) -> dict[str, str]:
        addresses = {f"SPO_{_variable(name)}_ADDRESS": self.network.address(name) for name in SERVICES}
        return {
            **QUICK,
            **addresses,
            "SPO_INFERENCE_ADVERTISE_ADDRESS": self.network.address("inference"),
            "SPO_REDIS_URL": f"redis://{self.network.address(REDIS)}/0",
            "SPO_ORCHESTRATOR_API_KEY": self.api_key,
            "SPO_ORCHESTRATOR_TENANT_PATHS": str(MODELS),
            MARK: self.mark,
        }

    def _runner(self) -> dict[str, str]:
        """What the runner is told beside its addresses; its agents see their own folder and what is played."""
        programs, episodes = self.folder / "programs", self.folder / "episodes"
        episodes.mkdir()
        programs.mkdir()
        for name, text in self.programs.items():
            (programs / name).write_text(text)
        told = {
            "HOST": "127.0.0.1",
            "API_KEY": self.api_key,
            "POOL": "chaos",
            "HARNESSES": json.dumps({HARNESS: f"{sys.executable} {programs / 'agent.py'}"}),
            "SCORE": f"{sys.executable} {programs / 'score.py'}",
            "READABLE": json.dumps([str(programs)]),
            "CONFINED": str(bool(landlock_version())),
            "MOST": str(EPISODES_AT_ONCE),
            "DRAIN_SECONDS": "20",
        }
        named = {f"SPO_AGENT_RUNNER_{name}": value for name, value in told.items()}
        return {**named, MARK: self.mark, "TMPDIR": str(episodes), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    @property
    def mark(self) -> str:
        """What the environment of every process of this platform holds under MARK."""
        return self.folder.name

    @property
    def redis_url(self) -> str:
        """Past the proxy: of who looks on."""
        return self.launcher.redis_url

    @property
    def state_path(self) -> Path:
        return self.state_disk.folder

    @property
    def redis_folder(self) -> Path:
        return self.redis_disk.folder

    def child(self, name: str) -> Child:
        """The process of this name, whichever of its lives it is in."""
        return next(child for child in self.launcher.children if child.name == name)

    def processes(self) -> Iterator[psutil.Process]:
        """Every process that this platform has started and that lives, adopted ones too."""
        return marked_processes(self.mark)


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    """Living processes whose environment names this platform."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _variable(service: str) -> str:
    return service.replace("-", "_").upper()
