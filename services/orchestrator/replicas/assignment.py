"""Which inference replica serves which run: in proportion to the jobs' priorities, at least one each where possible.

A replica moves only when jobs or replicas came or went, and only once that has settled: a move costs it the groups in
flight and perhaps a new model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.registry import ReplicaRegistry
from spo import redis_keys
from spo.errors import PreconditionFailed
from spo.observability.logs import get_logger
from spo.spec.job_state import HOLDS_SLOT, JobState

log = get_logger("assignment")

SETTLE_SECONDS = 5.0
# Ended runs that are served at a time, and how long after the last request.
MOST_IN_USE = 4
IN_USE_SECONDS = 300.0
SERVED = HOLDS_SLOT - {JobState.CANCELLING}


def fair_counts(replicas: int, weights: Mapping[str, int]) -> dict[str, int]:
    """How many replicas each run gets; weights in order of precedence.

    One each as far as they go, the rest by Sainte-Lague's divisors: a further replica moves no other.
    """
    found = dict.fromkeys(weights, 0)
    for run_id in list(weights)[:replicas]:
        found[run_id] = 1
    for _ in range(replicas - len(weights) if weights else 0):
        found[max(weights, key=lambda run_id: weights[run_id] / (found[run_id] + 0.5))] += 1
    return found


def assign(replicas: Sequence[str], current: Mapping[str, str], weights: Mapping[str, int]) -> dict[str, str]:
    """The run of each replica, "" for none; a replica stays with its run while the run may keep it."""
    left = fair_counts(len(replicas), weights)
    found: dict[str, str] = {}
    for replica_id in replicas:
        run_id = current.get(replica_id, "")
        if left.get(run_id, 0) > 0:
            found[replica_id] = run_id
            left[run_id] -= 1
    free = (run_id for run_id, count in left.items() for _ in range(count))
    return {replica_id: found[replica_id] if replica_id in found else next(free, "") for replica_id in replicas}


class ReplicaAssigner:
    """Keeps the assignment in Redis, so that a restarted orchestrator moves nobody. Safe from several threads."""

    def __init__(
        self,
        jobs: JobStore,
        replicas: ReplicaRegistry,
        settle_seconds: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs = jobs
        self.replicas = replicas
        self.settle_seconds = settle_seconds
        self.clock = clock
        self._lock = threading.Lock()
        self._situation: tuple[object, float] = (None, 0.0)

    def wanted(self) -> dict[str, int]:
        """Runs that want replicas with their weights, first in precedence first.

        Jobs under way go first, without any the run under evaluation; then runs whose policies people use.
        """
        runs = self.worked_on()
        kept = self.kept_warm()
        people = kept | {run_id: 1 for run_id in self.in_use() if run_id not in kept}
        return runs | {run_id: weight for run_id, weight in people.items() if run_id not in runs}

    def worked_on(self) -> dict[str, int]:
        """Jobs under way with their priorities, without any the run under evaluation."""
        runs = self.jobs.by_priority(self.jobs.in_states(SERVED))
        if not runs:
            examined = self.jobs.client.get(own_keys.evaluated_run())
            runs = {examined.decode(): 1} if examined else {}
        return runs

    def kept_warm(self) -> dict[str, int]:
        """Runs that served names keep replicas for, with how many."""
        kept = self.jobs.client.hgetall(own_keys.kept_warm())
        return self._existing({run_id.decode(): int(least) for run_id, least in sorted(kept.items())})

    def note_use(self, job_id: str) -> None:
        """Let replicas that jobs leave free serve an ended run, until nobody has asked for it for IN_USE_SECONDS."""
        key, now = own_keys.runs_in_use(), time.time()
        self.jobs.write(("ZREMRANGEBYSCORE", key, 0, now), ("ZADD", key, now + IN_USE_SECONDS, job_id))

    def in_use(self) -> list[str]:
        """The runs that were asked for last, a few of them, and none that was deleted since."""
        newest = self.jobs.client.zrevrange(own_keys.runs_in_use(), 0, MOST_IN_USE - 1, withscores=True)
        asked = [raw.decode() for raw, until in newest if until > time.time()]
        return list(self._existing(dict.fromkeys(asked, 1)))

    def _existing(self, runs: Mapping[str, int]) -> dict[str, int]:
        exists = self.jobs.client.exists
        return {run_id: weight for run_id, weight in runs.items() if exists(redis_keys.run_spec(run_id))}

    def run_of(self, replica_id: str) -> str:
        """The run that a replica is to serve, or "". One that nobody has assigned yet is assigned at once."""
        stored = self.jobs.client.hget(own_keys.assignments(), replica_id)
        run_id = stored.decode() if stored else ""
        wanted = self.wanted()
        if run_id in wanted or not (wanted or run_id):
            return str(run_id)
        if len(wanted) == 1:
            # Everybody serves the only run: a thousand newcomers need not be weighed against each other.
            (only,) = wanted
            self.jobs.write(("HSET", own_keys.assignments(), replica_id, only))
            log.info("replica assigned", replica=replica_id, before=run_id or "none", run=only)
            return only
        return self.balance().get(replica_id, "")

    def balance(self) -> dict[str, str]:
        """Bring the assignment up to date and return it."""
        with self._lock:
            live = [replica for replica in self.replicas.live() if replica.pool == "inference" and not replica.draining]
            ids = [replica.replica_id for replica in live]
            runs = self.wanted()
            current = self.assignments()
            target = assign(ids, current, runs)
            if not self._has_settled(
                (runs, ids), moves=any(current.get(replica_id) in runs for replica_id in _moved(current, target))
            ):
                staying = {replica_id for replica_id in ids if current.get(replica_id) in runs}
                target = {replica_id: (current if replica_id in staying else target)[replica_id] for replica_id in ids}
            self._write(current, target)
            return target

    def serving(self, job_id: str) -> list[str]:
        """Ids of the replicas assigned to a run."""
        return sorted(replica_id for replica_id, run_id in self.assignments().items() if run_id == job_id)

    def require_served(self, job_id: str) -> None:
        """Raise PreconditionFailed (code "model_not_served") once all replicas of a run have given up on its model."""
        serving = self.serving(job_id)
        live = [replica for replica in self.replicas.live() if replica.replica_id in serving and not replica.draining]
        if live and all(replica.refused_run_id == job_id for replica in live):
            raise PreconditionFailed(
                f"none of {len(live)} inference replicas can serve the model; {live[0].problem}",
                code="model_not_served",
            )

    def left_out(self, job_id: str) -> bool:
        """Whether other runs have replicas and this one has none."""
        assigned = set(self.assignments().values()) - {""}
        return bool(assigned) and job_id not in assigned

    def _has_settled(self, situation: object, *, moves: bool) -> bool:
        """Whether replicas may be taken from runs: when the same runs and replicas were there for settle_seconds."""
        if situation != self._situation[0]:
            self._situation = (situation, self.clock())
        return not moves or self.clock() - self._situation[1] >= self.settle_seconds

    def assignments(self) -> dict[str, str]:
        """The run of each replica as stored, "" for none; `balance` brings it up to date."""
        stored = self.jobs.client.hgetall(own_keys.assignments())
        return {replica_id.decode(): run_id.decode() for replica_id, run_id in stored.items()}

    def _write(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        gone = [replica_id for replica_id in before if replica_id not in after]
        changed = {replica_id: after[replica_id] for replica_id in _moved(before, after)}
        removals = [("HDEL", own_keys.assignments(), replica_id) for replica_id in gone]
        self.jobs.write(*removals, *(("HSET", own_keys.assignments(), *moved) for moved in changed.items()))
        for replica_id, run_id in changed.items():
            log.info(
                "replica assigned", replica=replica_id, run=run_id or "none", before=before.get(replica_id, "none")
            )


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [replica_id for replica_id, run_id in after.items() if before.get(replica_id) != run_id]
