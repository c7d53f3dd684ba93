"""The orchestrator's only way to change a job, in one atomic step, fenced by the epoch of the one orchestrator that
leads.

One orchestrator leads at a time: a lock in Redis, whose epoch goes into every write of the one that holds it.
A second process waits as standby and takes over once the lock has expired, or at once where it sees that the holder's
process is dead. An old leader that was stopped and wakes up is refused by its epoch, whatever it was about to write,
and ends. Times are Redis' own, so no clock of a machine decides who leads.

The orchestrator's only way to change a job: preconditions, writes, transition and event in one atomic step.
A crash before the step leaves nothing, a crash after it leaves everything, and of two attempts only the first one
meets its preconditions: each transition happens exactly once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import redis

from services.orchestrator import redis_keys as own_keys
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.messaging.redis_client import RedisClient, RedisPipeline, as_spo_error, unless_away
from spo.observability import get_logger
from spo.spec.section import TERMINAL, JobState

_PROC = Path("/proc")

log = get_logger("commit")

Word = str | bytes | int | float
Write = Sequence[Word]

LEADER_SECONDS = 10.0
RENEW_SECONDS = 2.0
# Without a renewal for so long (the process stopped, Redis was away) nobody could renew a lease with us either.
OUTAGE_SECONDS = 5.0

# KEYS: leader.  ARGV: holder, lease ms, outage ms, process identity, address, holder known to be dead or '', own epoch.
# Returns {1 when it leads, holder, epoch, unix ms since when it serves without an outage, identity, address}.
_TAKE = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'expires_unix_ms', 'renewed_unix_ms', 'since_unix_ms')
local holder, epoch, lease = held[1] or '', tonumber(held[2] or '0'), tonumber(ARGV[2])
local expires, since = tonumber(held[3] or '0'), tonumber(held[5] or '0')
if expires > now + 2 * lease then
  -- The server's clock was set back: the holder gets one lease from now.
  expires = now + lease
  redis.call('HSET', KEYS[1], 'expires_unix_ms', expires)
end
if holder ~= ARGV[1] then
  if holder ~= '' and holder ~= ARGV[6] and expires > now then
    local told = redis.call('HMGET', KEYS[1], 'identity', 'address')
    return {0, holder, epoch, since, told[1] or '', told[2] or ''}
  end
  epoch, since = math.max(epoch, tonumber(ARGV[7])) + 1, now
elseif math.abs(now - tonumber(held[4] or '0')) > tonumber(ARGV[3]) then
  since = now
end
if since == now then redis.call('HSET', KEYS[1], 'away_unix_ms', held[4] or '0') end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', epoch, 'expires_unix_ms', now + lease, 'renewed_unix_ms', now,
  'since_unix_ms', since, 'identity', ARGV[4], 'address', ARGV[5])
return {1, ARGV[1], epoch, since, ARGV[4], ARGV[5]}
"""

# KEYS: leader.  ARGV: holder.
_RELEASE = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('HSET', KEYS[1], 'holder', '') end
"""

# Lua for scripts whose writes only the leader may make: whether KEYS[leader] is still who ARGV[at], ARGV[at + 1] say.
# A holder of '' is a tool beside the orchestrator, which takes no part in the election.
IS_LEADER = """
local function is_leader(key, holder, epoch)
  if holder == '' then return true end
  local now = redis.call('HMGET', key, 'holder', 'epoch')
  return now[1] == holder and now[2] == epoch
end
"""

# KEYS: leader.  ARGV: holder, epoch, then the writes: number of words, words.  Returns their replies, or 'leader'.
_WRITE = f"""#!lua flags=allow-oom
{IS_LEADER}
if not is_leader(KEYS[1], ARGV[1], ARGV[2]) then return 'leader' end
local replies, at = {{}}, 3
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  replies[#replies + 1] = redis.call(unpack(ARGV, at + 1, at + words)) or ''
  at = at + words + 1
end
return replies
"""

DURABLE_WAIT_MS = 5000

# Whether somebody holds a lease at this moment of Redis' clock. Where no orchestrator answered when it would have been
# renewed, its holder gets a whole lease from the end of that outage.
LEASE_IS_LIVE = """
local function lease_is_live(lease, leader, now, lease_ms)
  local held = redis.call('HMGET', lease, 'trainer_id', 'expires_unix_ms')
  local expires = tonumber(held[2] or '0')
  if not held[1] or held[1] == '' then return false end
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
-- Before the first write: a script that fails is not undone; what is no record or no stream of events fails here.
redis.call('HLEN', KEYS[3])
local listed = ARGV[3] ~= '' and redis.call('ZSCORE', ARGV[12] .. state, ARGV[1]) or '0'
local newest = ARGV[8] ~= '' and redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
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
  local created = string.match(redis.call('HGET', KEYS[3], 'created_unix_ms') or '', '^%d+$')
  redis.call('ZADD', ARGV[12] .. ARGV[3], created or listed, ARGV[1])
end
local seq = 0
if ARGV[8] ~= '' then
  seq = newest and tonumber(string.match(newest[1], '^%d+')) + 1 or 1
  local before = state == 'absent' and '' or state
  redis.call('XADD', KEYS[2], seq .. '-0', 'at', ARGV[11], 'actor', ARGV[10], 'kind', ARGV[8], 'body', ARGV[9],
    'from', ARGV[3] ~= '' and before or '', 'to', ARGV[3])
  local ended = string.find(',{",".join(sorted(TERMINAL))},', ',' .. state .. ',', 1, true) -- served or renamed since
  if ARGV[3] ~= '' or not ended then redis.call('HSET', KEYS[3], 'updated_at', ARGV[11]) end
end
return {{'done', seq, state, ''}}
"""
# A full Redis must not keep anybody from cancelling, pausing or deleting: what steers jobs is small, and has what
# lies between maxmemory and the memory of the machine. What brings new work in is refused as a whole, before a write.
_COMMIT = f"#!lua flags=allow-oom\n{_STEPS}"
_COMMIT_NEEDING_ROOM = f"#!lua\n{_STEPS}"


def own_identity() -> str:
    """Boot of the machine, namespace of process ids, pid and the process's start in clock ticks since the boot."""
    pid = os.getpid()
    return f"{_place()}/{pid}/{_started(pid)}"


def is_dead(identity: str) -> bool:
    """Whether that process certainly runs no more; one of another machine or container is never known to be dead."""
    place, _, process = identity.partition("/")
    pid, _, started = process.partition("/")
    return place == _place() and pid.isdecimal() and _started(int(pid)) != started


def _place() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink(_PROC / 'self/ns/pid')}"


def _started(pid: int) -> str:
    """The start of a running process; "" when there is none, or it has ended and only waits to be noticed."""
    try:
        # The name in parentheses may hold anything; the state is the first field after it, the start the twentieth.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class NotLeading(NotReady):
    """Another orchestrator leads, or none yet; whoever asks again is answered by the leader."""

    default_code = "not_leading"


@dataclass(frozen=True)
class LeaderFence:
    """Who leads in which epoch, as a write names it; the default takes no part in the election."""

    holder: str = ""
    epoch: int = 0

    def write(self, client: RedisClient, writes: Sequence[Write]) -> list[object]:
        """Make writes in one atomic step, only while this fence holds; returns their replies. Raises NotLeading."""
        if not writes:
            return []
        words = [word for write in writes for word in (len(write), *write)]
        replies = client.eval(_WRITE, 1, own_keys.leader(), self.holder, self.epoch, *words)
        if not isinstance(replies, list):
            raise self.refusal()
        return replies

    def refusal(self) -> NotLeading:
        """The error of a write that was refused."""
        return NotLeading(f"this orchestrator does not lead any more: its epoch {self.epoch} is over")


class Leadership:
    """This process's part in the election; `fence` goes into each of its writes."""

    def __init__(
        self, client: RedisClient, holder: str, address: str = "", lease_seconds: float = LEADER_SECONDS
    ) -> None:
        self.client = client
        self.holder = holder
        self.address = address
        self.lease_seconds = lease_seconds
        self.fence = LeaderFence(holder, 0)
        self._identity = own_identity()
        self._renewed_at = float("-inf")
        self._other = ""
        self._reason = "no orchestrator leads yet"

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it can know: a process that was stopped must first ask again."""
        return self.fence.epoch > 0 and time.monotonic() - self._renewed_at < self.lease_seconds

    def require(self) -> None:
        """Raises NotLeading, naming who does lead where that is known."""
        if not self.leads:
            raise NotLeading(self._reason)

    def take(self) -> bool:
        """Take the lead where it is free, or renew it; whether this process leads. Raises NotLeading when it is lost.

        Once another has led, a process that led before must not lead again: what it remembers is out of date.
        """
        before, asked_at = self.fence.epoch, time.monotonic()
        found = self._ask("")
        if not found.leads and found.holder != self.holder and is_dead(found.identity):
            log.warning("the process of the leader is dead; taking over", leader=found.holder, epoch=found.epoch)
            found = self._ask(found.holder)
        self._reason = (
            "this orchestrator leads, but its lease was renewed too late: it answers again after the next renewal"
            if found.holder == self.holder
            else f"{found.holder} at {found.address or 'an unknown address'} leads; this one is standby"
        )
        if found.leads and (not before or found.epoch in (before, before + 1)):
            self.fence, self._renewed_at = LeaderFence(self.holder, found.epoch), asked_at
            if found.epoch != before:
                log.info("leads", epoch=found.epoch, holder=self.holder)
            return True
        if before:
            self._renewed_at = float("-inf")
            raise NotLeading(f"the lead of epoch {before} is lost: {self._reason}", code="lead_lost")
        if found.holder != self._other:
            self._other = found.holder
            log.info("standby", leader=found.holder, address=found.address, epoch=found.epoch)
        return False

    def _ask(self, dead_holder: str) -> _Answer:
        lease_ms, outage_ms = int(self.lease_seconds * 1000), int(OUTAGE_SECONDS * 1000)
        told = (self.holder, lease_ms, outage_ms, self._identity, self.address, dead_holder, self.fence.epoch)
        reply = self.client.eval(_TAKE, 1, own_keys.leader(), *told)
        assert isinstance(reply, list)
        leads, holder, epoch, _, identity, address = reply
        return _Answer(bool(leads), holder.decode(), int(epoch), identity.decode(), address.decode())

    def run(self, stop: threading.Event) -> None:
        """Take and keep the lead until stop. Raises NotLeading when it was lost to another."""
        while not stop.is_set():
            try:
                pause = RENEW_SECONDS if self.take() else RENEW_SECONDS / 2
            except redis.RedisError as error:
                self._reason = f"the lead could not be asked for: {as_spo_error(error).message}"
                log.warning("Redis does not confirm who leads; trying again", reason=str(error))
                pause = RENEW_SECONDS / 2
            stop.wait(pause)

    def while_leading(self, worker: Callable[[threading.Event], None]) -> Callable[[threading.Event], None]:
        """The worker, begun once this process leads."""

        def begun(stop: threading.Event) -> None:
            while not self.leads:
                if stop.wait(0.05):
                    return
            worker(stop)

        begun.__name__ = getattr(worker, "__name__", "worker")
        return begun

    def release(self) -> None:
        """Let another lead at once; without an answer of Redis it waits for the lock to expire."""
        if self.fence.epoch:
            with unless_away("the lead is not given back; it expires by itself"):
                self.client.eval(_RELEASE, 1, own_keys.leader(), self.holder)


@dataclass(frozen=True)
class _Answer:
    leads: bool
    holder: str
    epoch: int
    identity: str
    address: str


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
        a power loss or a failover may undo the change, or (code "no_append_only_file") where there is no such file now;
        redis.OutOfMemoryError, with nothing written, where it needs room and Redis is full.
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
        # Only for now: it was there when the process began, and may be switched on again.
        raise NotReady(without_append_only_file("Redis").message, code="no_append_only_file") from error


def without_append_only_file(address: str) -> PreconditionFailed:
    """Why a Redis without such a file is refused, and how it is accepted."""
    return PreconditionFailed(
        f"{address} keeps no append-only file: a crash loses what was acknowledged. Switch it on (appendonly yes), "
        "or accept it with SPO_ORCHESTRATOR_DURABLE_WRITES=false; docs/deploying.md says what may be lost",
        code="no_append_only_file",
    )


def now_ms() -> int:
    """Wall clock, unix milliseconds."""
    return int(time.time() * 1000)


def timestamp() -> str:
    """Now, RFC 3339 UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
