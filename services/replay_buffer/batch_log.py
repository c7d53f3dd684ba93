"""The log of draws: which step got which trajectories, fixed once.

A batch is leased to its step, not to the process that asked. Whoever asks again for the step (the successor of a
trainer that died between SampleBatch and its step, or one that resumes from an earlier checkpoint) gets the same batch,
and it counts as served once. Records live as long as the run, so the steps from any checkpoint on can be replayed batch
by batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from spo import redis_keys
from spo.spec.job_spec import SourceName

MAX_STEP = 2**32 - 1
BATCHES_PER_READ = 500


class BatchLog:
    """All runs' draws on one Redis; safe to use from many threads and processes."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._record = client.register_script((Path(__file__).parent / "lua" / "record_batch.lua").read_text())

    def recorded(self, run_id: str, step: int) -> list[str]:
        """Ids already fixed for a step, [] when none are."""
        known: Any = self.client.get(redis_keys.replay_batch(run_id, step))
        return known.decode().split() if known else []

    def record(
        self,
        run_id: str,
        step: int,
        trajectory_ids: Sequence[str],
        drawn: Mapping[SourceName, int],
        after: int | None = None,
    ) -> list[str]:
        """Fix the ids of a step unless another request did so before; returns the ids that hold.

        [] when `after` is not the number of the last draw: the choice was made without knowing of a later one.
        """
        pairs = [part for source, count in drawn.items() for part in (source, count)]
        held: Any = self._record(
            keys=[
                redis_keys.replay_batch(run_id, step),
                redis_keys.replay_counters(run_id),
                redis_keys.replay_draws(run_id),
            ],
            args=[" ".join(trajectory_ids), step, "" if after is None else after, *pairs],
        )
        return held.decode().split()  # type: ignore[no-any-return]


class SampleCounts:
    """The steps that got each trajectory of a run, mirrored from the log; the log only grows."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.draws_read = 0
        self._steps: dict[str, array[int]] = {}

    def refresh(self) -> None:
        """Take in what has been drawn since the last look, by whichever process."""
        while True:
            steps: Any = self.client.zrangebyscore(
                redis_keys.replay_draws(self.run_id), f"({self.draws_read}", "+inf", start=0, num=BATCHES_PER_READ
            )
            if not steps:
                return
            batches: Any = self.client.mget([redis_keys.replay_batch(self.run_id, int(step)) for step in steps])
            for step, ids in zip(steps, batches, strict=True):
                for trajectory_id in ids.decode().split():
                    self._steps.setdefault(trajectory_id, array("L")).append(int(step))
            self.draws_read += len(steps)

    def of(self, trajectory_id: str) -> Sequence[int]:
        """Steps in the order of draws; one twice where its batch holds the trajectory twice."""
        return self._steps.get(trajectory_id, ())

    def times(self, trajectory_id: str) -> int:
        """How often a trajectory was drawn."""
        return len(self.of(trajectory_id))
