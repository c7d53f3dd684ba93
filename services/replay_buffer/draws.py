"""The log of draws: which step got which trajectories, fixed once.

A batch is leased to its step, not to the process that asked. Whoever asks again for the step (the successor of a
trainer that died between SampleBatch and its step, or one that resumes from an earlier checkpoint) gets the same batch,
and it counts as served once. Records live as long as the run, so the steps from any checkpoint on can be replayed batch
by batch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from spo import redis_keys
from spo.job_spec import SourceName

MAX_STEP = 2**32 - 1
_STEP = struct.Struct(">I")


class DrawLog:
    """All runs' draws on one Redis; safe to use from many threads and processes."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._record = client.register_script((Path(__file__).parent / "record_batch.lua").read_text())

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
        limited: int,
        limit: int,
    ) -> list[str]:
        """Fix the ids of a step unless another request did so before; returns the ids that hold.

        The first `limited` ids are drawn at most `limit` times: [] when others were quicker and one has had its turns.
        """
        pairs = [part for source, count in drawn.items() for part in (source, count)]
        held: Any = self._record(
            keys=[
                redis_keys.replay_batch(run_id, step),
                redis_keys.replay_counters(run_id),
                redis_keys.replay_draws(run_id),
                *(redis_keys.replay_uses(run_id, each) for each in trajectory_ids),
            ],
            args=[" ".join(trajectory_ids), step, _STEP.pack(step), limited, limit, *pairs],
        )
        return held.decode().split()  # type: ignore[no-any-return]

    def uses(self, run_id: str, trajectory_id: str, start: int, count: int) -> tuple[list[int], int]:
        """Steps that got a trajectory, in the order of draws, from the start-th on; and how many there are in all."""
        key = redis_keys.replay_uses(run_id, trajectory_id)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.strlen(key)
            pipe.getrange(key, start * _STEP.size, (start + count) * _STEP.size - 1)
            length, packed = pipe.execute()
        return [step for (step,) in _STEP.iter_unpack(packed)], length // _STEP.size
