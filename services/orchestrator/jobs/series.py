"""Curves of a job as columns: training scalars by step, platform samples by time, evaluations by step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Write
from spo.messaging.redis_client import RedisClient

Column = list[float | None]


@dataclass(frozen=True)
class MetricCurves:
    """Columns of equal length; None where a point has no such scalar."""

    steps: list[int]
    columns: dict[str, Column]


def report_writes(job_id: str, reports: Iterable[tuple[int, dict[str, float]]]) -> list[Write]:
    """Redis writes that record scalars by step; a step reported again replaces what was there."""
    key = own_keys.job_metrics(job_id)
    writes: list[Write] = []
    for step, scalars in reports:
        writes.append(("ZREMRANGEBYSCORE", key, step, step))
        writes.append(("ZADD", key, step, json.dumps({"step": step, **scalars}, sort_keys=True)))
    return writes


def training_series(
    client: RedisClient, job_id: str, from_step: int = 0, to_step: int | None = None, max_points: int = 1000
) -> MetricCurves:
    """The reported scalars between two steps; thinned evenly to max_points, the newest step always kept."""
    upper = "+inf" if to_step is None else to_step
    found = client.zrangebyscore(own_keys.job_metrics(job_id), from_step, upper)
    return _columns(_thinned([_point(raw) for raw in found], max_points), "step")


def platform_series(client: RedisClient, job_id: str, max_points: int = 1000) -> MetricCurves:
    """Queue depths and replica counts; steps are unix milliseconds here."""
    found = client.zrange(own_keys.job_platform_series(job_id), 0, -1)
    return _columns(_thinned([_point(raw) for raw in found], max_points), "at_unix_ms")


def evaluation_results(client: RedisClient, job_id: str) -> list[dict[str, Any]]:
    """Every evaluation of the job in order of steps."""
    found = client.hgetall(own_keys.evaluations(job_id))
    return sorted((json.loads(raw) for raw in found.values()), key=lambda result: int(result["step"]))


def latest_step(client: RedisClient, job_id: str) -> int:
    """The newest reported training step, 0 before the first."""
    found = client.zrevrange(own_keys.job_metrics(job_id), 0, 0, withscores=True)
    return int(found[0][1]) if found else 0


def latest_point(client: RedisClient, job_id: str) -> dict[str, float]:
    """The scalars of the newest reported training step, empty before the first."""
    found = client.zrevrange(own_keys.job_metrics(job_id), 0, 0)
    return _point(found[0]) if found else {}


def steps_after(client: RedisClient, job_id: str, step: int | None) -> tuple[int, float, float]:
    """The newest reported step, and the seconds that the trainer waited and worked in those after `step` (None: 0)."""
    newest = latest_step(client, job_id)
    if step is None or newest <= step:
        return newest, 0.0, 0.0
    points = [_point(raw) for raw in client.zrangebyscore(own_keys.job_metrics(job_id), f"({step}", "+inf")]
    waited, worked = (sum(point.get(name, 0.0) for point in points) for name in ("wait_seconds", "step_seconds"))
    return newest, waited, worked


def _point(raw: bytes) -> dict[str, float]:
    point: dict[str, float] = json.loads(raw)
    return point


def _thinned(points: list[dict[str, float]], max_points: int) -> list[dict[str, float]]:
    if len(points) <= max_points:
        return points
    stride = -(-len(points) // max_points)
    return points[::-1][::stride][::-1]


def _columns(points: list[dict[str, float]], axis: str) -> MetricCurves:
    names = sorted({name for point in points for name in point} - {axis})
    columns = {name: [_finite(point.get(name)) for point in points] for name in names}
    return MetricCurves([int(point[axis]) for point in points], columns)


def _finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity; a diverged scalar shows as a gap.
    return value if value is not None and abs(value) < float("inf") else None
