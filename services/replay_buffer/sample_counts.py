"""Which steps a trajectory was sampled for, mirrored in memory from the log of batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.replay_buffer.memory import is_marked
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger

log = get_logger("sample_counts")

BATCHES_PER_READ = 500
FORGOTTEN_AT_ONCE = 2000


class SampleCounts:
    """The steps of each trajectory of a run, of batches that are on record; a refresh reads only what is new."""

    def __init__(self, client: RedisClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.batches_read = 0
        self._first = 1
        self._steps: dict[str, array[int]] = {}

    def refresh(self) -> None:
        """Read the batches that were recorded since the last refresh, by whichever process."""
        self._forget_with_redis()
        while True:
            steps = self.client.zrangebyscore(
                redis_keys.replay_batch_log(self.run_id),
                f"({self.batches_read}",
                "+inf",
                start=0,
                num=BATCHES_PER_READ,
                withscores=True,
            )
            if not steps and not self._is_ahead():
                return
            if not steps:
                self.batches_read, self._first = 0, 1
                self._steps.clear()
                continue
            batches = self.client.mget([redis_keys.replay_batch(self.run_id, int(step)) for step, _ in steps])
            for (step, _), ids in zip(steps, batches, strict=True):
                # One that is gone was forgotten since the log was read: nothing of it is served any more.
                for trajectory_id in ids.decode().split() if ids else ():
                    # What is learned again from memory is no turn of the window's.
                    if is_marked(trajectory_id):
                        continue
                    self._steps.setdefault(trajectory_id, array("L")).append(int(step))
            self.batches_read = int(steps[-1][1])

    def _forget_with_redis(self) -> None:
        """Begin anew when most of what is held has been forgotten: memory follows what the log keeps."""
        oldest = self.client.zrange(redis_keys.replay_batch_log(self.run_id), 0, 0, withscores=True)
        first = int(oldest[0][1]) if oldest else self.batches_read + 1
        if first - self._first > FORGOTTEN_AT_ONCE:
            self._steps, self.batches_read, self._first = {}, first - 1, first

    def _is_ahead(self) -> bool:
        """Whether more was read than Redis has: it came back without the last batches, as after a failover."""
        newest = self.client.zrevrange(redis_keys.replay_batch_log(self.run_id), 0, 0, withscores=True)
        recorded, known = int(newest[0][1]) if newest else 0, self.batches_read
        if recorded < known:
            log.error(
                "Redis was set back: batches that it lost are not counted", run=self.run_id, lost=known - recorded
            )
        return recorded < known

    def steps_of(self, trajectory_id: str) -> Sequence[int]:
        """Steps in the order they were sampled; one twice where its batch holds the trajectory twice."""
        return self._steps.get(trajectory_id, ())

    def times(self, trajectory_id: str) -> int:
        """How often a trajectory was sampled."""
        return len(self.steps_of(trajectory_id))
