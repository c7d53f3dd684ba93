"""What commands find on this machine: child processes, the platform that state.json names, and a judge, of that
platform or of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypedDict

import psutil

from spo.errors import NotFound, NotReady, ResourceExhausted, Unreachable
from spo.local.die_with_parent import bound_to_this_process
from spo.local.warm_parent import WarmParent, WarmProcess
from spo.observability import get_logger
from spo.rpc.client import RpcClient, is_healthy, show_token
from spo.service.settings import PlatformSettings
from spo.v1.judge_service_pb2 import (
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    Priority,
    UploadTestsRequest,
)
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import TestSet, Verdict

FAST_DEATH_SECONDS = 20.0
LONGEST_BACKOFF_SECONDS = 30.0

EMBEDDED = "embedded"
AUTO = "auto"
START_SECONDS = 60.0
STOP_SECONDS = 5.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.2
RUNNING_JUDGE_WORKERS = 4


class ChildStatus(TypedDict):
    """What state.json and reports say of a child; pid is None before its first start."""

    name: str
    pid: int | None
    restarts: int
    address: str


@dataclass
class Child:
    """A command that should be running; address is where it answers, is_ready asks whether it does.

    Start it from a thread that lives as long as the launcher: the kernel ends the child with that thread.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log_path: Path
    address: str
    is_ready: Callable[[], bool]
    # Of a service whose libraries it has loaded, with the module that the command runs.
    warm_parent: WarmParent | None = None
    module: str = ""
    restarts: int = field(default=0, init=False)
    fast_deaths: int = field(default=0, init=False)
    exit_status: int | None = field(default=None, init=False)
    _process: subprocess.Popen[bytes] | WarmProcess | None = field(default=None, init=False)
    _started_at: float = field(default=0.0, init=False)
    _restart_at: float | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def status(self) -> ChildStatus:
        return {"name": self.name, "pid": self.pid, "restarts": self.restarts, "address": self.address}

    def start(self) -> None:
        """Start it. Where the machine has no process, memory or room for that, `revive` tries again."""
        self._started_at = time.monotonic()
        self._restart_at = None
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._process = self._fork() or self._new_process()
        except OSError as error:
            get_logger("launcher").warning("a service could not be started", child=self.name, error=str(error))
            self._process = None
            self._plan_restart(died_fast=True)

    def waits_for_libraries(self) -> bool:
        """Whether the process that it will be forked from still loads; start it when that has ended."""
        return self.warm_parent is not None and not self.warm_parent.is_ready() and not self.warm_parent.is_gone()

    def _fork(self) -> WarmProcess | None:
        return self.warm_parent.start(self.module, self.environment, self.log_path) if self.warm_parent else None

    def _new_process(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                bound_to_this_process(self.command),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal then reaches the launcher alone, which stops the children in order.
                start_new_session=True,
            )

    def revive(self) -> bool:
        """Restart a dead child once its pause is over; True when a process was started.

        The pause doubles with every death that came soon after the start.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return False
            if self._restart_at is None:
                self.exit_status = self._process.returncode
                self._kill_group()
                self._plan_restart(died_fast=time.monotonic() - self._started_at < FAST_DEATH_SECONDS)
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return False
        self.start()
        self.restarts += 1
        return self._process is not None

    def _plan_restart(self, *, died_fast: bool) -> None:
        self.fast_deaths = self.fast_deaths + 1 if died_fast else 0
        self._restart_at = time.monotonic() + min(LONGEST_BACKOFF_SECONDS, 0.5 * 2**self.fast_deaths)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def stop_by(self, deadline: float) -> bool:
        """Wait until deadline (monotonic) for the end, then kill the whole group; True when it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._kill_group()
            self._process.wait()

    def last_log_lines(self, count: int = 15) -> str:
        """The end of its log, for messages."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])
        return ""

    def _kill_group(self) -> None:
        """What the child had started itself (ranks, sandboxes) must not outlive it."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A fork has a group of its own a moment after it has begun.
            self._process.kill()


class PlatformState(TypedDict):
    """The document; pid_created tells the launcher from a later process of the same pid."""

    name: str
    pid: int
    pid_created: float
    ready: bool
    http_url: str
    redis_url: str
    state_path: str
    services: list[ChildStatus]


def write_state(state_file: Path, state: PlatformState) -> None:
    """Write it whole: a reader sees the old or the new one."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    staging = state_file.with_suffix(".json.new")
    staging.write_text(json.dumps(state, indent=2) + "\n")
    staging.replace(state_file)


def read_state(state_file: Path) -> PlatformState | None:
    """What a launcher wrote, or None when that launcher no longer lives."""
    try:
        state: PlatformState = json.loads(state_file.read_text())
        # A pid alone may have been given to another process since.
        return state if psutil.Process(state["pid"]).create_time() == state["pid_created"] else None
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def running_platforms(runs_path: Path) -> list[PlatformState]:
    """Every platform that runs here, the one started last first."""
    states = [read_state(state_file) for state_file in runs_path.glob("*/state.json")]
    return sorted((state for state in states if state), key=lambda state: state["pid_created"], reverse=True)


def running_verifier(runs_path: Path) -> str:
    """Where a verifier answers: SPO_VERIFIER_ADDRESS, else the platform that was started here last; "" for none."""
    if named := os.environ.get("SPO_VERIFIER_ADDRESS"):
        return named
    services = (service for state in running_platforms(runs_path) for service in state["services"])
    return next((str(service["address"]) for service in services if service["name"] == "verifier"), "")


@dataclass
class EmbeddedJudge:
    """The process of a judge that serves this command only."""

    address: str = ""
    workers: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def start(self) -> None:
        """Start it and learn where it listens. Raises NotReady with its reason."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.sandbox_judge.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # Ctrl-C in the terminal then reaches the command alone, which ends the judge.
            start_new_session=True,
        )
        answer = self._first_line()
        if "address" not in answer:
            reason = answer.get("message") or self._last_words()
            self.stop()
            raise NotReady(f"the embedded judge did not start: {reason}", code=answer.get("code", "not_ready"))
        self.address, self.workers = answer["address"], int(answer["workers"])

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process; 0 before it is started."""
        return self._process.pid if self._process is not None else 0

    def stop(self) -> None:
        """End it and what it runs: it ends by itself when its standard input does."""
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout, self._log):
                if stream is not None:
                    stream.close()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
            self._process = None

    def _first_line(self) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_SECONDS)[0]:
            return {"message": f"it said nothing for {START_SECONDS:g} s"}
        try:
            answer: dict[str, str] = json.loads(self._process.stdout.readline())
        except ValueError:
            return {}
        return answer

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        return self._log.read().decode(errors="replace").strip()


@dataclass
class JudgeClient:
    """Judges programs by one test set; safe to use from many threads. Use as a context manager.

    where: "auto" (the judge of the platform that runs here, else an embedded one), "embedded", or host:port.
    """

    test_set: TestSet
    where: str = AUTO
    runs_path: Path = Path("runs")
    workers: int = field(default=RUNNING_JUDGE_WORKERS, init=False)
    _embedded: EmbeddedJudge | None = field(default=None, init=False)
    _client: RpcClient | None = field(default=None, init=False)
    _digest: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> JudgeClient:
        try:
            address = self._running_judge()
            if address is None:
                self._embedded = EmbeddedJudge()
                address = self._start_embedded(self._embedded)
            self._connect(address)
        except BaseException:  # an interrupt too: a judge that has begun to start must not stay
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, calls under way, and an embedded judge with all that it runs."""
        with self._lock:
            client, self._client = self._client, None
            if client:
                client.close()
            if self._embedded:
                self._embedded.stop()

    def judge_by(self, test_set: TestSet) -> None:
        """Judge by another test set from now on; not while calls are under way. Raises SpoError where it is refused."""
        self.test_set = test_set
        self._upload(self._connected())

    def describe(self) -> DescribeJudgeResponse:
        """What the judge is. Raises SpoError."""
        described: DescribeJudgeResponse = self._connected().call("DescribeJudge", DescribeJudgeRequest())
        return described

    def judge(self, source: bytes, language: str, *, stop_early: bool, deadline_seconds: float) -> Verdict:
        """The verdict on one program with details; a judge that fails or is busy is asked again.

        Raises SpoError when it keeps failing or deadline_seconds have passed.
        """
        deadline = time.monotonic() + deadline_seconds
        failures = 0
        while True:
            client, digest = self._connected(), self._digest
            try:
                request = _request(source, language, digest, stop_early=stop_early)
                verdict: Verdict = client.call("Judge", request, deadline - time.monotonic()).verdicts[0]
                return verdict
            except (NotFound, NotReady) as error:  # a judge that has lost its tests, or is gone
                failures += 1
                if failures == ATTEMPTS or time.monotonic() >= deadline or error.code == "judge_fault":
                    raise
            except ResourceExhausted:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(PAUSE_SECONDS)
            self._repair(client)

    def _connected(self) -> RpcClient:
        if self._client is None:
            raise Unreachable("the connection to the judge is not open")
        return self._client

    def _running_judge(self) -> str | None:
        if self.where == EMBEDDED:
            return None
        if self.where != AUTO:
            return self.where
        for state in running_platforms(self.runs_path):
            for service in state["services"]:
                if service["name"] == "sandbox-judge" and is_healthy(service["address"]):
                    return str(service["address"])
        return None

    def _start_embedded(self, embedded: EmbeddedJudge) -> str:
        embedded.start()
        self.workers = embedded.workers
        return embedded.address

    def _connect(self, address: str) -> None:
        show_token(PlatformSettings().rpc_token.get_secret_value())
        self._client = RpcClient("sandbox-judge", address, JudgeServiceStub)
        self._upload(self._client)

    def _upload(self, client: RpcClient) -> None:
        self._digest = client.call("UploadTests", UploadTestsRequest(test_sets=[self.test_set])).digests[0]

    def _repair(self, used: RpcClient) -> None:
        """Another judge for one that has ended, once for all threads. Raises SpoError."""
        with self._lock:
            if used is self._client and self._embedded and not self._embedded.is_running():
                self._embedded.stop()
                self._connect(self._start_embedded(self._embedded))
            elif used is self._client:
                with contextlib.suppress(NotReady):  # then the next try says so
                    self._upload(used)


def _request(source: bytes, language: str, digest: str, *, stop_early: bool) -> JudgeRequest:
    request = JudgeRequest(
        language=language,
        tests_digest=digest,
        priority=Priority.PRIORITY_EVALUATION,
        want_details=True,
        stop_early=stop_early,
    )
    try:
        request.programs.append(source.decode())
    except UnicodeDecodeError:
        request.raw_programs.append(source)
    return request
