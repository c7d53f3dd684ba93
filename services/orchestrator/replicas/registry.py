"""Who is alive: heartbeats register replicas, silence drops them; inference replicas are given to a run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Precondition
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.jobs.store import JobStore
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.capped_log import append_record
from spo.observability.logs import get_logger
from spo.rpc.inference_client import TIME_BYTES
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("replicas")

POOLS = ("inference", "sandbox-judge", "replay-buffer", "value-estimation", "trainer", "orchestrator")
HEARTBEAT_SECONDS = 2.0
COUNT_SECONDS = 0.5
WRITE_SECONDS = 0.2
LINES_KEPT = 20_000
MAX_LINE = 4000


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
        stamped = now_ms().to_bytes(TIME_BYTES, "big") + request.SerializeToString()
        heard = Heard(time.monotonic(), _news(request))
        before = self._heard.get(request.replica_id)
        # Who may be forgotten by now is read anew.
        if before and before.news == heard.news and heard.at - before.at < self.silence_seconds / 2:
            self._refresh(request.replica_id, stamped)
        else:
            self._register(request, stamped)
        self._heard[request.replica_id] = heard

    def _refresh(self, replica_id: str, stamped: bytes) -> None:
        """Note that a replica lives; several are written in one go, at the latest with the next heartbeat."""
        with self._lock:
            self._unwritten[replica_id] = stamped
            if time.monotonic() - self._wrote_at < WRITE_SECONDS:
                return
            self._wrote_at = time.monotonic()
            unwritten, self._unwritten = self._unwritten, {}
        self.jobs.client.hset(redis_keys.replicas(), mapping=unwritten)

    def _register(self, request: wire.HeartbeatRequest, stamped: bytes) -> None:
        with self._lock:
            # An older one must not be written over it.
            self._unwritten.pop(request.replica_id, None)
        with self.jobs.client.pipeline(transaction=False) as pipe:
            pipe.hget(redis_keys.replicas(), request.replica_id)
            pipe.hset(redis_keys.replicas(), request.replica_id, stamped)
            before = pipe.execute()[0]
        if before is None:
            self._counted = (float("-inf"), {})
        self._tell(_replica(before) if before else None, request)

    def _keep_logs(self, request: wire.HeartbeatRequest) -> None:
        """Write the log lines that came along to the jobs that they name; a line that names none concerns no job."""
        lines = list(request.logs)
        del request.logs[:]
        # A line may name a run whose job was deleted meanwhile: its logs stay deleted.
        named = {line.run_id for line in lines} - {""}
        known = {run_id for run_id in named if self.jobs.client.exists(redis_keys.job_record(run_id))}
        if not known:
            return
        with self.jobs.client.pipeline(transaction=False) as pipe:
            for line in lines:
                if line.run_id not in known:
                    continue
                entry: dict[str, str | int] = {
                    "service": request.pool,
                    "replica_id": request.replica_id,
                    "level": line.level,
                    "at_unix_ms": line.at_unix_ms,
                    "line": line.line[:MAX_LINE],
                }
                append_record(pipe, own_keys.job_logs(line.run_id), entry, LINES_KEPT)
            pipe.execute()

    def _tell(self, before: LiveReplica | None, now: wire.HeartbeatRequest) -> None:
        """Add events for what people watch for: a replica that joined, applied a version, or has a problem."""
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
        record, field = redis_keys.job_record(now.run_id), f"applied:{now.replica_id}"
        highest = self.jobs.client.hget(record, field)
        if int(highest or 0) < now.policy_version:
            guard = Precondition(record, field, (highest or b"").decode())
            writes = [("HSET", record, field, now.policy_version)]
            # Not durably: all replicas tell of a version at once, and would all wait for the append-only file.
            self.jobs.once(now.run_id, guard, "weights_applied", body, writes, durable=False)

    def live(self) -> list[LiveReplica]:
        """Replicas heard of lately, by pool and id."""
        found = self.jobs.client.hgetall(redis_keys.replicas())
        oldest = now_ms() - int(self.silence_seconds * 1000)
        replicas = [_replica(raw) for raw in found.values()]
        alive = [replica for replica in replicas if replica.last_seen_unix_ms >= oldest]
        return sorted(alive, key=lambda replica: (replica.pool, replica.replica_id))

    def drop_silent(self) -> None:
        """Forget replicas that fell silent and say so in the history of the run they served."""
        alive = {replica.replica_id for replica in self.live()}
        found = self.jobs.client.hgetall(redis_keys.replicas())
        for raw_id, raw in found.items():
            if raw_id.decode() in alive:
                continue
            gone = _replica(raw)
            # Only if it is still the same heartbeat: the replica may have come back meanwhile.
            if self.jobs.client.eval(_FORGET, 1, redis_keys.replicas(), raw_id, raw):
                self._heard.pop(gone.replica_id, None)
                say = log.info if gone.draining else log.warning
                say("replica fell silent", replica=gone.replica_id, pool=gone.pool, draining=gone.draining)
                if gone.run_id and self.jobs.client.exists(redis_keys.job_record(gone.run_id)):
                    body = {"replica_id": gone.replica_id, "pool": gone.pool, "draining": gone.draining}
                    self.jobs.append(gone.run_id, "replica_lost", body)

    def counts(self) -> dict[str, int]:
        """Live replicas per pool, as of COUNT_SECONDS ago at most: documents that people read ask often."""
        counted_at, counts = self._counted
        if time.monotonic() - counted_at > COUNT_SECONDS:
            counts = dict(Counter(replica.pool for replica in self.live()))
            self._counted = time.monotonic(), counts
        return counts


# KEYS: replicas.  ARGV: replica id, its last heartbeat as read.
_FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


def _news(beat: wire.HeartbeatRequest) -> tuple[object, ...]:
    return (beat.pool, beat.address, beat.pid, beat.run_id, beat.policy_version, beat.draining, beat.problem)


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
        last_seen_unix_ms=int.from_bytes(raw[:TIME_BYTES], "big"),
    )
