"""The whole platform on one machine: Redis and every service as children of this process.

    children   redis, orchestrator, sandbox-judge, verifier, replay-buffer, inference, value-estimation, trainer
    in         settings of this module (SPO_LAUNCHER_*), SPO_REDIS_URL for a Redis of one's own
    out        <runs>/<name>/state.json (who runs where), <runs>/<name>/logs/<service>.log

The same processes run under compose and Kubernetes; only addresses differ.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import redis
from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from spo.errors import Conflict, NotReady
from spo.local.child import Child, ChildStatus
from spo.local.mirror_child import mirror_children
from spo.local.redis_server import server_command
from spo.local.replicas import LocalReplicas
from spo.local.state import PlatformState, read_state, write_state
from spo.messaging.connection import connect
from spo.observability.logs import get_logger
from spo.rpc.client import is_healthy
from spo.rpc.token import show_token
from spo.service.settings import PlatformSettings
from spo.service.state_folder import HeldFolders, launcher_of

log = get_logger("launcher")

# The verifiers too, whether or not a job needs them: without a model they are small, and a job finds them ready.
SERVICES = ("orchestrator", "sandbox-judge", "verifier", "replay-buffer", "inference", "value-estimation", "trainer")
REDIS = "redis"
DEATHS_BEFORE_READY = 3
# glibc raises its thresholds with every large tensor that is freed, until tensors lie between small objects and their
# memory never goes back: fixed ones keep a sixth of a trainer's peak, at no measurable cost in time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}


class LauncherSettings(BaseSettings):
    """SPO_LAUNCHER_*: how the platform runs on one machine."""

    model_config = SettingsConfigDict(env_prefix="SPO_LAUNCHER_", extra="ignore", frozen=True, populate_by_name=True)

    runs_path: Path = Field(default=Path("runs"), description="Logs, state and reports of every launch.")
    http_port: int = Field(
        default=8080,
        ge=0,
        le=65535,
        description="Of the API; 0: any. One that is set is taken or refused, the default gives way where it is taken.",
        # The orchestrator's own name for it counts too: people know it from compose and the chart.
        validation_alias=AliasChoices("SPO_LAUNCHER_HTTP_PORT", "SPO_ORCHESTRATOR_HTTP_PORT"),
    )
    start_seconds: float = Field(default=240, gt=0, description="Longest wait until every service is ready.")
    drain_seconds: float = Field(default=10, gt=0, description="Grace of each service after SIGTERM.")
    trainer_ranks: int = Field(default=1, ge=1, le=64, description="Processes of the trainer; above 1 by torchrun.")
    mirror: str = Field(default="", description="Where all curves go: tensorboard:FOLDER, mlflow:URI, wandb:PROJECT.")


@dataclass
class LocalPlatform:
    """Starts, watches and stops the children; use as a context manager.

    `extra_environment` goes to every child; `state_path` holds weights, checkpoints and caches.
    """

    name: str
    state_path: Path
    settings: LauncherSettings = field(default_factory=LauncherSettings)
    extra_environment: dict[str, str] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list, init=False)
    http_url: str = field(default="", init=False)
    redis_url: str = field(default="", init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _ready: bool = field(default=False, init=False)
    _replicas: LocalReplicas = field(init=False)
    _held: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def folder(self) -> Path:
        return self.settings.runs_path / self.name

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of every child by name."""
        return {child.name: child.address for child in self.children}

    @property
    def state_file(self) -> Path:
        return self.folder / "state.json"

    def __enter__(self) -> LocalPlatform:
        running = read_state(self.state_file)
        if running:
            raise Conflict(
                f"the platform {self.name!r} is already running (pid {running['pid']}, {running['http_url']})",
                code="already_running",
            )
        with ExitStack() as held:
            url = f"http://127.0.0.1:{self.settings.http_port}"
            for folder in (self.folder, self.state_path):
                held.enter_context(launcher_of(folder, self.name, url))
            self.children = self._plan()
            self._held = held.pop_all()
        # The children have it from their environment.
        show_token(PlatformSettings().rpc_token.get_secret_value())
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._thread:
            self._thread.join()
        self._held.close()

    def wait_until_ready(self, on_change: Callable[[dict[str, bool]], None] = lambda _: None) -> None:
        """Return when every child answers its health check; on_change is told who does.

        Raises NotReady naming each child that does not, with the end of its log, after settings.start_seconds or when
        one keeps dying; Conflict (code "state_folder_in_use") where another platform has the state folder.
        """
        deadline = time.monotonic() + self.settings.start_seconds
        ready = {child.name: False for child in self.children}
        held = False
        while not all(ready.values()):
            held = held or self._hold_state(ready)
            for child in self.children:
                ready[child.name] = ready[child.name] or child.is_ready()
            on_change(ready)
            late = [child for child in self.children if not ready[child.name]]
            doomed = [child for child in late if child.fast_deaths >= DEATHS_BEFORE_READY]
            if doomed or (late and time.monotonic() > deadline) or self._stopping.is_set():
                raise NotReady(self._why_not_ready(doomed or late), code="platform_not_ready")
            self._stopping.wait(0.3 if late else 0)
        self._ready = True

    def wait_until_stopped(self) -> None:
        """Block until the supervisor ends; signals interrupt it."""
        # With a limit: the kernel may give a signal to another thread, and its handler runs only when this one wakes.
        while not self._stopping.wait(1.0):
            pass

    def memory_bytes(self) -> int:
        """Proportional set size of the launcher and all its descendants."""
        total = 0
        launcher = psutil.Process()
        for process in [launcher, *launcher.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time that each child has taken in its present life, with all its descendants."""
        found = {}
        for child in self.services():
            try:
                tree = [root := psutil.Process(child["pid"] or 0), *root.children(recursive=True)]
                found[child["name"]] = sum(sum(process.cpu_times()[:4]) for process in tree)
            except psutil.Error:
                continue
        return found

    def services(self) -> list[ChildStatus]:
        """Name, pid, restarts and address of every child."""
        return [child.status for child in self.children]

    def _hold_state(self, ready: dict[str, bool]) -> bool:
        """Share the state folder with the services, once Redis answers which platform this is."""
        if not ready.get(REDIS, True):
            return False
        settings = PlatformSettings(redis_url=self.redis_url, state_path=self.state_path)
        with connect(self.redis_url, settings.redis_wait_seconds) as client:
            self._held.callback(
                HeldFolders.of(settings, "spo up", self.http_url).hold_for(client, self.redis_url).close
            )
        return True

    def _why_not_ready(self, late: list[Child]) -> str:
        lines = [f"not ready: {', '.join(child.name for child in late)}"]
        for child in late:
            if child.name == REDIS and "append only file" in child.last_log_lines():
                lines.append("the append-only file of Redis is damaged: `spo platform repair-redis` says more")
            status = f"exit status {child.exit_status}" if child.exit_status is not None else "still starting"
            lines.append(f"--- {child.name} at {child.address} ({status}), {child.log_path}:\n{child.last_log_lines()}")
        return "\n".join(lines)

    def _plan(self) -> list[Child]:
        ports = free_ports([*SERVICES, "http", REDIS, "torchrun"], preferred={"http": self.settings.http_port})
        if "http_port" in self.settings.model_fields_set and ports["http"] != (
            self.settings.http_port or ports["http"]
        ):
            raise Conflict(f"port {self.settings.http_port} is taken by another program", code="port_taken")
        self.http_url = f"http://127.0.0.1:{ports['http']}"
        own_redis = os.environ.get("SPO_REDIS_URL")
        if own_redis:
            connect(own_redis, PlatformSettings().redis_wait_seconds).close()
        self.redis_url = own_redis or f"redis://127.0.0.1:{ports[REDIS]}/0"
        shared = self._shared_environment(ports)
        children = [self._service(name, name, f"127.0.0.1:{ports[name]}", ports, shared) for name in SERVICES]
        if not own_redis:
            children.insert(0, self._redis(ports[REDIS]))
        children += mirror_children(self.settings.mirror, self.http_url, self._log_path("mirror"))
        self._replicas = LocalReplicas(
            children,
            lambda name, pool: self._service(name, pool, f"127.0.0.1:{free_ports([name], {})[name]}", ports, shared),
            self.redis_url,
            self.settings.drain_seconds + 10,
        )
        return children

    def _redis(self, port: int) -> Child:
        def answers() -> bool:
            try:
                with redis.Redis(port=port, socket_timeout=1, socket_connect_timeout=1) as client:
                    return bool(client.ping())
            except redis.RedisError:
                return False

        command = server_command(port, self.state_path / "redis")
        return Child(REDIS, command, os.environ, self._log_path(REDIS), f"127.0.0.1:{port}", answers)

    def _service(self, name: str, service: str, address: str, ports: dict[str, int], shared: dict[str, str]) -> Child:
        prefix = f"SPO_{_underscored(service).upper()}"
        environment = {
            **shared,
            f"{prefix}_HOST": "127.0.0.1",
            f"{prefix}_PORT": address.rpartition(":")[2],
            f"{prefix}_DRAIN_SECONDS": str(self.settings.drain_seconds),
            # Per service: a build that was killed leaves a lock that the next one would wait for.
            "TORCH_EXTENSIONS_DIR": str(self.state_path.absolute() / "torch_extensions" / name),
        }
        module = ["-m", f"services.{_underscored(service)}"]
        if service == "trainer" and self.settings.trainer_ranks > 1:
            ranks = ("--nproc-per-node", str(self.settings.trainer_ranks), "--master-port", str(ports["torchrun"]))
            module = ["-m", "torch.distributed.run", "--master-addr", "127.0.0.1", *ranks, *module]

        def answers() -> bool:
            if service == "orchestrator" and not _http_ready(self.http_url):
                return False
            return is_healthy(address)

        return Child(name, [sys.executable, *module], environment, self._log_path(name), address, answers)

    def _shared_environment(self, ports: dict[str, int]) -> dict[str, str]:
        addresses = {f"SPO_{_underscored(name).upper()}_ADDRESS": f"127.0.0.1:{ports[name]}" for name in SERVICES}
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {
            **MALLOC,
            **os.environ,
            **addresses,
            "SPO_REDIS_URL": self.redis_url,
            "SPO_STATE_PATH": str(self.state_path.absolute()),
            "SPO_ORCHESTRATOR_HTTP_PORT": str(ports["http"]),
            "SPO_ORCHESTRATOR_SCALER": "local",
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TOKENIZERS_PARALLELISM": "false",
            **self.extra_environment,
        }

    def _log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _supervise(self) -> None:
        try:
            for child in self.children:
                child.start()
            written: PlatformState | None = None
            while not self._stopping.wait(0.25):
                for child in self.children:
                    if child.revive():
                        log.warning("restarted", child=child.name, restarts=child.restarts, status=child.exit_status)
                self._replicas.follow()
                if (state := self._state()) != written:
                    write_state(self.state_file, state)
                    written = state
        finally:
            self._stopping.set()
            self._stop_children()
            self.state_file.unlink(missing_ok=True)

    def _stop_children(self) -> None:
        """Services first and all at once, so that they can still write what they hold; Redis last."""
        self.children += self._replicas.leaving
        servers = [child for child in self.children if child.name == REDIS]
        for group in ([child for child in self.children if child.name != REDIS], servers):
            for child in group:
                child.ask_to_stop()
            deadline = time.monotonic() + self.settings.drain_seconds + 10
            killed = [child.name for child in group if not child.stop_by(deadline)]
            if killed:
                log.warning("killed after the grace period", children=killed)

    def _state(self) -> PlatformState:
        return {
            "name": self.name,
            "pid": os.getpid(),
            "pid_created": psutil.Process().create_time(),
            "ready": self._ready,
            "http_url": self.http_url,
            "redis_url": self.redis_url,
            "state_path": str(self.state_path.absolute()),
            "services": self.services(),
        }


def free_ports(names: list[str], preferred: dict[str, int]) -> dict[str, int]:
    """Distinct free loopback ports, the preferred ones where nothing else has them."""
    ports = {}
    with ExitStack() as held:
        for name in names:
            for port in (preferred.get(name, 0), 0):
                probe = held.enter_context(socket.socket())
                # As servers do: connections that ended a moment ago, of the platform before, hold no port. Not for any
                # port: two sockets could then be given the same one.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                ports[name] = int(probe.getsockname()[1])
                break
    return ports


def _underscored(service: str) -> str:
    return service.replace("-", "_")


def _http_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False
