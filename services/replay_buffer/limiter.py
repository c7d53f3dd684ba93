"""The rate limiter of inserts and samples, in the terms of Reverb (Cassirer et al., 2021); pure numbers.

Counted in online trajectories, with diff = inserted * samples_per_insert - sampled:
- A batch with n of them is admissible when inserted >= min_online, n different ones can be sampled (or the whole window
  where it holds fewer), and diff - n >= -error_buffer.
- m inserts are admissible while diff + m * samples_per_insert <= insert_buffer. Whatever diff is, the inserts that one
  of the batch's first two conditions lacks are admissible too: min_online is not reached, or too many trajectories of
  the window are stale or incorrect to fill a batch.
With several inference replicas the slack for inserts is wider, so that each has in hand what one has alone: when
batches wait, diff is near -error_buffer and one replica holds 2 * error_buffer / samples_per_insert trajectories; R of
them hold R times as many under an insert_buffer of (2 R - 1) * error_buffer. It ends where what is ahead could be
lost: at the window's size, and at what max_staleness lets a batch be old. Batches know error_buffer alone.
error_buffer is widened to one batch plus one group of inserts, so that a batch or a group is always admissible: where
diff blocks the batch, diff < n - error_buffer <= error_buffer - group * samples_per_insert admits a group.
The same counts hold where whole groups are drawn: the window then keeps as many whole groups as fit, at least one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spo.algorithm.replay_sampling import exact_counts
from spo.spec.job_spec import JobSpec, SourceName

# More than any dispatcher asks for; keeps a tiny samples_per_insert from overflowing.
MAX_ADMISSIBLE = 1_000_000


def groups_kept(spec: JobSpec) -> int:
    """Whole groups that the online window holds, at least one."""
    return max(1, spec.replay.online_capacity // spec.rollout.samples_per_prompt)


@dataclass(frozen=True)
class LiveCounts:
    """Trajectories of a live source inserted and sampled since the run's start, and how many may be sampled now."""

    inserted: int
    sampled: int
    available: int


@dataclass(frozen=True)
class Limiter:
    """The limits of one run on one live source, in trajectories."""

    min_online: int
    samples_per_insert: float
    error_buffer: float
    capacity: int
    per_batch: int
    group: int
    insert_buffer: float

    @staticmethod
    def of(spec: JobSpec, source: SourceName = "online", replicas: int = 1) -> Limiter:
        """The limiter a spec asks for on a live source, widened so that it cannot block both sides.

        replicas: those that sample for the run.
        """
        counts = exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size)
        # As long as nothing is remembered, fresh samples take memory's places.
        taken = {source, "memory"} if source == "online" else {source}
        per_batch = sum(count for part, count in zip(spec.replay.mix, counts, strict=True) if part.source in taken)
        # Prompts are dispatched in whole groups; shared rollouts are copied one by one.
        group = spec.rollout.samples_per_prompt if source == "online" else 1
        capacity = spec.replay.online_capacity
        if spec.replay.unit == "group" and source == "online":
            capacity = groups_kept(spec) * group
        error_buffer = max(float(spec.replay.error_buffer), per_batch + group * spec.replay.samples_per_insert)
        batches = spec.replay.max_staleness * spec.trainer.update_interval
        most = min(capacity * spec.replay.samples_per_insert, float(batches * per_batch))
        return Limiter(
            min_online=spec.replay.min_online,
            samples_per_insert=spec.replay.samples_per_insert,
            error_buffer=error_buffer,
            capacity=capacity,
            per_batch=per_batch,
            group=group,
            insert_buffer=max(error_buffer, min(most, (2 * max(1, replicas) - 1) * error_buffer)),
        )

    def admissible_inserts(self, live: LiveCounts) -> int:
        """Trajectories that may still be inserted, >= 0."""
        if self.per_batch == 0:
            return 0
        diff = live.inserted * self.samples_per_insert - live.sampled
        room = (self.insert_buffer - diff) / self.samples_per_insert
        missing = max(self.min_online - live.inserted, self._needed(self.per_batch) - live.available, 0)
        # Inserts come in whole groups: the last missing few must admit one.
        missing = math.ceil(missing / self.group) * self.group
        return max(0, missing, math.floor(min(room, MAX_ADMISSIBLE)))

    def groups_per_replica(self, replicas: int) -> int:
        """Groups that each replica has in hand when batches wait; 0 where there is nothing to share."""
        if replicas < 1 or self.per_batch == 0:
            return 0
        trajectories = (self.insert_buffer + self.error_buffer) / self.samples_per_insert
        trajectories = max(trajectories, self.min_online, self._needed(self.per_batch))
        return max(1, math.ceil(min(trajectories, MAX_ADMISSIBLE) / self.group / replicas))

    def may_sample(self, live: LiveCounts, count: int) -> bool:
        """Whether a batch with `count` trajectories of the source may be sampled now."""
        diff = live.inserted * self.samples_per_insert - live.sampled
        filled = live.inserted >= self.min_online and live.available >= self._needed(count)
        return filled and diff - count >= -self.error_buffer

    def _needed(self, count: int) -> int:
        return min(count, self.capacity)
