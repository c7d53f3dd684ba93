"""What a thousand inference replicas cost the orchestrator and Redis, in CPU time, and how fast weights reach them.

The orchestrator is the real process, Redis a real server, a running job is fed at 10,000 groups a minute. Replicas are
simulated (benchmarks.peers.simulated_replicas): real registration, heartbeats, streams and announcements over real gRPC
and Redis, no tokens. Judges and replay ingest are two consumers here; a trainer is the lease and the publishing alone.
Their CPU time, and the simulated replicas', is not counted: they scale out, the two that are counted do not.

The way past one Redis is a second installation. Last, the same replicas and trajectories of 30 kB, stored by the replay
buffer's own code, are one installation and then two side by side, each with an orchestrator, a Redis and a job: what
the busiest Redis then works, writes and passes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.frame import Row, run, within
from benchmarks.peers.pipeline import (
    WAIT_SECONDS,
    PipelineEnds,
    cpu_seconds,
    orchestrator,
    redis_server,
    running_job,
)
from spo import redis_keys
from spo.messaging.redis_client import RedisClient, connect
from spo.rpc.client import RpcClient
from spo.rpc.pools import TIME_BYTES
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

REPLICAS = tuple(map(int, filter(None, os.environ.get("SPO_BENCHMARK_REPLICAS", "1,100,1000").split(","))))
GROUPS_PER_MINUTE = 10_000
# A replica's share; fewer replicas get less to do.
GROUPS_PER_REPLICA_MINUTE = 10
GROUP_SECONDS = 3.0
SAMPLES = 4
PROCESSES = 4
WINDOW_SECONDS = 20.0
PUSHES = 3
TOKENS = 300
# Of what one installation has, and two have together; a response of so many tokens is about 30 kB as it is stored.
LONG_REPLICAS, LONG_TOKENS, LONG_GROUPS_PER_MINUTE = 60, 2_100, 1_200
SPEC: dict[str, Any] = {
    "model": {"path": "/pi0", "max_response_tokens": 4096},
    "tasks": {"kind": "toy", "train_problems": 200, "evaluation_problems": 6},
    "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
    "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}]},
    "rollout": {"samples_per_prompt": SAMPLES},
    "value": None,
    "evaluation": {"interval_steps": 1_000_000},
}


@dataclass(frozen=True)
class Measured:
    """One size: cores of the orchestrator and of Redis, groups a minute, seconds until all had applied and said so."""

    orchestrator_cores: float
    redis_cores: float
    groups_per_minute: float
    applied_seconds: float
    known_seconds: float


def measure() -> list[Row]:
    """All claims."""
    return [*_of_sizes(), *_of_installations()]


def _of_sizes() -> list[Row]:
    found = {}
    for replicas in REPLICAS:
        found[replicas] = _measured(replicas)
        _say(f"{replicas} replicas: {found[replicas]}")
    rows: list[Row] = []
    if not found:
        return rows
    for replicas, each in found.items():
        cores = each.orchestrator_cores
        rows.append(_row(f"orchestrator, {replicas} replicas", "cores", cores, 1.0))
        rows.append(_row(f"orchestrator per replica, {replicas} replicas", "millicores", 1000 * cores / replicas, 1000))
    most = found[max(found)]
    target = min(GROUPS_PER_MINUTE, GROUPS_PER_REPLICA_MINUTE * max(found))
    rows.append(_row(f"Redis, {max(found)} replicas", "cores", most.redis_cores, 1.0))
    rows.append(_row("orchestrator and Redis together", "cores", most.orchestrator_cores + most.redis_cores, 1.0))
    rows.append(_row("announcement until all have applied it", "s", most.applied_seconds, 5.0))
    rows.append(_row("announcement until the orchestrator knows so", "s", most.known_seconds, 5.0))
    # A limit holds from above: what is missing of the rate.
    rows.append(_row(f"missing of {target:,} groups a minute", "share", 1 - most.groups_per_minute / target, 0.05))
    return rows


def _of_installations() -> list[Row]:
    """The busiest Redis of two installations beside the one that has all of it."""
    alone, (first, second) = _loaded(1)[0], _loaded(2)
    rates = [each.trajectories for each in (alone, first, second)]
    _say(f"one Redis: {alone}; two: {first}, {second}")
    missing = 1 - (rates[1] + rates[2]) / (SAMPLES * LONG_GROUPS_PER_MINUTE / 60)
    rows = [_row("two installations: trajectories of 30 kB that are missing", "share", missing, 0.05)]
    for name, unit, goal in (
        # Streams are read and heartbeats noted by both, whatever comes.
        ("cores", "cores", 1.4),
        ("commands", "per s", 1.8),
        # What it writes to the disk is said, and no row: a window has a rewrite of the file in it or has none.
        ("passed", "MB/s", 1.9),
    ):
        one, two = getattr(alone, name), max(getattr(first, name), getattr(second, name))
        what = f"busiest Redis of two, {rates[0]:.0f} trajectories of 30 kB a second in all: {name}"
        rows.append(Row(what, two, unit, "one Redis for all", one, one / two, goal, one / two >= goal))
    return rows


@dataclass(frozen=True)
class RedisLoad:
    """What one Redis did: cores, commands a second, MB/s that came in and went out, MB/s that it wrote to the disk."""

    cores: float
    commands: float
    passed: float
    written: float
    trajectories: float


class Installation:
    """A Redis, an orchestrator with a running job, the ends of its pipeline and its part of the simulated replicas."""

    def __init__(self, stack: contextlib.ExitStack, share: float) -> None:
        self.started = math.inf
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spo-benchmark-")))
        per_minute, replicas = LONG_GROUPS_PER_MINUTE * share, int(LONG_REPLICAS * share)
        self.ends = PipelineEnds(  # type: ignore[abstract]
            SAMPLES,
            lambda: per_minute * (time.monotonic() - self.started) / 60 - self.ends.finished,
            keeps=True,
        )
        url, self.pid = stack.enter_context(redis_server(folder))
        self.client = connect(url)
        running_job(self.client, SPEC)
        replay = stack.enter_context(self.ends.running(url))
        address, _ = stack.enter_context(orchestrator(folder, url, replay))
        stack.enter_context(_simulated(folder, address, url, replicas, LONG_TOKENS))
        wait_until(lambda: _live(self.client, 0) >= replicas, f"{replicas} replicas have joined", WAIT_SECONDS)

    def counters(self) -> tuple[float, ...]:
        """Since its start: CPU seconds, commands, bytes in and out, bytes written to the disk, groups."""
        said = self.client.info("everything")
        passed = said["total_net_input_bytes"] + said["total_net_output_bytes"]
        # Not what its file holds, which is rewritten by a child now and then.
        written = psutil.Process(self.pid).io_counters().write_bytes
        return cpu_seconds(self.pid), said["total_commands_processed"], passed, written, float(self.ends.finished)


def _loaded(count: int) -> list[RedisLoad]:
    """What each Redis of so many installations did, which divide replicas and groups between them."""
    with contextlib.ExitStack() as stack:
        installations = [Installation(stack, 1 / count) for _ in range(count)]
        for each in installations:
            each.started = time.monotonic()
        time.sleep(3 * GROUP_SECONDS)
        began, before = time.monotonic(), [each.counters() for each in installations]
        time.sleep(WINDOW_SECONDS)
        seconds = time.monotonic() - began
        found = []
        for each, earlier in zip(installations, before, strict=True):
            pairs = zip(each.counters(), earlier, strict=True)
            cores, commands, passed, written, groups = ((now - then) / seconds for now, then in pairs)
            found.append(RedisLoad(cores, commands, passed / 1e6, written / 1e6, SAMPLES * groups))
    return found


def _row(name: str, unit: str, value: float, limit: float) -> Row:
    return within(name, unit, lambda: max(0.0, value), limit=limit, rounds=1)


def _measured(replicas: int) -> Measured:
    per_minute = min(GROUPS_PER_MINUTE, GROUPS_PER_REPLICA_MINUTE * replicas)
    # Nothing is admitted before all have joined.
    start = math.inf
    ends = PipelineEnds(SAMPLES, lambda: per_minute * (time.monotonic() - start) / 60 - ends.finished)  # type: ignore[abstract]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spo-benchmark-")))
        url, redis_process = stack.enter_context(redis_server(folder))
        client = connect(url)
        job_id = running_job(client, SPEC)
        replay = stack.enter_context(ends.running(url))
        address, process = stack.enter_context(orchestrator(folder, url, replay))
        logs = stack.enter_context(_simulated(folder, address, url, replicas, TOKENS))
        wait_until(lambda: _live(client, 0) >= replicas, f"{replicas} replicas have joined", WAIT_SECONDS)
        start = time.monotonic()
        time.sleep(3 * GROUP_SECONDS)
        counted = [process, redis_process]
        began, before, finished = time.monotonic(), list(map(cpu_seconds, counted)), ends.finished
        time.sleep(WINDOW_SECONDS / 2)
        applied, known = _push(client, address, job_id, logs, replicas)
        time.sleep(WINDOW_SECONDS / 2)
        seconds = time.monotonic() - began
        cores = [(cpu_seconds(each) - used) / seconds for each, used in zip(counted, before, strict=True)]
        return Measured(cores[0], cores[1], 60 * (ends.finished - finished) / seconds, applied, known)


def _push(client: RedisClient, address: str, job_id: str, logs: Sequence[Path], replicas: int) -> tuple[float, float]:
    """Publish versions as a trainer does; the slowest: seconds until the last replica applied it, and was known to."""
    trainer = RpcClient("orchestrator", address, OrchestratorServiceStub)
    grant = trainer.call("LeaseJob", wire.LeaseJobRequest(trainer_id="trainer", wait_seconds=5), deadline_seconds=15)
    assert grant.run_id == job_id
    owner: dict[str, Any] = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
    applied, known = [], []
    for version in range(1, PUSHES + 1):
        trainer.call("RenewLease", wire.RenewLeaseRequest(**owner), deadline_seconds=10)
        began = time.time()
        trainer.call("PublishWeights", wire.PublishWeightsRequest(**owner, version=version, step=version, uri="-"))
        wait_until(lambda: len(_applied(logs, version)) == replicas, "all replicas apply", WAIT_SECONDS)  # noqa: B023
        applied.append(max(_applied(logs, version)) - began)
        wait_until(lambda: _live(client, version) >= replicas, "the orchestrator knows", WAIT_SECONDS)  # noqa: B023
        known.append(time.time() - began)
    trainer.close()
    return max(applied), max(known)


def _applied(logs: Sequence[Path], version: int) -> list[float]:
    words = (line.split() for log in logs for line in log.read_text().splitlines())
    return [float(each[1]) for each in words if len(each) == 2 and each[0] == str(version)]


def _live(client: RedisClient, version: int) -> int:
    """Replicas whose last heartbeat said that they serve the run, at a version or later."""
    found = client.hvals(redis_keys.replicas())
    beats = [wire.HeartbeatRequest.FromString(raw[TIME_BYTES:]) for raw in found]
    return sum(bool(beat.run_id) and beat.policy_version >= version for beat in beats if beat.pool == "inference")


@contextlib.contextmanager
def _simulated(folder: Path, address: str, redis_url: str, replicas: int, tokens: int) -> Iterator[list[Path]]:
    """Replicas over a few processes; yields the logs of what they applied."""
    processes, logs = [], []
    share = -(-replicas // PROCESSES)
    for first in range(0, replicas, share):
        log = folder / f"applied-{first}"
        log.touch()
        count = min(share, replicas - first)
        arguments = [address, redis_url, str(first), str(count), str(GROUP_SECONDS), str(log), str(tokens)]
        command = [sys.executable, "-m", "benchmarks.peers.simulated_replicas", *arguments]
        processes.append(subprocess.Popen(command, stdout=sys.stderr))
        logs.append(log)
    try:
        yield logs
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(run("scale", measure))
