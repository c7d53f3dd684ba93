"""Who is alive and serves what: replicas registered by heartbeats, given to runs, and the groups in hand.

Which inference replica serves which run: in proportion to the jobs' priorities, at least one each where possible.
A replica moves only when jobs or replicas came or went, and only once that has settled: a move costs it the groups in
flight and perhaps a new model.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import IS_LEADER, Commit, Precondition, Write
from services.orchestrator.job_records import equal_for_tenants, tenants_of
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.errors import InvalidInput, PreconditionFailed
from spo.messaging.redis_client import record_words
from spo.observability import MAX_CHARACTERS, get_logger, head_and_tail
from spo.rpc.pools import TIME_BYTES
from spo.spec.section import HOLDS_SLOT, JobState
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("replicas")

POOLS = (
    *("inference", "sandbox-judge", "verifier", "replay-buffer", "value-estimation", "trainer", "orchestrator"),
    "tinker",
)
HEARTBEAT_SECONDS = 2.0
COUNT_SECONDS = 0.5
WRITE_SECONDS = 0.2
LINES_KEPT = 20_000
ENDS_KEPT = 500

IN_HAND_SECONDS = 2.0

SETTLE_SECONDS = 5.0
# Ended runs that are served at a time, and how long after the last request.
MOST_IN_USE = 4
IN_USE_SECONDS = 300.0
SERVED = HOLDS_SLOT - {JobState.CANCELLING}


@dataclass(frozen=True)
class LiveReplica:
    """One live process as it described itself."""

    replica_id: str
    pool: str
    address: str
    pid: int
    run_id: str
    policy_version: int
    load: float
    draining: bool
    problem: str
    # Of attention heads that its engine takes; empty: all, or it has not said.
    head_sizes: frozenset[int]
    # Of each device that it computes on, bytes; empty: it has not said, or it needs none. accelerated: they are no CPU.
    device_memory_bytes: tuple[int, ...]
    accelerated: bool
    # Inference: the run whose model it has given up on.
    refused_run_id: str
    last_seen_unix_ms: int


@dataclass(frozen=True)
class Heard:
    """A replica's last heartbeat of this process: when it came, and what of it people act on."""

    at: float
    news: tuple[object, ...]


class ReplicaRegistry:
    """The registry; everything is in Redis, so a restarted orchestrator knows its replicas at once."""

    def __init__(self, jobs: JobStore, silence_seconds: float) -> None:
        self.jobs = jobs
        self.silence_seconds = silence_seconds
        self._counted: tuple[float, dict[str, int]] = (float("-inf"), {})
        self._lock = threading.Lock()
        self._heard: dict[str, Heard] = {}
        self._unwritten: dict[str, bytes] = {}
        self._wrote_at = float("-inf")

    def beat(self, request: wire.HeartbeatRequest) -> None:
        """Register or refresh a replica; a draining one is kept until it falls silent. Raises InvalidInput."""
        if request.pool not in POOLS or not request.replica_id:
            raise InvalidInput(f"a heartbeat needs a replica_id and a pool of {', '.join(POOLS)}", code="bad_heartbeat")
        self._keep_logs(request)
        beat = request.SerializeToString()
        heard = Heard(time.monotonic(), _news(request))
        before = self._heard.get(request.replica_id)
        # Who may be forgotten by now is read anew.
        if before and before.news == heard.news and heard.at - before.at < self.silence_seconds / 2:
            self._refresh(request.replica_id, beat)
        else:
            self._register(request, beat)
        self._heard[request.replica_id] = heard

    def _refresh(self, replica_id: str, beat: bytes) -> None:
        """Note that a replica lives; several are written in one go, at the latest with the next heartbeat."""
        with self._lock:
            self._unwritten[replica_id] = beat
            if time.monotonic() - self._wrote_at < WRITE_SECONDS:
                return
            self._wrote_at = time.monotonic()
            unwritten, self._unwritten = self._unwritten, {}
        self._write(unwritten)

    def _register(self, request: wire.HeartbeatRequest, beat: bytes) -> None:
        with self._lock:
            # An older one must not be written over it.
            self._unwritten.pop(request.replica_id, None)
        before = self._write({request.replica_id: beat})
        if not before:
            self._counted = (float("-inf"), {})
        self._tell(_replica(before) if before else None, request)

    def _write(self, beats: Mapping[str, bytes]) -> bytes:
        """Note heartbeats as of now; returns what was stored of the first replica before. Raises NotLeading."""
        fence = self.jobs.fence
        words = [word for beat in beats.items() for word in beat]
        keys = redis_keys.replicas(), own_keys.leader()
        reply = self.jobs.client.eval(_BEAT, len(keys), *keys, fence.holder, fence.epoch, *words)
        if not isinstance(reply, list):
            raise fence.refusal()
        return bytes(reply[0])

    def _keep_logs(self, request: wire.HeartbeatRequest) -> None:
        """Write the log lines that came along to the jobs that they name; a line that names none concerns no job."""
        lines = list(request.logs)
        del request.logs[:]
        records: dict[str, list[Write]] = {}
        for line in lines:
            if line.run_id:
                entry: dict[str, str | int] = {
                    "service": request.pool,
                    "replica_id": request.replica_id,
                    "level": line.level,
                    "at_unix_ms": line.at_unix_ms,
                    "line": head_and_tail(line.line, MAX_CHARACTERS),
                }
                write = record_words(own_keys.job_logs(line.run_id), entry, LINES_KEPT)
                records.setdefault(line.run_id, []).append(write)
        try:
            for run_id, writes in records.items():
                # A line may name a run whose job was deleted meanwhile: then nothing is written.
                self.jobs.commit(Commit(run_id, writes=writes, needs_room=True), durable=False)
        except redis.OutOfMemoryError:
            # The replica has written them to its own output too; its heartbeat is worth more.
            log.warning("log lines of jobs are left out: Redis is full", replica=request.replica_id)

    def _tell(self, before: LiveReplica | None, now: wire.HeartbeatRequest) -> None:
        """Add events for what people watch for: a replica that joined, applied a version, has a problem, or gave up."""
        if before is not None and before.pid != now.pid and not before.draining:
            self._note_end(before.pool, before.replica_id, before.pid)
        given_up = now.refused_run_id
        if given_up and (before is None or before.refused_run_id != given_up):
            body = {"replica_id": now.replica_id, "pool": now.pool, "problem": now.problem[:500]}
            self.jobs.append(given_up, "replica_gave_up", body)
        # Nearly every heartbeat has no news, and then costs no look at the job.
        same = before is not None and (before.run_id, before.policy_version, before.problem) == (
            now.run_id,
            now.policy_version,
            now.problem,
        )
        if same or not now.run_id or not self.jobs.client.exists(redis_keys.job_record(now.run_id)):
            return
        about = {"replica_id": now.replica_id, "pool": now.pool}
        if before is None or before.run_id != now.run_id:
            self.jobs.append(now.run_id, "replica_joined", about | {"version": now.policy_version})
        elif before.policy_version != now.policy_version:
            self._tell_applied(now, about | {"version": now.policy_version})
        if now.problem and (before is None or before.problem != now.problem):
            self.jobs.append(now.run_id, "replica_problem", about | {"problem": now.problem[:500]})

    def _tell_applied(self, now: wire.HeartbeatRequest, body: dict[str, Any]) -> None:
        # A replica that evaluates goes back to older versions and forth: only a new height is news.
        applied = own_keys.applied_versions(now.run_id)
        highest = self.jobs.client.hget(applied, now.replica_id)
        if int(highest or 0) < now.policy_version:
            guard = Precondition(applied, now.replica_id, (highest or b"").decode())
            writes = [("HSET", applied, now.replica_id, now.policy_version)]
            # Not durably: all replicas tell of a version at once, and would all wait for the append-only file.
            self.jobs.once(now.run_id, guard, "weights_applied", body, writes, durable=False)

    def live(self) -> list[LiveReplica]:
        """Replicas heard of lately, by pool and id."""
        return self._split()[0]

    def _split(self) -> tuple[list[LiveReplica], dict[bytes, bytes]]:
        """Live replicas, and the silent ones as stored, by Redis' clock.

        After an outage of the orchestrator or of Redis nobody is silent before the whole time has passed again: while
        nobody listened, silence meant nothing.
        """
        with self.jobs.client.pipeline(transaction=True) as pipe:
            pipe.hgetall(redis_keys.replicas())
            pipe.hget(own_keys.leader(), "since_unix_ms")
            pipe.execute_command("TIME")
            stored, since, (seconds, microseconds) = pipe.execute()
        oldest = int(seconds) * 1000 + int(microseconds) // 1000 - int(self.silence_seconds * 1000)
        if int(since or 0) > oldest:
            oldest = 0
        silent = {name: raw for name, raw in stored.items() if int.from_bytes(raw[:TIME_BYTES], "big") < oldest}
        alive = [_replica(raw) for name, raw in stored.items() if name not in silent]
        return sorted(alive, key=lambda replica: (replica.pool, replica.replica_id)), silent

    def drop_silent(self) -> None:
        """Forget replicas that fell silent and say so in the history of the run they served."""
        fence, keys = self.jobs.fence, (redis_keys.replicas(), own_keys.leader())
        for raw_id, raw in self._split()[1].items():
            gone = _replica(raw)
            # Only if it is still the same heartbeat: the replica may have come back meanwhile.
            if self.jobs.client.eval(_FORGET, len(keys), *keys, fence.holder, fence.epoch, raw_id, raw):
                self._heard.pop(gone.replica_id, None)
                say = log.info if gone.draining else log.warning
                say("replica fell silent", replica=gone.replica_id, pool=gone.pool, draining=gone.draining)
                if not gone.draining:
                    self._note_end(gone.pool, gone.replica_id, gone.pid)
                if gone.run_id and self.jobs.client.exists(redis_keys.job_record(gone.run_id)):
                    body = {"replica_id": gone.replica_id, "pool": gone.pool, "draining": gone.draining}
                    forgotten = ("HDEL", own_keys.applied_versions(gone.run_id), gone.replica_id)
                    self.jobs.append(gone.run_id, "replica_lost", body, [forgotten])

    def _note_end(self, pool: str, replica_id: str, pid: int) -> None:
        key = own_keys.replica_ends()
        member = f"{pool} {replica_id} {pid}"
        self.jobs.write(("ZADD", key, int(time.time() * 1000), member), ("ZREMRANGEBYRANK", key, 0, -(ENDS_KEPT + 1)))

    def ended_since(self, unix_ms: int) -> dict[str, int]:
        """How many processes of each pool ended without draining since then, as far as they had ever been heard of."""
        found = self.jobs.client.zrangebyscore(own_keys.replica_ends(), unix_ms, "+inf")
        return dict(Counter(member.decode().partition(" ")[0] for member in found))

    def counts(self) -> dict[str, int]:
        """Live replicas per pool, as of COUNT_SECONDS ago at most: documents that people read ask often."""
        counted_at, counts = self._counted
        if time.monotonic() - counted_at > COUNT_SECONDS:
            counts = dict(Counter(replica.pool for replica in self.live()))
            self._counted = time.monotonic(), counts
        return counts


# KEYS: replicas, leader.  ARGV: holder, epoch, then replica ids and their heartbeats.  Returns {the first one before}.
_BEAT = f"""#!lua flags=allow-oom
{IS_LEADER}
if not is_leader(KEYS[2], ARGV[1], ARGV[2]) then return 'leader' end
local time = redis.call('TIME')
local stamp = struct.pack('>I8', time[1] * 1000 + math.floor(time[2] / 1000))
local before = redis.call('HGET', KEYS[1], ARGV[3]) or ''
for at = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], stamp .. ARGV[at + 1]) end
return {{before}}
"""

# KEYS: replicas, leader.  ARGV: holder, epoch, replica id, its last heartbeat as read.
_FORGET = f"""#!lua flags=allow-oom
{IS_LEADER}
if not is_leader(KEYS[2], ARGV[1], ARGV[2]) or redis.call('HGET', KEYS[1], ARGV[3]) ~= ARGV[4] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[3])
"""


def _news(beat: wire.HeartbeatRequest) -> tuple[object, ...]:
    return (
        beat.pool,
        beat.address,
        beat.pid,
        beat.run_id,
        beat.policy_version,
        beat.draining,
        beat.problem,
        beat.refused_run_id,
    )


def _replica(raw: bytes) -> LiveReplica:
    beat = wire.HeartbeatRequest.FromString(raw[TIME_BYTES:])
    return LiveReplica(
        replica_id=beat.replica_id,
        pool=beat.pool,
        address=beat.address,
        pid=beat.pid,
        run_id=beat.run_id,
        policy_version=beat.policy_version,
        load=beat.load,
        draining=beat.draining,
        problem=beat.problem,
        head_sizes=frozenset(beat.head_sizes),
        device_memory_bytes=tuple(beat.device_memory_bytes),
        accelerated=beat.accelerated,
        refused_run_id=beat.refused_run_id,
        last_seen_unix_ms=int.from_bytes(raw[:TIME_BYTES], "big"),
    )


class GroupsInHand:
    """Ready replicas by run, and the groups that the replay buffer's limiter has for each of them. Thread-safe."""

    def __init__(self, live: Callable[[], Sequence[LiveReplica]], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._groups: dict[str, int] = {}
        self._ready: tuple[float, Counter[str]] = (float("-inf"), Counter())
        self._lock = threading.Lock()

    def ready_replicas(self, run_id: str) -> int:
        """Inference replicas that serve a run, as of COUNT_SECONDS ago at most."""
        with self._lock:
            counted_at, ready = self._ready
            if self._clock() - counted_at > IN_HAND_SECONDS:
                ready = Counter(
                    replica.run_id
                    for replica in self._live()
                    if replica.pool == "inference" and replica.run_id and not replica.draining
                )
                self._ready = self._clock(), ready
        return ready[run_id]

    def learn(self, run_id: str, groups: int) -> None:
        """Note what the limiter has for each replica of the run; 0: no limit."""
        self._groups[run_id] = groups

    def forget(self, run_id: str) -> None:
        """The run is dispatched no more."""
        self._groups.pop(run_id, None)

    def of(self, run_id: str) -> int:
        """Groups for each replica of the run; 0: no limit is known."""
        return self._groups.get(run_id, 0)


def fair_counts(replicas: int, weights: Mapping[str, float]) -> dict[str, int]:
    """How many replicas each run gets; weights in order of precedence.

    One each as far as they go, the rest by Sainte-Lague's divisors: a further replica moves no other.
    """
    found = dict.fromkeys(weights, 0)
    for run_id in list(weights)[:replicas]:
        found[run_id] = 1
    for _ in range(replicas - len(weights) if weights else 0):
        found[max(weights, key=lambda run_id: weights[run_id] / (found[run_id] + 0.5))] += 1
    return found


def assign(replicas: Sequence[str], current: Mapping[str, str], weights: Mapping[str, float]) -> dict[str, str]:
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

    def wanted(self) -> dict[str, float]:
        """Runs that want replicas with their weights, first in precedence first.

        Jobs under way go first, without any the run under evaluation; then runs whose policies people use.
        """
        runs = self.worked_on()
        kept = self.kept_warm()
        people = kept | {run_id: 1 for run_id in self.in_use() if run_id not in kept}
        return runs | {run_id: weight for run_id, weight in people.items() if run_id not in runs}

    def worked_on(self) -> dict[str, float]:
        """Jobs under way with their weights, equal shares for tenants; without any the run under evaluation."""
        jobs = self.jobs.in_states(SERVED)
        runs = equal_for_tenants(self.jobs.by_priority(jobs), tenants_of(self.jobs.client, jobs))
        if not runs:
            examined = self.jobs.client.get(own_keys.evaluated_run())
            runs = {examined.decode(): 1.0} if examined else {}
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


def serving(replicas: Sequence[LiveReplica], job_id: str) -> list[LiveReplica]:
    """The inference replicas of a run."""
    return [replica for replica in replicas if replica.pool == "inference" and replica.run_id == job_id]


def applied_by(replicas: Sequence[LiveReplica], job_id: str, version: int) -> dict[str, list[str]]:
    """Which inference replicas of the run serve a version, do not yet, or could not."""
    found = serving(replicas, job_id)
    return {
        "applied": [replica.replica_id for replica in found if replica.policy_version >= version],
        "pending": [r.replica_id for r in found if r.policy_version < version and not r.problem],
        "failed": [r.replica_id for r in found if r.policy_version < version and r.problem],
    }
