"""The buffer in Redis: a ledger of everything acknowledged, and per source the window that batches are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from services.replay_buffer.admission import check_trajectory, content_digest
from spo import metrics, redis_keys
from spo.errors import NotFound
from spo.job_spec import JobSpec, spec_from_json
from spo.v1.prompt_pb2 import Source
from spo.v1.replay_service_pb2 import SourceCount
from spo.v1.trajectory_pb2 import Trajectory

BATCH_MEMORY_SECONDS = 7 * 24 * 3600
BEST_REWARD = 0.0
SOURCES = tuple(name.removeprefix("SOURCE_").lower() for name in Source.keys() if name != "SOURCE_UNSPECIFIED")  # noqa: SIM118


@dataclass(frozen=True)
class Counts:
    """Inserted, correct and sampled trajectories by source name since the run's start."""

    inserted: dict[str, int]
    correct: dict[str, int]
    sampled: dict[str, int]
    duplicates: int


def source_name(source: int) -> str:
    """`online` for SOURCE_ONLINE: the names a JobSpec uses."""
    return Source.Name(source).removeprefix("SOURCE_").lower()  # type: ignore[arg-type]


class ReplayStore:
    """All runs' experience on one Redis; safe to use from many threads and processes."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._specs: dict[str, JobSpec] = {}
        here = Path(__file__).parent
        self._insert = client.register_script((here / "insert.lua").read_text())
        self._record = client.register_script((here / "record_batch.lua").read_text())

    def spec(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound for a run nobody started."""
        if run_id not in self._specs:
            stored: Any = self.client.get(redis_keys.run_spec(run_id))
            if stored is None:
                raise NotFound(f"there is no run {run_id}", code="unknown_run")
            self._specs[run_id] = spec_from_json(stored)
        return self._specs[run_id]

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """Enter trajectories, each at most once by id (offline ones also by content); returns (inserted, duplicates).

        All or none are refused: raises InvalidInput when any is unusable, NotFound for an unknown run.
        """
        spec = self.spec(run_id)
        for trajectory in trajectories:
            check_trajectory(trajectory)
        if not trajectories:
            return 0, 0
        self._write_payloads(run_id, trajectories)
        results: list[Any] = self._insert(
            keys=self._keys(run_id), args=[*self._window(spec), *_arguments(trajectories)]
        )
        orphans = [each.trajectory_id for each, result in zip(trajectories, results, strict=True) if result == -1]
        if orphans:
            self.client.unlink(*[redis_keys.replay_trajectory(run_id, orphan) for orphan in orphans])
        inserted = results.count(1)
        metrics.REPLAY_INSERTS.labels(result="inserted").inc(inserted)
        metrics.REPLAY_INSERTS.labels(result="duplicate").inc(len(results) - inserted)
        return inserted, len(results) - inserted

    def counts(self, run_id: str) -> Counts:
        """Counts by source; zeros for a run without experience."""
        stored: Any = self.client.hgetall(redis_keys.replay_counters(run_id))

        def of(prefix: str) -> dict[str, int]:
            return {source: int(stored.get(f"{prefix}:{source}".encode(), 0)) for source in SOURCES}

        return Counts(of("inserted"), of("correct"), of("sampled"), int(stored.get(b"duplicates", 0)))

    def source_counts(self, run_id: str) -> list[SourceCount]:
        """Counts as the wire shows them; sources without experience are left out."""
        counts = self.counts(run_id)
        return [
            SourceCount(
                source=Source.Value(f"SOURCE_{source.upper()}"),
                inserted=counts.inserted[source],
                available=int(self.client.zcard(redis_keys.replay_source(run_id, source))),
                sampled=counts.sampled[source],
                correct=counts.correct[source],
            )
            for source in SOURCES
            if counts.inserted[source]
        ]

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[Trajectory | None]:
        """Trajectories by id, None where absent."""
        if not trajectory_ids:
            return []
        keys = [redis_keys.replay_trajectory(run_id, each) for each in trajectory_ids]
        payloads: Any = self.client.mget(keys)
        return [Trajectory.FromString(payload) if payload else None for payload in payloads]

    def newest_first(self, run_id: str, after: str, count: int) -> tuple[list[Trajectory], str]:
        """A page of the ledger, newest first; `after` is the cursor of the page before ('' starts)."""
        highest = f"({int(after)}" if after else "+inf"
        page: Any = self.client.zrevrangebyscore(
            redis_keys.replay_ids(run_id), highest, "-inf", start=0, num=count, withscores=True
        )
        found = self.get(run_id, [trajectory_id.decode() for trajectory_id, _ in page])
        cursor = str(int(page[-1][1])) if len(page) == count else ""
        return [each for each in found if each is not None], cursor

    def recorded_batch(self, run_id: str, step: int) -> list[str]:
        """Ids already fixed for a step, [] when none are."""
        known: Any = self.client.get(redis_keys.replay_batch(run_id, step))
        return known.decode().split() if known else []

    def record_batch(self, run_id: str, step: int, trajectory_ids: Sequence[str], drawn: dict[str, int]) -> list[str]:
        """Fix the ids of a step unless another request did so before; returns the ids that hold."""
        pairs = [part for source, count in drawn.items() for part in (source, count)]
        held: Any = self._record(
            keys=[redis_keys.replay_batch(run_id, step), redis_keys.replay_counters(run_id)],
            args=[" ".join(trajectory_ids), BATCH_MEMORY_SECONDS, *pairs],
        )
        return held.decode().split()  # type: ignore[no-any-return]

    def _write_payloads(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for trajectory in trajectories:
                key = redis_keys.replay_trajectory(run_id, trajectory.trajectory_id)
                # NX: what was acknowledged under an id is never rewritten.
                pipe.set(key, trajectory.SerializeToString(), nx=True)
            pipe.execute()

    @staticmethod
    def _keys(run_id: str) -> list[str]:
        sources = [
            key
            for source in SOURCES
            for key in (redis_keys.replay_source(run_id, source), redis_keys.replay_source(run_id, f"{source}:correct"))
        ]
        return [
            redis_keys.replay_ids(run_id),
            redis_keys.replay_content(run_id),
            redis_keys.replay_counters(run_id),
            *sources,
        ]

    @staticmethod
    def _window(spec: JobSpec) -> tuple[int, int]:
        return spec.replay.online_capacity, spec.replay.offline_per_prompt


def _arguments(trajectories: Sequence[Trajectory]) -> list[str | int]:
    arguments: list[str | int] = []
    for trajectory in trajectories:
        source = source_name(trajectory.source)
        arguments += [
            trajectory.trajectory_id,
            4 + 2 * SOURCES.index(source),
            source,
            int(trajectory.reward >= BEST_REWARD),
            trajectory.prompt_id,
            content_digest(trajectory),
        ]
    return arguments
