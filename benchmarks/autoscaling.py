"""Replicas over time under four shapes of load, and rollouts against replicas, on a virtual clock.

The dispatcher, limiter, assignment and demand are the platform's own, prompts go through a real Redis, and KEDA and the
HorizontalPodAutoscaler decide as they are documented (benchmarks.peers.horizontal_autoscaler) with the chart's own
behaviour. Replicas, judges and trainers are numbers (benchmarks.peers.simulated_cluster): a pod takes 20 s to be ready,
a group 8 to 24 s. `SPO_BENCHMARK_PLOT=FILE.png` draws what was measured.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.frame import Row, run, within
from benchmarks.peers.pipeline import redis_server
from benchmarks.peers.simulated_cluster import SimulatedCluster, SimulatedJob
from spo.messaging.redis_client import RedisClient, connect
from spo.observability import configure_logs

CHART = Path(__file__).parent.parent / "helm" / "spo" / "values.yaml"
WARM_SECONDS = 120.0
LEAST_LINEAR = {8: 7.0, 16: 14.0}


@cache
def behavior() -> Any:
    """How the chart lets the pools grow and shrink."""
    return yaml.safe_load(CHART.read_text())["inference"]["autoscaling"]["behavior"]


@dataclass(frozen=True)
class Shape:
    """What a load did to the pool; times in seconds after the load changed, changes in the busiest ten minutes."""

    name: str
    cluster: SimulatedCluster
    until_enough: float
    until_back: float
    changes_per_10_minutes: int


def step(client: RedisClient, seed: int = 0) -> Shape:
    """One job needs one replica, then eleven, then one."""
    cluster = SimulatedCluster(client, behavior(), seed)
    job = cluster.submit(seconds_for(0.9))
    cluster.run(WARM_SECONDS)
    job.step_seconds = seconds_for(10.5)
    up = cluster.now
    cluster.run(300)
    job.step_seconds = seconds_for(0.9)
    down = cluster.now
    cluster.run(300)
    return Shape("step", cluster, _until_size(cluster, up, 11), _until_at_most(cluster, down, 2), 0)


def ramp(client: RedisClient, seed: int = 0) -> Shape:
    """One job needs 1 to 12 replicas, slowly more, then slowly less."""
    cluster = SimulatedCluster(client, behavior(), seed)
    job = cluster.submit(seconds_for(1))
    cluster.run(WARM_SECONDS)

    def grow(at: float) -> None:
        passed = at - WARM_SECONDS
        job.step_seconds = seconds_for(1 + 11 * min(passed, 1200 - passed) / 600)

    cluster.run(1200, grow)
    down = cluster.now
    cluster.run(300)
    return Shape("ramp", cluster, _worst_lag(cluster, WARM_SECONDS, 720), _until_at_most(cluster, down, 2), 0)


def burst(client: RedisClient, seed: int = 0) -> Shape:
    """Beside a job that needs two, three that need three each come for four minutes; then all end: down to 0."""
    cluster = SimulatedCluster(client, behavior(), seed)
    job = cluster.submit(seconds_for(1.6))
    cluster.run(WARM_SECONDS)
    up = cluster.now
    guests = [cluster.submit(seconds_for(2.7)) for _ in range(3)]
    cluster.run(240)
    for guest in guests:
        cluster.end(guest)
    down = cluster.now
    cluster.run(300)
    cluster.end(job)
    cluster.run(360)
    assert cluster.replicas == {}, "nothing runs, and still there are replicas"
    cluster.submit(seconds_for(1))
    cluster.run(60)
    assert cluster.ready, "a job waits, and no replica came"
    return Shape("burst", cluster, _until_size(cluster, up, 10), _until_at_most(cluster, down, 3), 0)


def constant(client: RedisClient, seed: int = 0, minutes: float = 30) -> Shape:
    """Three jobs that need 2.3, 2.9 and 2.6 all the time."""
    cluster = SimulatedCluster(client, behavior(), seed)
    for need in (2.3, 2.9, 2.6):
        cluster.submit(seconds_for(need))
    cluster.run(300 + 60 * minutes)
    scaler = cluster.scalers["inference"]
    starts = range(300, int(cluster.now) - 599, 15)
    changes = max((scaler.changes(start, start + 600) for start in starts), default=scaler.changes(300, cluster.now))
    return Shape("constant", cluster, _until_size(cluster, 0, 8), 0.0, changes)


SHAPES: tuple[Callable[[RedisClient], Shape], ...] = (step, ramp, burst, constant)


def rollouts_per_second(client: RedisClient, replicas: int, seconds: float = 200) -> float:
    """Groups a second of one job whose trainer takes all it gets, through the real limiter."""
    cluster = SimulatedCluster(client, None, replicas=replicas)
    job: SimulatedJob = cluster.submit(1e-3)
    cluster.run(60)
    finished = job.finished
    cluster.run(seconds)
    return (job.finished - finished) / seconds


def seconds_for(replicas: float) -> float:
    """The trainer's seconds for a batch that keep so many replicas busy."""
    return 4 / replicas


def _until_size(cluster: SimulatedCluster, since: float, size: int) -> float:
    return next((at - since for at, _, found, _ in cluster.history if at > since and found >= size), float("inf"))


def _until_at_most(cluster: SimulatedCluster, since: float, size: int) -> float:
    above = [at for at, _, found, _ in cluster.history if at > since and found > size]
    return max(above, default=since) - since


def _worst_lag(cluster: SimulatedCluster, since: float, until: float) -> float:
    """The longest time for which a growing load needed more replicas than there were pods."""
    longest, begun = 0.0, since
    for at, _, size, need in cluster.history:
        if since <= at <= until:
            begun = at if size >= need else begun
            longest = max(longest, at - begun)
    return longest


@contextlib.contextmanager
def _redis() -> Iterator[RedisClient]:
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder, redis_server(Path(folder)) as (url, _):
        yield connect(url)


def measure() -> list[Row]:
    """All claims."""
    configure_logs("benchmark", "error")
    rows, shapes = [], []
    for shape in SHAPES:
        with _redis() as client:
            found = shape(client)
        shapes.append(found)
        if shape is constant:
            # From nothing at all: the first pods have to start before anything is known of the jobs.
            rows.append(_row("constant: until enough replicas are asked for", "s", found.until_enough, 150))
            rows.append(_row("constant: changes in ten minutes", "1", found.changes_per_10_minutes, 2))
        else:
            # Of new jobs nobody knows yet what they take and cost.
            limit = 120 if shape is burst else 90
            rows.append(_row(f"{found.name}: until enough replicas are asked for", "s", found.until_enough, limit))
            rows.append(_row(f"{found.name}: until back", "s", found.until_back, 300))
    made = {replicas: _made(replicas) for replicas in (1, *LEAST_LINEAR)}
    for replicas, least in LEAST_LINEAR.items():
        ratio = made[replicas] / made[1]
        name = f"groups/s, {replicas} replicas"
        rows.append(Row(name, made[replicas], "1/s", "1 replica", made[1], ratio, least, ratio >= least))
    if plot := os.environ.get("SPO_BENCHMARK_PLOT"):
        _draw(Path(plot), shapes)
    return rows


def _made(replicas: int) -> float:
    with _redis() as client:
        return rollouts_per_second(client, replicas)


def _row(name: str, unit: str, value: float, limit: float) -> Row:
    return within(name, unit, lambda: float(value), limit=limit, rounds=1)


def _draw(path: Path, shapes: list[Shape]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axis, shape in zip(axes.flat, shapes, strict=True):
        minutes = [at / 60 for at, *_ in shape.cluster.history]
        for column, label, style in ((3, "needed", ":"), (2, "asked for", "-"), (1, "ready", "--")):
            axis.step(minutes, [point[column] for point in shape.cluster.history], style, where="post", label=label)
        axis.set(title=shape.name, xlabel="minutes", ylabel="inference replicas", ylim=(0, 17))
        axis.legend(loc="upper right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(run("autoscaling", measure))
