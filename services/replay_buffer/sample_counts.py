"""Which steps a trajectory was sampled for, mirrored in memory from the log of batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from spo import redis_keys
from spo.errors import IntegrityError
from spo.messaging.redis_client import RedisClient

BATCHES_PER_READ = 500


class SampleCounts:
    """The steps of each trajectory of a run; the log of batches only grows, so a refresh reads only what is new."""

    def __init__(self, client: RedisClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.batches_read = 0
        self._steps: dict[str, array[int]] = {}

    def refresh(self) -> None:
        """Read the batches that were recorded since the last refresh, by whichever process."""
        while True:
            steps = self.client.zrangebyscore(
                redis_keys.replay_batch_log(self.run_id), f"({self.batches_read}", "+inf", start=0, num=BATCHES_PER_READ
            )
            if not steps:
                return
            batches = self.client.mget([redis_keys.replay_batch(self.run_id, int(step)) for step in steps])
            for step, ids in zip(steps, batches, strict=True):
                if ids is None:
                    raise IntegrityError(f"run {self.run_id}: the batch of step {int(step)} is gone from the buffer")
                for trajectory_id in ids.decode().split():
                    self._steps.setdefault(trajectory_id, array("L")).append(int(step))
            self.batches_read += len(steps)

    def steps_of(self, trajectory_id: str) -> Sequence[int]:
        """Steps in the order they were sampled; one twice where its batch holds the trajectory twice."""
        return self._steps.get(trajectory_id, ())

    def times(self, trajectory_id: str) -> int:
        """How often a trajectory was sampled."""
        return len(self.steps_of(trajectory_id))
