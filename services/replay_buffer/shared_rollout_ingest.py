"""Shared rollouts: a run that follows another takes over what the other's ledger gets, into a view of its own.

The followed run's ledger only grows and numbers its trajectories, so a follower is a position in it, as a consumer
group is in a stream. It reads when its own limiter has room, and nobody waits for it. Entering is by id and the
position moves afterwards: a killed service's successor enters again what is there already, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import redis

from services.replay_buffer.admission import check_judged, check_scored, sort_out
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.reference_scores import ReferenceScores, note_hop
from services.replay_buffer.sampler import BatchSampler
from services.replay_buffer.sampling_index import FOLLOWED_POSITION
from services.replay_buffer.storage_monitor import StorageMonitor
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import read_fact
from spo import redis_keys
from spo.errors import IntegrityError
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.spec.job_state import JobState
from spo.v1.prompt_pb2 import SOURCE_SHARED
from spo.v1.trajectory_pb2 import Trajectory

log = get_logger("shared_rollouts")

LOOK_SECONDS = 0.5
AT_ONCE = 256
SCORE_PATIENCE_SECONDS = 10.0

# KEYS: counters of the follower.  ARGV: position as read, position now, how many of those between were left out.
# Of two services that read the same, only the first moves the position.
_MOVE = """
if (redis.call('HGET', KEYS[1], 'followed') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'followed', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'left_out', ARGV[3])
return 1
"""


class Found(NamedTuple):
    """What a follower takes over next, the position after it, and how many were looked at."""

    trajectory_ids: list[str]
    position: int
    seen: int


@dataclass(frozen=True)
class SharedRolloutIngest:
    """Looks at the running jobs that follow another, every LOOK_SECONDS."""

    sampler: BatchSampler
    scores: ReferenceScores
    storage: StorageMonitor

    @property
    def store(self) -> ReplayStore:
        return self.sampler.store

    def run(self, stop: threading.Event) -> None:
        """Take over until stop is set; what fails is tried again at the next look and delays no other run."""
        while not stop.wait(LOOK_SECONDS):
            try:
                running = self.store.client.zrange(redis_keys.jobs_in_state(JobState.RUNNING), 0, -1)
            except redis.RedisError as error:
                log.warning("Redis does not answer; trying again", reason=str(error))
                continue
            for run_id in map(bytes.decode, running):
                try:
                    self.take(run_id, stop)
                except Exception as error:
                    # Whatever it was (Redis full, value-estimation away), the followed run's ledger still has it.
                    log.warning("rollouts are not taken over yet; trying again", run=run_id, reason=str(error))

    def take(self, run_id: str, stop: threading.Event) -> int:
        """Take over as many trajectories as the follower's limiter admits; returns how many were entered.

        Raises SpoError, RedisError; what was entered before stays.
        """
        followed = self.store.spec(run_id).rollout.follow
        entered = 0
        while followed and not stop.is_set() and not self.storage.pressure():
            index = self.sampler.index(run_id)
            rule = index.rule("shared")
            with index.lock:
                index.refresh(["shared"])
                room = Limiter.of(index.spec, "shared").admissible_inserts(index.live(rule))
                position, oldest = index.counters.get(FOLLOWED_POSITION, 0), index.oldest_version(rule)
            found = self._after(followed, position, oldest, room) if room else Found([], position, 0)
            if found.position == position:
                break
            sampled = [_shared(run_id, followed, each) for each in self._read(followed, found.trajectory_ids)]
            kept = self._enter(run_id, sampled, stop)
            entered += kept
            words = (position, found.position, found.seen - kept)
            self.store.client.eval(_MOVE, 1, redis_keys.replay_counters(run_id), *words)
        return entered

    def _after(self, followed: str, position: int, oldest: int, room: int) -> Found:
        """The next ones of version `oldest` or newer, as many as there is room for; those before them are passed by."""
        numbered = self.store.client.zrangebyscore(
            redis_keys.replay_source(followed, "online"), f"({position}", "+inf", start=0, num=AT_ONCE, withscores=True
        )
        ids = [trajectory_id for trajectory_id, _ in numbered]
        facts = self.store.client.hmget(redis_keys.replay_facts(followed), ids) if ids else []
        fresh: list[str] = []
        seen = 0
        for (trajectory_id, number), fact in zip(numbered, facts, strict=True):
            if len(fresh) == room or fact is None:
                break
            position, seen = int(number), seen + 1
            if read_fact("", fact.decode())[0].version >= oldest:
                fresh.append(trajectory_id.decode())
        return Found(fresh, position, seen)

    def _read(self, followed: str, trajectory_ids: Sequence[str]) -> list[Trajectory]:
        found = self.store.get(followed, trajectory_ids)
        gone = sum(each is None for each in found)
        if gone:
            # It may be on its way out: then its ledger is gone at the next look.
            raise IntegrityError(f"{gone} trajectories of {followed} are gone from the buffer")
        return [each for each in found if each is not None]

    def _enter(self, run_id: str, trajectories: Sequence[Trajectory], stop: threading.Event) -> int:
        spec = self.store.spec(run_id)
        judged, refusals = sort_out(trajectories, lambda each: check_judged(run_id, spec, each))
        # The reference is the same by the check at submit, so log-probs that came along are as good as new ones.
        unscored = [each for each in judged if not each.reference_logprobs]
        if unscored and spec.trainer.reference == "cached":
            self.scores.add(run_id, unscored, patience_seconds=SCORE_PATIENCE_SECONDS, stop=stop)
        scored, more_refusals = sort_out(judged, lambda each: check_scored(spec, each))
        refusals += more_refusals
        if refusals:
            log.warning("rollouts were left out", run=run_id, left_out=len(refusals), first=str(refusals[0])[:500])
        note_hop(scored)
        self.store.insert(run_id, scored)
        metrics.REPLAY_INSERTS.labels(result="refused").inc(len(refusals))
        return len(scored)


def _shared(run_id: str, followed: str, sampled: Trajectory) -> Trajectory:
    """The follower's copy: an id of its own, and everything the sampler said, its versions and log-probs included."""
    copy = Trajectory()
    copy.CopyFrom(sampled)
    copy.trajectory_id = redis_keys.trajectory_id(
        run_id,
        f"{followed}/{sampled.trajectory_id}",
        sampled.sample_index,
        sampled.attempt,
        sampled.policy_version_first,
    )
    copy.run_id = run_id
    copy.source = SOURCE_SHARED
    copy.origin_run_id = followed
    copy.parents[:] = [sampled.trajectory_id]
    return copy
