"""Rollouts a second of a rollout-bound job with one real inference replica, with two, and with one again.

Redis, the orchestrator and the replicas (vLLM on CPU, one thread each) are real processes; prompts are dispatched as
the replay buffer's real limiter admits them for the replicas that are ready, under a trainer that takes every batch
at once. Two replicas can only bring what cores are free: the rows say how many cores the replicas got, and how many
were idle beside them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from services.replay_buffer.windows import Limiter, LiveCounts
from spo import redis_keys
from spo.messaging.redis_client import RedisClient, connect
from spo.rpc.pools import TIME_BYTES
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse

SAMPLES = 8
SETTLE_SECONDS = 8.0
WINDOW_SECONDS = float(os.environ.get("SPO_BENCHMARK_WINDOW_SECONDS", "30"))
GOAL = 1.2


@dataclass(frozen=True)
class Measured:
    """One window: rollouts a second, cores that the replicas used, and cores of the machine that nobody used."""

    rollouts_per_second: float
    cores: float
    idle_cores: float


class LimitedEnds(PipelineEnds):
    """The ends of a pipeline whose replay buffer admits what its limiter says, and whose trainer never works long."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(SAMPLES, lambda: 0.0)
        self.spec = spec
        self._sampled = 0

    def GetReplayStatus(self, request: GetReplayStatusRequest, context: Any) -> GetReplayStatusResponse:  # noqa: N802
        limiter = Limiter.of(self.spec, replicas=request.replicas)
        while limiter.may_sample(self._counts(limiter), limiter.per_batch):
            self._sampled += limiter.per_batch
        return GetReplayStatusResponse(
            admissible_inserts=limiter.admissible_inserts(self._counts(limiter)),
            groups_per_replica=limiter.groups_per_replica(request.replicas),
        )

    def _counts(self, limiter: Limiter) -> LiveCounts:
        inserted = self.finished * self.samples
        return LiveCounts(inserted, self._sampled, min(inserted, limiter.capacity))


def measure() -> list[Row]:
    """All claims."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spo-benchmark-")))
        write_random_llama(folder / "pi0", seed=0)
        ends = LimitedEnds(parse_job_spec(_spec(folder)))  # type: ignore[abstract]
        url, _ = stack.enter_context(redis_server(folder))
        client = connect(url)
        running_job(client, _spec(folder))
        replay = stack.enter_context(ends.running(url))
        address, _ = stack.enter_context(orchestrator(folder, url, replay))
        found = []
        with _replica(folder, address, url) as first:
            _wait_until_serving(client, 1)
            found.append(_window(ends, [first]))
            with _replica(folder, address, url) as second:
                _wait_until_serving(client, 2)
                found.append(_window(ends, [first, second]))
            found.append(_window(ends, [first]))
    return _rows(*found)


def _rows(before: Measured, two: Measured, after: Measured) -> list[Row]:
    for each in (before, two, after):
        print(each, file=sys.stderr, flush=True)
    one = (before.rollouts_per_second + after.rollouts_per_second) / 2
    one_cores = (before.cores + after.cores) / 2
    ratio = two.rollouts_per_second / one
    rows = [
        Row("rollouts/s, 2 replicas", two.rollouts_per_second, "1/s", "1 replica", one, ratio, GOAL, ratio >= GOAL),
    ]
    per_core = (two.rollouts_per_second / two.cores) / (one / one_cores)
    rows.append(
        Row(
            "rollouts per CPU second of the replicas, 2 replicas",
            two.rollouts_per_second / two.cores,
            "1/s",
            "1 replica",
            one / one_cores,
            per_core,
            0.9,
            per_core >= 0.9,
        )
    )
    cores = float(psutil.cpu_count() or 1)
    rows.append(within("cores used by 1 replica", "cores", lambda: one_cores, limit=cores, rounds=1))
    rows.append(within("cores used by 2 replicas", "cores", lambda: two.cores, limit=cores, rounds=1))
    idle = (before.idle_cores + after.idle_cores) / 2
    rows.append(within("cores idle beside 1 replica", "cores", lambda: idle, limit=cores, rounds=1))
    rows.append(within("cores idle beside 2 replicas", "cores", lambda: two.idle_cores, limit=cores, rounds=1))
    return rows


def _spec(folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "pi0"), "dtype": "float32", "max_prompt_tokens": 64, "max_response_tokens": 44},
        "tasks": {"kind": "toy", "train_problems": 60, "evaluation_problems": 6},
        "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
        "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}]},
        "rollout": {"samples_per_prompt": SAMPLES},
        "value": None,
        "evaluation": {"interval_steps": 1_000_000},
    }


@contextlib.contextmanager
def _replica(folder: Path, address: str, redis_url: str) -> Iterator[int]:
    """A real inference process; at the end it drains, so that its groups are not waited for."""
    environment = os.environ | {
        "SPO_REDIS_URL": redis_url,
        "SPO_STATE_PATH": str(folder / "state"),
        "SPO_ORCHESTRATOR_ADDRESS": address,
        "SPO_LOG_LEVEL": "warning",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.inference"], env=environment, stdout=sys.stderr)
    try:
        yield process.pid
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait(10)


def _wait_until_serving(client: RedisClient, replicas: int) -> None:
    def serving() -> bool:
        found = client.hvals(redis_keys.replicas())
        beats = [HeartbeatRequest.FromString(raw[TIME_BYTES:]) for raw in found]
        return sum(beat.pool == "inference" and bool(beat.run_id) and not beat.draining for beat in beats) == replicas

    wait_until(serving, f"{replicas} replicas serve the job", WAIT_SECONDS)


def _window(ends: PipelineEnds, replicas: list[int]) -> Measured:
    time.sleep(SETTLE_SECONDS)
    began, finished = time.monotonic(), ends.finished
    used, idle = sum(map(cpu_seconds, replicas)), psutil.cpu_times().idle
    time.sleep(WINDOW_SECONDS)
    seconds = time.monotonic() - began
    return Measured(
        SAMPLES * (ends.finished - finished) / seconds,
        (sum(map(cpu_seconds, replicas)) - used) / seconds,
        (psutil.cpu_times().idle - idle) / seconds,
    )


if __name__ == "__main__":
    raise SystemExit(run("replicas", measure))
