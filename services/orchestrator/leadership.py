"""One orchestrator leads at a time: a lock in Redis, whose epoch goes into every write of the one that holds it.

A second process waits as standby and takes over once the lock has expired, or at once where it sees that the holder's
process is dead. An old leader that was stopped and wakes up is refused by its epoch, whatever it was about to write,
and ends. Times are Redis' own, so no clock of a machine decides who leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis

from services.orchestrator import redis_keys as own_keys
from spo.errors import NotReady
from spo.messaging.connection import as_spo_error
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.service.process_identity import is_dead, own_identity

log = get_logger("leadership")

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
        self._reason = f"{found.holder} at {found.address or 'an unknown address'} leads; this one is standby"
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
            try:
                self.client.eval(_RELEASE, 1, own_keys.leader(), self.holder)
            except redis.RedisError as error:
                log.warning("the lead is not given back; it expires by itself", reason=str(error))


@dataclass(frozen=True)
class _Answer:
    leads: bool
    holder: str
    epoch: int
    identity: str
    address: str
