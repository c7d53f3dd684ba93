"""The orchestrator's only way to change a job: preconditions, writes, transition and event in one atomic step.

A crash before the step leaves nothing, a crash after it leaves everything, and of two attempts only the first one
meets its preconditions: each transition happens exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from services.orchestrator import redis_keys as own_keys
from spo import redis_keys
from spo.errors import NotReady
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState

Word = str | bytes | int | float
Write = Sequence[Word]

DURABLE_WAIT_MS = 5000

# KEYS: 1 state, 2 events, 3 record, 4 lease, 5 key of the guard.  (Keys of the writes travel inside them: one server,
# no cluster slots.)
# ARGV: 1 job id, 2 states expected (comma separated, '' any, 'absent' none), 3 new state or '', 4 trainer or '',
#       5 epoch, 6 guard field or '', 7 guard value expected ('' absent), 8 event kind or '', 9 body, 10 actor, 11 time,
#       12 prefix of the state sets, then the writes: number of words, words.
# Returns {outcome, seq, state before, guard value}.
_COMMIT = """
local state = redis.call('GET', KEYS[1]) or 'absent'
if ARGV[2] ~= '' and not string.find(',' .. ARGV[2] .. ',', ',' .. state .. ',', 1, true) then
  return {'state', 0, state, ''}
end
if ARGV[4] ~= '' then
  local owner = redis.call('HMGET', KEYS[4], 'trainer_id', 'epoch')
  if owner[1] ~= ARGV[4] or owner[2] ~= ARGV[5] then return {'fence', 0, state, ''} end
end
if ARGV[6] ~= '' then
  local found = redis.call('HGET', KEYS[5], ARGV[6]) or ''
  if found ~= ARGV[7] then return {'guard', 0, state, found} end
end
local at = 13
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
  seq = redis.call('XLEN', KEYS[2]) + 1
  local before = state == 'absent' and '' or state
  redis.call('XADD', KEYS[2], seq .. '-0', 'at', ARGV[11], 'actor', ARGV[10], 'kind', ARGV[8], 'body', ARGV[9],
    'from', ARGV[3] ~= '' and before or '', 'to', ARGV[3])
  redis.call('HSET', KEYS[3], 'updated_at', ARGV[11])
end
return {'done', seq, state, ''}
"""


@dataclass(frozen=True)
class Fence:
    """Only the holder of this lease may do it."""

    trainer_id: str
    epoch: int


@dataclass(frozen=True)
class Precondition:
    """Only while this hash field holds this value ('' = is absent)."""

    key: str
    field: str
    value: str = ""


@dataclass(frozen=True)
class CommitOutcome:
    """What became of a commit: "done", or the precondition that did not hold; state is the one before it."""

    verdict: Literal["done", "state", "fence", "guard"]
    seq: int
    state: str
    guard_value: str

    @property
    def done(self) -> bool:
        return self.verdict == "done"


@dataclass(frozen=True)
class Commit:
    """One change of one job."""

    job_id: str
    expected: Iterable[JobState | Literal["absent"]] = ()
    to: JobState | None = None
    fence: Fence | None = None
    guard: Precondition | None = None
    writes: Sequence[Write] = ()
    kind: str = ""
    body: str = "{}"
    actor: str = "orchestrator"

    def run(self, client: RedisClient, *, durable: bool) -> CommitOutcome:
        """Apply it; with durable, return only when Redis' append-only file holds it.

        Raises NotReady (code "not_durable") when the file was late: a power loss may undo the change.
        """
        with client.pipeline(transaction=False) as pipe:
            pipe.eval(_COMMIT, 5, *self._keys(), *self._arguments())
            if durable:
                # On the same connection: WAITAOF waits for the writes of its own connection only.
                pipe.execute_command("WAITAOF", 1, 0, DURABLE_WAIT_MS)
            replies = pipe.execute()
        if durable and int(replies[1][0]) < 1:
            raise NotReady("Redis did not write its append-only file in time", code="not_durable")
        verdict, seq, state, guard_value = replies[0]
        return CommitOutcome(verdict.decode(), int(seq), state.decode(), guard_value.decode())

    def _keys(self) -> tuple[str, ...]:
        job = self.job_id
        keys = redis_keys.run_state(job), own_keys.job_events(job), redis_keys.job_record(job)
        return (*keys, own_keys.job_lease(job), self.guard.key if self.guard else redis_keys.job_record(job))

    def _arguments(self) -> list[Word]:
        fence = self.fence or Fence("", 0)
        guard = self.guard or Precondition("", "")
        head: list[Word] = [self.job_id, ",".join(self.expected), self.to or "", fence.trainer_id, fence.epoch]
        head += [guard.field, guard.value, self.kind, self.body, self.actor, timestamp(), redis_keys.jobs_in_state("")]
        return head + [word for write in self.writes for word in (len(write), *write)]


def timestamp() -> str:
    """Now, RFC 3339 UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
