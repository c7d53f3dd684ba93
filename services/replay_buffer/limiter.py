"""How fast online experience may come in and be served, in Reverb's terms; pure numbers.

With inserted and sampled counted in online trajectories, diff = inserted * samples_per_insert - sampled:
- an insert is admissible while diff + samples_per_insert <= error_buffer, or while inserted < min_online;
- a batch with n online trajectories is admissible when inserted >= min_online and diff - n >= -error_buffer.
The buffer is widened to one batch plus one insert, so at least one of the two is always admissible (no deadlock).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spo.job_spec import JobSpec


@dataclass(frozen=True)
class Limiter:
    """Limits of one run; counts are online trajectories since its start."""

    min_online: int
    samples_per_insert: float
    error_buffer: float
    group: int

    @staticmethod
    def of(spec: JobSpec) -> Limiter:
        """The limiter a spec asks for, widened so that it cannot block both sides."""
        per_batch = math.ceil(spec.replay.online_share * spec.trainer.batch_size)
        group = spec.rollout.samples_per_prompt
        return Limiter(
            min_online=spec.replay.min_online,
            samples_per_insert=spec.replay.samples_per_insert,
            # Prompts come in whole groups: the slack must hold one besides the batch.
            error_buffer=max(float(spec.replay.error_buffer), per_batch + group * spec.replay.samples_per_insert),
            group=group,
        )

    def admissible_inserts(self, inserted: int, sampled: int) -> int:
        """Online trajectories that may still come in, >= 0."""
        diff = inserted * self.samples_per_insert - sampled
        room = math.floor((self.error_buffer - diff) / self.samples_per_insert)
        # The last missing few must still let a whole group in.
        missing = max(self.min_online - inserted, self.group) if inserted < self.min_online else 0
        return max(0, room, missing)

    def may_sample(self, inserted: int, sampled: int, count: int) -> bool:
        """Whether a batch with `count` online trajectories may be served now."""
        diff = inserted * self.samples_per_insert - sampled
        return inserted >= self.min_online and diff - count >= -self.error_buffer
