"""What benchmarks of the pipeline stand on: a real Redis, the real orchestrator with a running job, and its two ends.

Judges and replay ingest are two threads here that hand on and count; a trainer is what a benchmark makes of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from services.orchestrator.jobs import JobStore
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import is_healthy
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

WAIT_SECONDS = 300.0
REFERENCE = "f" * 64


class PipelineEnds(ReplayServiceServicer):
    """The judges and the replay buffer: takes what replicas forward; `room` says how many groups it wants by now.

    keeps: judged trajectories go into the replay buffer's store, with reference log-probs, else to nowhere.
    """

    def __init__(self, samples: int, room: Callable[[], float], *, keeps: bool = False) -> None:
        self.samples = samples
        self.room = room
        self.keeps = keeps
        self.finished = 0

    def GetReplayStatus(self, request: GetReplayStatusRequest, context: Any) -> GetReplayStatusResponse:  # noqa: N802
        return GetReplayStatusResponse(admissible_inserts=int(max(0.0, self.room())) * self.samples)

    @contextlib.contextmanager
    def running(self, redis_url: str) -> Iterator[str]:
        """Run both ends; yields the address of the replay service."""
        stop = threading.Event()
        replay = RpcServer("127.0.0.1", 0)
        add_ReplayServiceServicer_to_server(self, replay.server)
        replay.start()
        threads = [
            threading.Thread(target=body, args=(connect(redis_url), stop), daemon=True)
            for body in (self._judge, self._ingest)
        ]
        for thread in threads:
            thread.start()
        try:
            yield replay.address
        finally:
            stop.set()
            for thread in threads:
                thread.join(10)
            replay.stop(1)

    def _judge(self, client: RedisClient, stop: threading.Event) -> None:
        """Rollouts to verdicts, as they are."""
        consumer = Consumer(client, redis_keys.rollouts(), redis_keys.JUDGE_GROUP, "judge")
        while not stop.is_set():
            for entry in consumer.read(64):
                consumer.forward(entry, redis_keys.verdicts(), entry.payload)

    def _ingest(self, client: RedisClient, stop: threading.Event) -> None:
        """Verdicts into the store, or to nowhere, counted."""
        consumer = Consumer(client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest")
        store = ReplayStore(client)
        while not stop.is_set():
            entries = consumer.read(256)
            if entries:
                for entry in entries if self.keeps else []:
                    found = RolloutGroup.FromString(entry.payload).trajectories
                    for each in found:
                        each.verdict.outcome, each.reward, each.reference_hash = OUTCOME_ACCEPTED, 0.0, REFERENCE
                        each.reference_logprobs[:] = each.sampling_logprobs
                    store.append(found[0].run_id, found)
                consumer.finish(entries)
                self.finished += len(entries)


def running_job(client: RedisClient, spec: dict[str, Any]) -> str:
    """A job as it stands once it runs; it must need no values."""
    jobs = JobStore(client)
    job_id = jobs.submit(parse_job_spec(spec))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert jobs.transition(job_id, state, "the benchmark says so")
    return job_id


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, int]]:
    """URL and pid of an empty server that keeps its file in `folder`."""
    port = _free_port()
    with _process(server_command(port, folder / "redis"), {}) as process:
        yield f"redis://127.0.0.1:{port}/0", process.pid


@contextlib.contextmanager
def orchestrator(folder: Path, redis_url: str, replay: str) -> Iterator[tuple[str, int]]:
    """Address and pid of an orchestrator that serves."""
    port = _free_port()
    address = f"127.0.0.1:{port}"
    environment = {
        "SPO_REDIS_URL": redis_url,
        "SPO_STATE_PATH": str(folder / "state"),
        "SPO_ORCHESTRATOR_PORT": str(port),
        "SPO_ORCHESTRATOR_ADDRESS": address,
        "SPO_ORCHESTRATOR_HTTP_PORT": "0",
        "SPO_REPLAY_BUFFER_ADDRESS": replay,
        "SPO_LOG_LEVEL": "warning",
    }
    with _process([sys.executable, "-m", "services.orchestrator"], environment) as process:
        # Not before: a thousand replicas that look for it would take the CPU that its start needs.
        wait_until(lambda: is_healthy(address), "the orchestrator serves", WAIT_SECONDS)
        yield address, process.pid


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=os.environ | environment, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its descendants have used."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
