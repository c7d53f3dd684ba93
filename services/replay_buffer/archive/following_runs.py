"""Which runs still read another's ledger, and what of it they would take."""

from __future__ import annotations

from dataclasses import dataclass

from services.replay_buffer.sampling_index import FOLLOWED_POSITION
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import rule_of
from spo import redis_keys
from spo.errors import NotFound
from spo.spec.job_state import TERMINAL, JobState


@dataclass(frozen=True)
class FollowingRun:
    """Its position in the followed run's ledger, and the oldest version of that run that it still takes."""

    position: int
    oldest_version: int

    def would_take(self, number: int, version: int) -> bool:
        """Whether it will copy a trajectory of this insertion number and version when it comes there."""
        return number > self.position and version >= self.oldest_version


def runs_following(store: ReplayStore, run_id: str) -> list[FollowingRun]:
    """The runs that have not ended and follow this one."""
    client = store.client
    with client.pipeline(transaction=False) as pipe:
        for state in JobState:
            if state not in TERMINAL:
                pipe.zrange(redis_keys.jobs_in_state(state), 0, -1)
        unfinished = [member.decode() for members in pipe.execute() for member in members]
    newest = int(client.hget(redis_keys.replay_counters(run_id), "policy_version") or 0)
    found = []
    for follower in unfinished:
        try:
            spec = store.spec(follower)
        except NotFound:
            continue
        if spec.rollout.follow == run_id:
            position = int(client.hget(redis_keys.replay_counters(follower), FOLLOWED_POSITION) or 0)
            ages = (spec.replay.max_staleness, rule_of(spec, "shared").max_age_versions)
            oldest = newest - min(age for age in ages if age is not None)
            found.append(FollowingRun(position, oldest))
    return found
