"""Who is alive: heartbeats register replicas, silence drops them; inference replicas are given to a run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition, Write
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.leadership import IS_LEADER
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.capped_log import record_words
from spo.observability.job_lines import MAX_CHARACTERS, head_and_tail
from spo.observability.logs import get_logger
from spo.rpc.inference_client import TIME_BYTES
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
