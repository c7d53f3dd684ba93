"""The orchestrator's only way to change a job: preconditions, writes, transition and event in one atomic step.

A crash before the step leaves nothing, a crash after it leaves everything, and of two attempts only the first one
meets its preconditions: each transition happens exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.leadership import IS_LEADER, LeaderFence
from services.orchestrator.leadership import Word as Word
from services.orchestrator.leadership import Write as Write
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.messaging.redis_client import RedisClient, RedisPipeline
from spo.spec.job_state import JobState

DURABLE_WAIT_MS = 5000

# Whether somebody holds a lease at this moment of Redis' clock. Where no orchestrator answered when it would have been
# renewed, its holder gets a whole lease from the end of that outage.
LEASE_IS_LIVE = """
local function lease_is_live(lease, leader, now, lease_ms)
  local held = redis.call('HMGET', lease, 'trainer_id', 'expires_unix_ms')
  local expires = tonumber(held[2] or '0')
  if not held[1] or held[1] == '' then return false end
  if expires > now + 2 * lease_ms then
    -- The server's clock was set back: one lease from now.
    expires = now + lease_ms
    redis.call('HSET', lease, 'expires_unix_ms', expires)
  end
  if expires > now then return true end
  local served = redis.call('HMGET', leader, 'since_unix_ms', 'away_unix_ms')
  return expires >= tonumber(served[2] or '0') and now < tonumber(served[1] or '0') + lease_ms
end
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# KEYS: 1 state, 2 events, 3 record, 4 lease, 5 key of the guard, 6 leader.  (Keys of the writes travel inside them: one
# server, no cluster slots.)
# ARGV: 1 job id, 2 states expected (comma separated, '' any, 'absent' none), 3 new state or '', 4 trainer or '',
#       5 epoch, 6 guard field or '', 7 guard value expected ('' absent), 8 event kind or '', 9 body, 10 actor, 11 time,
#       12 prefix of the state sets, 13 leading orchestrator or '', 14 its epoch, 15 ms by which the lease is extended
#       or 0, 16 trainer that claims the lease or '', then the writes: number of words, words.
# Returns {outcome, seq, state before, guard value}.
_STEPS = f"""
{IS_LEADER}
{LEASE_IS_LIVE}
if not is_leader(KEYS[6], ARGV[13], ARGV[14]) then return {{'leader', 0, '', ''}} end
local state = redis.call('GET', KEYS[1]) or 'absent'
-- Whatever does not expect it writes nothing of a job that is absent: a deleted job stays deleted.
local expected = ARGV[2]
if expected == '' then
  if state == 'absent' then return {{'state', 0, state, ''}} end
elseif not string.find(',' .. expected .. ',', ',' .. state .. ',', 1, true) then
  return {{'state', 0, state, ''}}
end
if ARGV[4] ~= '' then
  local owner = redis.call('HMGET', KEYS[4], 'trainer_id', 'epoch')
  if owner[1] ~= ARGV[4] or owner[2] ~= ARGV[5] then return {{'fence', 0, state, ''}} end
end
if ARGV[6] ~= '' then
  local found = redis.call('HGET', KEYS[5], ARGV[6]) or ''
  if found ~= ARGV[7] then return {{'guard', 0, state, found}} end
end
local lease_ms = tonumber(ARGV[15])
if lease_ms > 0 then
  if ARGV[16] ~= '' and redis.call('HGET', KEYS[4], 'trainer_id') ~= ARGV[16]
    and lease_is_live(KEYS[4], KEYS[6], now_ms(), lease_ms) then
    return {{'held', 0, state, ''}}
  end
  redis.call('HSET', KEYS[4], 'expires_unix_ms', now_ms() + lease_ms)
end
local at = 17
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
if ARGV[3] ~= '' then
  redis.call('SET', KEYS[1], ARGV[3])
  redis.call('ZREM', ARGV[12] .. state, ARGV[1])
  redis.call('ZADD', ARGV[12] .. ARGV[3], redis.call('HGET', KEYS[3], 'created_unix_ms'), ARGV[1])
end
local seq = 0
if ARGV[8] ~= '' then
  local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
  seq = newest and tonumber(string.match(newest[1], '^%d+')) + 1 or 1
  local before = state == 'absent' and '' or state
  redis.call('XADD', KEYS[2], seq .. '-0', 'at', ARGV[11], 'actor', ARGV[10], 'kind', ARGV[8], 'body', ARGV[9],
    'from', ARGV[3] ~= '' and before or '', 'to', ARGV[3])
  redis.call('HSET', KEYS[3], 'updated_at', ARGV[11])
end
return {{'done', seq, state, ''}}
"""
# A full Redis must not keep anybody from cancelling, pausing or deleting: what steers jobs is small, and has what
# lies between maxmemory and the memory of the machine. What brings new work in is refused as a whole, before a write.
_COMMIT = f"#!lua flags=allow-oom\n{_STEPS}"
_COMMIT_NEEDING_ROOM = f"#!lua\n{_STEPS}"


@dataclass(frozen=True)
class Durability:
    """The copies that a change is waited for: Redis' append-only file, and so many of its replicas."""

    append_only_file: bool = True
    replicas: int = 0


@dataclass(frozen=True)
class Fence:
    """Only the holder of this lease may do it."""

    trainer_id: str
    epoch: int


@dataclass(frozen=True)
class LeaseTerm:
    """The lease lasts so long from now on; with a claimant: only where no other trainer holds it."""

    milliseconds: int
    claimant: str = ""


@dataclass(frozen=True)
class Precondition:
    """Only while this hash field holds this value ('' = is absent)."""

    key: str
    field: str
    value: str = ""


@dataclass(frozen=True)
class CommitOutcome:
    """What became of a commit: "done", or the precondition that did not hold; state is the one before it."""

    verdict: Literal["done", "state", "fence", "guard", "held"]
    seq: int
    state: str
    guard_value: str

    @property
    def done(self) -> bool:
        return self.verdict == "done"


@dataclass(frozen=True)
class Commit:
    """One change of one job; `JobStore.commit` makes it.

    Without expected states the job must only be there. `needs_room`: it brings new work in, and waits while Redis is
    full.
    """

    job_id: str
    expected: Iterable[JobState | Literal["absent"]] = ()
    to: JobState | None = None
    fence: Fence | None = None
    guard: Precondition | None = None
    writes: Sequence[Write] = ()
    kind: str = ""
    body: str = "{}"
    actor: str = "orchestrator"
    term: LeaseTerm | None = None
    needs_room: bool = False

    def run(self, client: RedisClient, leader: LeaderFence, durable: Durability) -> CommitOutcome:
        """Apply it and return when the copies hold it.

        Raises NotLeading when another orchestrator leads by now, NotReady (code "not_durable") when a copy was late:
        a power loss or a failover may undo the change; PreconditionFailed (code "no_append_only_file") where there is
        no such file by now; redis.OutOfMemoryError, with nothing written, where it needs room and Redis is full.
        """
        script = _COMMIT_NEEDING_ROOM if self.needs_room else _COMMIT
        with client.pipeline(transaction=False) as pipe:
            pipe.eval(script, 6, *self._keys(), *self._arguments(leader))
            if durable.append_only_file:
                # On the same connection: WAITAOF waits for the writes of its own connection only.
                pipe.execute_command("WAITAOF", 1, 0, DURABLE_WAIT_MS)
            if durable.replicas:
                pipe.execute_command("WAIT", durable.replicas, DURABLE_WAIT_MS)
            replies = _replies(pipe)
        verdict, seq, state, guard_value = replies[0]
        if verdict == b"leader":
            raise leader.refusal()
        if durable.append_only_file and int(replies[1][0]) < 1:
            raise NotReady("Redis did not write its append-only file in time", code="not_durable")
        if durable.replicas and int(replies[-1]) < durable.replicas:
            message = f"{int(replies[-1])} of {durable.replicas} replicas of Redis had the change in time"
            raise NotReady(message, code="not_durable")
        return CommitOutcome(verdict.decode(), int(seq), state.decode(), guard_value.decode())

    def _keys(self) -> tuple[str, ...]:
        job = self.job_id
        guard_key = self.guard.key if self.guard else redis_keys.job_record(job)
        keys = redis_keys.run_state(job), own_keys.job_events(job), redis_keys.job_record(job)
        return (*keys, own_keys.job_lease(job), guard_key, own_keys.leader())

    def _arguments(self, leader: LeaderFence) -> list[Word]:
        fence = self.fence or Fence("", 0)
        guard = self.guard or Precondition("", "")
        term = self.term or LeaseTerm(0)
        head: list[Word] = [self.job_id, ",".join(self.expected), self.to or "", fence.trainer_id, fence.epoch]
        head += [guard.field, guard.value, self.kind, self.body, self.actor, timestamp(), redis_keys.jobs_in_state("")]
        head += [leader.holder, leader.epoch, term.milliseconds, term.claimant]
        return head + [word for write in self.writes for word in (len(write), *write)]


def _replies(pipe: RedisPipeline) -> list[Any]:
    try:
        return pipe.execute()
    except redis.ResponseError as error:
        if "WAITAOF" not in str(error):
            raise
        raise without_append_only_file("Redis") from error


def without_append_only_file(address: str) -> PreconditionFailed:
    """Why a Redis without such a file is refused, and how it is accepted."""
    return PreconditionFailed(
        f"{address} keeps no append-only file: a crash loses what was acknowledged. Switch it on (appendonly yes), "
        "or accept it with SPO_ORCHESTRATOR_DURABLE_WRITES=false; docs/deploying.md says what may be lost",
        code="no_append_only_file",
    )


def timestamp() -> str:
    """Now, RFC 3339 UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
