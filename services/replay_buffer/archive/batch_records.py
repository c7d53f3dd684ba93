"""The recorded batches of a run: what a trainer may ask for again, and which records may be forgotten."""

from __future__ import annotations

from services.replay_buffer.memory import ids_of
from spo import redis_keys
from spo.messaging.redis_client import RedisClient

BATCHES_KEPT = 1000
BATCHES_PER_READ = 200


class BatchRecords:
    """The log of batches as of the last `refresh`, for one pass."""

    def __init__(self, client: RedisClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        # Number of the last batch that is known.
        self.drawn = 0
        self._steps: list[int] = []
        self._named: set[str] = set()
        self._named_read = 0
        self._named_after: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the batches that were recorded since."""
        drawn = int(self.client.hget(redis_keys.replay_counters(self.run_id), "drawn") or 0)
        found = self.client.zrangebyscore(redis_keys.replay_batch_log(self.run_id), f"({self.drawn}", drawn)
        self._steps += map(int, found)
        self.drawn = drawn

    def named_after(self, step: int) -> frozenset[str] | set[str]:
        """Ids of the trajectories in batches of later steps."""
        if self._named_after != step:
            self._named, self._named_read, self._named_after = set(), 0, step
        later = [known for known in self._steps[self._named_read :] if known > step]
        self._named_read = len(self._steps)
        for ids in self._read(later):
            self._named.update(ids)
        return self._named

    def forget(self, step: int, *, keep_named: bool) -> int:
        """Remove the records up to a step but for the newest BATCHES_KEPT; returns how many.

        keep_named: also keep those with a trajectory that may still be sampled, since they count how often it was.
        """
        old = [known for known in self._steps[:-BATCHES_KEPT] if known <= step]
        removed = 0
        for start in range(0, len(old), BATCHES_PER_READ):
            chunk = old[start : start + BATCHES_PER_READ]
            if keep_named:
                pairs = zip(chunk, self._read(chunk), strict=True)
                chunk = [known for known, ids in pairs if not self._any_live(ids)]
            if not chunk:
                continue
            with self.client.pipeline(transaction=True) as pipe:
                pipe.zrem(redis_keys.replay_batch_log(self.run_id), *map(str, chunk))
                pipe.delete(*(redis_keys.replay_batch(self.run_id, known) for known in chunk))
                pipe.execute()
            removed += len(chunk)
        return removed

    def _any_live(self, ids: list[str]) -> bool:
        if not ids:
            return False
        found = self.client.zmscore(redis_keys.replay_source(self.run_id, "online"), ids)
        shared = self.client.zmscore(redis_keys.replay_source(self.run_id, "shared"), ids)
        return any(number is not None for number in (*found, *shared))

    def _read(self, steps: list[int]) -> list[list[str]]:
        found: list[list[str]] = []
        for start in range(0, len(steps), BATCHES_PER_READ):
            keys = [redis_keys.replay_batch(self.run_id, step) for step in steps[start : start + BATCHES_PER_READ]]
            found += map(ids_of, self.client.mget(keys))
        return found
