"""The life of a service process, the same for all: join, serve, work, heartbeat, drain on SIGTERM; and its memory.

Joining the platform: what every service asks of Redis before it does anything else.
The schema of what services keep in Redis and exchange on streams has a version, MAJOR.MINOR. Fields, keys and streams
are added under the same major number, and each release reads what the others of that number wrote; a change that they
would misread raises it. The version in Redis is that of the newest release that ever joined.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import cast

import redis
from ulid import ULID

from spo import observability, redis_keys
from spo.errors import InvalidInput, PreconditionFailed, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient, connect, public_address, unfit
from spo.messaging.streams.recovery import THIS_PROCESS, Outage, asked_to_stop
from spo.observability import MAX_WAITING, Line, configure_logs, get_logger, waiting
from spo.rpc.client import RpcClient, show_token
from spo.rpc.server import ANSWERING_THREADS, RpcServer
from spo.service.settings import PlatformSettings, ServiceSettings
from spo.service.state import HeldFolders
from spo.v1 import orchestrator_service_pb2 as orchestrator
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

log = get_logger("process")

# That take the steps of many jobs.
JOB_THREADS = 16

SCHEMA = (1, 0)
POLL_SECONDS = 0.5

# KEYS: the platform's hash.  ARGV: this release's schema.  Keeps the newer of the two, and returns what was there, ''
# on a Redis that has none. A release of another major number changes nothing.
_JOIN = """#!lua flags=allow-oom
local found = redis.call('HGET', KEYS[1], 'schema_version')
local own_major, own_minor = string.match(ARGV[1], '^(%d+)%.(%d+)$')
if not found then redis.call('HSET', KEYS[1], 'schema_version', ARGV[1]) return '' end
local major, minor = string.match(found, '^(%d+)%.(%d+)$')
if tonumber(own_major) == tonumber(major) and tonumber(own_minor) > tonumber(minor) then
  redis.call('HSET', KEYS[1], 'schema_version', ARGV[1])
end
return found
"""

LINES_PER_BEAT = 200
REDIS_LOOK_SECONDS = 10.0
LAST_WORDS_SECONDS = 2.0
# With the last words and what closes after `run`, within the 10 s that the launcher gives beyond the drain.
SERVER_STOP_SECONDS = 3.0

Worker = Callable[[threading.Event], None]
Beat = Callable[[orchestrator.HeartbeatResponse], None]


def join_platform(settings: PlatformSettings, schema: tuple[int, int] = SCHEMA) -> RedisClient:
    """Connect once Redis answers, has loaded its data and takes writes; check that this release may work on them.

    Raises Unreachable when Redis was not ready within redis_wait_seconds, and PreconditionFailed: "redis_unfit" when it
    evicts, is too old or hides which, "newer_schema" when a later release has changed what is stored there.
    """
    deadline = time.monotonic() + settings.redis_wait_seconds
    client = connect(settings.redis_url, settings.redis_wait_seconds)
    require_fit(client, public_address(settings.redis_url))
    _await_primary(client, settings, deadline)
    require_schema(client, public_address(settings.redis_url), schema)
    return client


def require_fit(client: RedisClient, address: str) -> None:
    """Raises PreconditionFailed (code "redis_unfit") where this server would lose what it is given."""
    if reason := unfit(client):
        raise PreconditionFailed(f"Redis at {address} is not fit for the platform: {reason}", code="redis_unfit")


def require_schema(client: RedisClient, address: str, schema: tuple[int, int] = SCHEMA) -> None:
    """Raises PreconditionFailed (code "newer_schema") unless this release may work on what Redis holds."""
    own = f"{schema[0]}.{schema[1]}"
    found = cast(bytes, client.eval(_JOIN, 1, redis_keys.platform(), own)).decode()
    if found and int(found.partition(".")[0]) > schema[0]:
        raise PreconditionFailed(
            f"Redis at {address} holds schema {found}, and this release knows {schema[0]}.x at most: start the release "
            "that wrote it, or a later one, or restore the backup from before that upgrade",
            code="newer_schema",
        )


def _await_primary(client: RedisClient, settings: PlatformSettings, deadline: float) -> None:
    """A replica refuses writes until it is promoted."""
    told = False
    while client.info("replication").get("role") == "slave":
        reason = f"Redis at {public_address(settings.redis_url)} is a replica, which takes no writes until promoted"
        if time.monotonic() > deadline:
            raise Unreachable(f"{reason}; waited {settings.redis_wait_seconds:g} s", code="redis_unreachable")
        if not told:
            log.warning("waiting for Redis", reason=reason, seconds=settings.redis_wait_seconds)
        told = True
        time.sleep(POLL_SECONDS)


@dataclass
class ServiceProcess:
    """One running service.

    Fill `server` with servicers and `workers` with functions that return when their stop event is set, then `run()`.
    `report` fills in the heartbeat's changing fields, `on_heartbeat` receives the orchestrator's answer.
    `long_polls`: how many of the servicers' calls may wait at once, beside those that answer quickly.
    """

    pool: str
    settings: ServiceSettings
    server: RpcServer = field(init=False)
    workers: list[Worker] = field(default_factory=list)
    report: Callable[[orchestrator.HeartbeatRequest], None] = lambda request: None
    on_heartbeat: Beat = lambda response: None
    on_drain: Callable[[], None] = lambda: None
    long_polls: int = 0
    # False for a process that knows the platform by its HTTP API alone, and is none of its replicas.
    heartbeats: bool = True
    # Why the process does not work now, though it lives; "" while it does.
    obstacle: Callable[[], str] = lambda: ""
    # What this service needs of Redis beside the others: why it cannot be had, and what to do; "" where it can.
    needs_of_redis: Callable[[RedisClient], str] = lambda client: ""
    # Why Redis is not fit to hold the platform's data any more; "" while it is.
    redis_problem: str = field(default="", init=False)
    folders: HeldFolders | None = field(default=None, init=False)
    stop: threading.Event = field(default_factory=threading.Event)
    failed: bool = field(default=False, init=False)
    # The signal that ended it; None while it runs, and where a worker ended it.
    stopped_by: signal.Signals | None = field(default=None, init=False)
    _answers_probes: bool = field(default=False, init=False)
    _drained_by: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        configure_logs(self.pool, self.settings.log_level, self.settings.log_format)
        sys.excepthook = _say_why_it_cannot_start
        token = self.settings.rpc_token.get_secret_value()
        show_token(token)
        self.server = RpcServer(self.settings.host, self.settings.port, self.long_polls + ANSWERING_THREADS, token)
        self.replica_id = f"{self.pool}-{ULID()}".lower()
        observability.configure_traces(self.pool, self.replica_id, self.settings.traces_endpoint)

    @property
    def address(self) -> str:
        if self.settings.host in ("0.0.0.0", "::") and not self.settings.advertise_address:
            return f"{socket.gethostname()}:{self.server.port}"
        return self.settings.advertise_address or self.server.address

    def hold_state(self, client: RedisClient) -> RedisClient:
        """Share the state folder with the processes of this platform alone, for as long as this one lives.

        Raises Conflict (code "state_folder_in_use"), redis.RedisError.
        """
        self.hold_state_when_known().hold_for(client, self.settings.redis_url)
        return self.watch_redis(client)

    def watch_redis(self, client: RedisClient) -> RedisClient:
        """Not be ready, and say why, while Redis is not fit for the platform: its settings may change while it runs."""

        def redis_watch(stop: threading.Event) -> None:
            while not stop.wait(REDIS_LOOK_SECONDS):
                with contextlib.suppress(redis.RedisError):
                    found, before = unfit(client) or self.needs_of_redis(client), self.redis_problem
                    self.redis_problem = f"Redis is not fit for the platform: {found}" if found else ""
                    if found and self.redis_problem != before:
                        log.error(self.redis_problem, code="redis_unfit")
                    elif before and not found:
                        log.info("Redis is fit for the platform again")

        self.workers.append(redis_watch)
        return client

    def hold_state_when_known(self) -> HeldFolders:
        """The same for a process without a Redis: from the orchestrator's first answer on, which says the platform."""
        self.folders = HeldFolders.of(self.settings, self.pool, self.address)
        self.workers.append(self.folders.renew_until)
        return self.folders

    def belongs_to(self, platform_id: str) -> bool:
        """Whether the orchestrator that says so is of this process' platform; one of another ends the process."""
        try:
            if self.folders:
                self.folders.confirm(platform_id)
        except SpoError as error:
            log.error("the process ends", reason=error.message, code=error.code)
            self.failed = True
            self.stop.set()
            return False
        return True

    def answer_probes(self, loading: str) -> None:
        """Answer probes from now on, before the libraries of the role are imported: not ready, and why."""
        self._answers_probes = True
        self._answer(loading)

    def _answer(self, loading: str = "") -> None:
        observability.serve_metrics(self.settings.host, self.settings.metrics_port)
        self.server.start(loading)

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT or until a worker fails; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if self._answers_probes:
            self.server.loaded()
        else:
            self._answer()
        beats = [self._heartbeats] if self.heartbeats else []
        threads = [self._thread(worker) for worker in [*self.workers, *beats]]
        self.server.set_serving(True)
        log.info("serving", address=self.address, pid=os.getpid(), replica=self.replica_id)
        # With a limit: the kernel may give SIGTERM to another thread, and its handler runs only when this one wakes.
        while not self.stop.wait(1.0):
            self.server.set_obstacle(self.redis_problem or THIS_PROCESS.obstacle() or self.obstacle())
        return self._drain(threads)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = signal.Signals(number)
        self.stop.set()

    @property
    def drain_seconds_left(self) -> float:
        """What is left of the grace after SIGTERM, for what is closed after `run`."""
        return max(0.0, min(self.settings.drain_seconds, self._drained_by - time.monotonic()))

    def _drain(self, threads: list[threading.Thread]) -> int:
        log.info("draining", grace_seconds=self.settings.drain_seconds)
        # One for the whole process: whoever sent SIGTERM counts no threads.
        self._drained_by = time.monotonic() + self.settings.drain_seconds
        self.server.set_serving(False)
        if not self.failed:
            # Of what it has in hand nobody dies, however this end comes about.
            _briefly(asked_to_stop)
        self.on_drain()
        for thread in threads:
            thread.join(self.drain_seconds_left)
        unfinished = [thread.name for thread in threads if thread.is_alive()]
        if unfinished and not self.failed:
            _briefly(THIS_PROCESS.give_back)
        self.server.stop(min(SERVER_STOP_SECONDS, self.settings.drain_seconds))
        observability.finish_traces()
        if unfinished:
            log.error("stopped with workers still busy; others take over their entries", workers=unfinished)
        return 1 if self.failed else 0

    def _thread(self, worker: Worker) -> threading.Thread:
        def body() -> None:
            try:
                worker(self.stop)
            except (InvalidInput, PreconditionFailed) as error:
                # What it needs is not so, and it says what: where it was found out says nothing more.
                log.error("the process ends", reason=error.message, code=error.code)
                self.failed = True
                self.stop.set()
            except Exception:
                # A worker that ends by surprise must end the process: a half-alive service looks healthy and is not.
                log.exception("worker failed; the process ends so that it is restarted")
                self.failed = True
                self.stop.set()

        thread = threading.Thread(target=body, name=getattr(worker, "__name__", "worker"), daemon=True)
        thread.start()
        return thread

    def _heartbeats(self, stop: threading.Event) -> None:
        client = RpcClient("orchestrator", self.settings.orchestrator_address, OrchestratorServiceStub)
        pause = 1.0
        while not stop.is_set():
            pause = self._beat(client, draining=False, otherwise=pause)
            stop.wait(pause)
        self._beat(client, draining=True, otherwise=pause)
        client.close()

    def _beat(self, client: RpcClient, *, draining: bool, otherwise: float) -> float:
        request = orchestrator.HeartbeatRequest(
            replica_id=self.replica_id, pool=self.pool, address=self.address, pid=os.getpid(), draining=draining
        )
        lines: list[Line] = []
        try:
            self.report(request)
            request.problem = request.problem or self.redis_problem
            lines = self._take_lines(request)
            response: orchestrator.HeartbeatResponse = client.call("Heartbeat", request, deadline_seconds=3)
            self.on_heartbeat(response)
        except SpoError as error:
            self._give_back(lines)
            log.warning("orchestrator did not take the heartbeat; trying again", reason=error.message)
            return min(5.0, max(1.0, otherwise))
        self.belongs_to(response.platform_id)
        return response.next_heartbeat_seconds or 1.0

    @staticmethod
    def _take_lines(request: orchestrator.HeartbeatRequest) -> list[Line]:
        """Put waiting log lines into the heartbeat; they are returned so that a failed one can give them back."""
        lines = [waiting.popleft() for _ in range(min(len(waiting), LINES_PER_BEAT))]
        for line in lines:
            request.logs.add(run_id=line.run_id, level=line.level, at_unix_ms=line.at_unix_ms, line=line.text)
        return lines

    @staticmethod
    def _give_back(lines: list[Line]) -> None:
        """Put lines back before those that came meanwhile; where room is short the oldest give way."""
        room = max(0, MAX_WAITING - len(waiting))
        waiting.extendleft(reversed(lines[max(0, len(lines) - room) :]))


def _briefly(write: Callable[[], None]) -> None:
    """Write to Redis before the process ends; one that is away holds up no end."""
    thread = threading.Thread(target=write, name="last-words", daemon=True)
    thread.start()
    thread.join(LAST_WORDS_SECONDS)


def _say_why_it_cannot_start(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for errors that say what to do; others keep their traceback."""
    if isinstance(error, SpoError):
        log.error("the process cannot start", reason=error.message, code=error.code)
    else:
        sys.__excepthook__(kind, error, trace)


def in_rounds(
    body: Callable[[], object],
    stop: threading.Event,
    seconds: float,
    waits: str,
    passing: tuple[type[Exception], ...] = (redis.RedisError,),
    first: Callable[[], object] | None = None,
) -> None:
    """The loop of a worker: call body until stop, `seconds` apart. What is `passing` is tried again in the next round.

    waits: what waits meanwhile, in words, as the log says when it begins, while it lasts and when it is over.
    first: called once, before body is.
    """
    outage = Outage(waits)
    while not stop.is_set():
        try:
            if first is not None:
                first()
                first = None
            body()
            outage.over()
        except passing as error:
            outage.failed(error)
        stop.wait(seconds)


def for_each_run(
    body: Callable[[str], object],
    runs: Callable[[], Iterable[bytes]],
    stop: threading.Event,
    seconds: float,
    waits: str,
    first: Callable[[], object] | None = None,
) -> None:
    """`in_rounds` over runs: whatever goes wrong with one delays no other, and is tried again in the next round."""
    outages: dict[str, Outage] = {}

    def look_after_all() -> None:
        names = [raw.decode() for raw in runs()]
        for ended in outages.keys() - set(names):
            del outages[ended]
        for run_id in names:
            outage = outages.setdefault(run_id, Outage(waits, run=run_id))
            try:
                body(run_id)
                outage.over()
            except Exception as error:
                outage.failed(error)

    in_rounds(look_after_all, stop, seconds, waits, first=first)


class JobSteps:
    """Runs one function for each of many jobs on a few threads, for each job at most once at a time: a step that blocks
    or raises delays no other job.
    """

    def __init__(self, step: Callable[[str], None], name: str) -> None:
        self._step = step
        self._pool = ThreadPoolExecutor(JOB_THREADS, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[Future[None], float]] = {}

    def round(self, job_ids: Iterable[str], patience_seconds: float) -> None:
        """Begin the step of every job that has none under way; return when all are done, or after patience_seconds.

        Raises what the first of the finished ones raised.
        """
        with self._lock:
            for job_id in job_ids:
                if job_id not in self._under_way:
                    self._under_way[job_id] = (self._pool.submit(self._step, job_id), time.monotonic())
            waiting = [future for future, _ in self._under_way.values()]
        wait(waiting, patience_seconds)
        with self._lock:
            done = [(job_id, future) for job_id, (future, _) in self._under_way.items() if future.done()]
            for job_id, _ in done:
                del self._under_way[job_id]
        for _, future in done:
            future.result()

    def seconds_under_way(self) -> dict[str, float]:
        """The jobs whose step has not ended, and how long it has taken so far."""
        now = time.monotonic()
        with self._lock:
            return {job_id: now - began for job_id, (_, began) in self._under_way.items()}

    def close(self) -> None:
        """Begin no further step."""
        self._pool.shutdown(wait=False, cancel_futures=True)
