"""Shared rollouts: a run that follows another copies the online trajectories of that run's ledger into its own.

The followed run's ledger only grows and numbers its trajectories, so a follower is a position in it, as a consumer
group is in a stream. It reads while its own limiter admits inserts, and the followed run never waits for it. Inserts
are by id and the position moves afterwards: when this service is killed in between, the same ones are inserted again,
without effect.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import redis

from services.replay_buffer.admission import check_judged, check_scored, split_by
from services.replay_buffer.anchors import forget_anchor
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

POLL_SECONDS = 0.5
ROLLOUTS_PER_READ = 256
SCORE_PATIENCE_SECONDS = 10.0

# KEYS: counters and spec of the follower; without its spec it is deleted.
# ARGV: position as read, position now, how many of those between were left out.
# When two services read the same rollouts, only the first moves the position.
_MOVE = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
if (redis.call('HGET', KEYS[1], 'followed') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'followed', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'left_out', ARGV[3])
return 1
"""


class NextRollouts(NamedTuple):
    """The rollouts to copy next, the position after them, and how many were read to find them."""

    trajectory_ids: list[str]
    position: int
    read: int


@dataclass(frozen=True)
class SharedRolloutIngest:
    """Copies for all running jobs that follow another, every POLL_SECONDS."""

    sampler: BatchSampler
    scores: ReferenceScores
    storage: StorageMonitor

    @property
    def store(self) -> ReplayStore:
        return self.sampler.store

    def run(self, stop: threading.Event) -> None:
        """Copy until stop is set; a run that fails is tried again at the next poll and delays no other."""
        while not stop.wait(POLL_SECONDS):
            try:
                running = self.store.client.zrange(redis_keys.jobs_in_state(JobState.RUNNING), 0, -1)
            except redis.RedisError as error:
                log.warning("Redis does not answer; trying again", reason=str(error))
                continue
            for run_id in map(bytes.decode, running):
                try:
                    self.copy_new(run_id, stop)
                except Exception as error:
                    # Whatever it was (Redis full, value-estimation away), the followed run's ledger still has it.
                    log.warning("shared rollouts are not copied yet; trying again", run=run_id, reason=str(error))

    def copy_new(self, run_id: str, stop: threading.Event) -> int:
        """Copy as many trajectories as the follower's limiter admits; returns how many were inserted.

        Raises SpoError, RedisError; what was inserted before stays.
        """
        followed = self.store.spec(run_id).rollout.follow
        inserted = 0
        while followed and not stop.is_set() and not self.storage.pressure():
            index = self.sampler.index(run_id)
            rule = index.rule("shared")
            with index.lock:
                index.refresh(["shared"])
                room = Limiter.of(index.spec, "shared").admissible_inserts(index.live(rule))
                position, oldest = index.counters.get(FOLLOWED_POSITION, 0), index.oldest_version(rule)
            found = self._after(followed, position, oldest, room) if room else NextRollouts([], position, 0)
            if found.position == position:
                break
            sampled = [_shared(run_id, followed, rollout) for rollout in self._read(followed, found.trajectory_ids)]
            kept = self._insert(run_id, sampled, stop)
            inserted += kept
            arguments = (position, found.position, found.read - kept)
            keys = redis_keys.replay_counters(run_id), redis_keys.run_spec(run_id)
            self.store.client.eval(_MOVE, len(keys), *keys, *arguments)
        return inserted

    def _after(self, followed: str, position: int, oldest: int, room: int) -> NextRollouts:
        """The next `room` rollouts of version `oldest` or newer; older ones are skipped."""
        numbered = self.store.client.zrangebyscore(
            redis_keys.replay_source(followed, "online"),
            f"({position}",
            "+inf",
            start=0,
            num=ROLLOUTS_PER_READ,
            withscores=True,
        )
        ids = [trajectory_id for trajectory_id, _ in numbered]
        facts = self.store.client.hmget(redis_keys.replay_facts(followed), ids) if ids else []
        fresh: list[str] = []
        read = 0
        for (trajectory_id, number), fact in zip(numbered, facts, strict=True):
            if len(fresh) == room or fact is None:
                break
            position, read = int(number), read + 1
            if read_fact("", fact.decode())[0].version >= oldest:
                fresh.append(trajectory_id.decode())
        return NextRollouts(fresh, position, read)

    def _read(self, followed: str, trajectory_ids: Sequence[str]) -> list[Trajectory]:
        found = self.store.get(followed, trajectory_ids)
        gone = found.count(None)
        if gone:
            # The followed run may be under deletion: then its ledger is gone at the next poll.
            raise IntegrityError(f"{gone} trajectories of {followed} are gone from the buffer")
        return [trajectory for trajectory in found if trajectory is not None]

    def _insert(self, run_id: str, trajectories: Sequence[Trajectory], stop: threading.Event) -> int:
        spec = self.store.spec(run_id)
        judged, refusals = split_by(lambda trajectory: check_judged(run_id, spec, trajectory), trajectories)
        # Both runs have the same reference, as submission checks, so log-probs that came along are still right.
        unscored = [trajectory for trajectory in judged if not trajectory.reference_logprobs]
        if unscored and spec.trainer.reference == "cached":
            self.scores.add(run_id, unscored, patience_seconds=SCORE_PATIENCE_SECONDS, stop=stop)
        scored, more_refusals = split_by(lambda trajectory: check_scored(spec, trajectory), judged)
        refusals += more_refusals
        if refusals:
            log.warning("rollouts were left out", run=run_id, left_out=len(refusals), first=str(refusals[0])[:500])
        note_hop(scored)
        self.store.insert(run_id, scored)
        metrics.REPLAY_INSERTS.labels(result="refused").inc(len(refusals))
        return len(scored)


def _shared(run_id: str, followed: str, sampled: Trajectory) -> Trajectory:
    """The follower's copy: an id of its own; text, versions and log-probs as they were sampled."""
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
    forget_anchor(copy)
    return copy
