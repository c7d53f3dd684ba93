"""Entries of streams: appended, counted and read, how many wait, and the atomic steps in Lua.

The atomic steps of the streams, in Lua.
Those that only acknowledge, count or move an entry aside say `allow-oom` and also run when the memory of the server is
full. What appends to the next stream says `#!lua` without it, so that the server refuses it as a whole then, and it is
tried again; without that first line an append after an acknowledgement would pass. Bookkeeping of a run is written only
while the run's spec exists: a deleted run gets no key again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import GroupState, RedisClient, StreamEntry, StreamReplies
from spo.observability import Span, begin

Decoded = TypeVar("Decoded", bound=Message)

# One entry less of a run on a stream. Never below none: the counts go with a deleted run, its entries may outlast it.
_UNCOUNT = """
local function uncount(counts, stream)
  if redis.call('HINCRBY', counts, stream, -1) <= 0 then redis.call('HDEL', counts, stream) end
end
"""
_NOW = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""
# Whether a consumer has an entry still: a paused process that wakes up takes nothing back from the one that has it now.
_MINE = """
local function mine(stream, group, consumer, id)
  local pending = redis.call('XPENDING', stream, group, id, id, 1)
  return pending[1] and pending[1][2] == consumer
end
"""

# KEYS: stream, key without which the stream is not made or ''.  ARGV: group.
# Returns 1 when the group is there.
ENSURE_GROUP = """#!lua flags=allow-oom
if KEYS[2] ~= '' and redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
return 1
"""

# KEYS: source stream, next stream, counts of the run, lone deliveries of the source stream.
# ARGV: group, entry id, payload for the next stream, its trace, run that the next entry counts for or '', run that the
#       source entry counted for or ''.
# Returns 1 when this call finished the entry, 0 when another delivery had finished it before.
FORWARD = f"""#!lua
{_UNCOUNT}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
local fields = {{'payload', ARGV[3]}}
if ARGV[4] ~= '' then fields[3], fields[4] = 'trace', ARGV[4] end
if ARGV[5] ~= '' then
  fields[#fields + 1] = 'run'
  fields[#fields + 1] = ARGV[5]
  redis.call('HINCRBY', KEYS[3], KEYS[2], 1)
end
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[4], ARGV[2])
if ARGV[6] ~= '' then uncount(KEYS[3], KEYS[1]) end
return 1
"""

# KEYS: stream, counts of the run, lone deliveries.  ARGV: group, entry id, run that the entry counted for or ''.
FINISH = f"""#!lua flags=allow-oom
{_UNCOUNT}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[2])
if ARGV[3] ~= '' then uncount(KEYS[2], KEYS[1]) end
return 1
"""

# KEYS: stream, its clock.
# ARGV: group, consumer, idle ms, cursor, count, what Redis' time should be by the consumer's own clock or 0, ms that a
#       step has at least.
# Returns the next cursor ('0-0' at the end), entries as {id, fields, deliveries}, Redis' time, and what its clock did;
# an entry that was deleted meanwhile has no fields.
#
# How long an entry is idle goes by Redis' clock. One that stepped back would keep a dead member's entries for the whole
# step, one that stepped forward takes the entries of the living: after a step ('stepped') all are as if they had been
# delivered now, so the dead keep theirs for one idle time and the living go on keeping theirs alive. A consumer that
# looks for the first time, long after anybody did, cannot tell a step forward from an outage: it looks again
# ('unsure') when the living had time to say so.
RECLAIM = f"""#!lua flags=allow-oom
{_NOW}
local at, idle = now(), tonumber(ARGV[3])
local before = tonumber(redis.call('GET', KEYS[2]) or at)
local expected = tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('SET', KEYS[2], at, 'PX', 86400000) end
if at + tonumber(ARGV[7]) < before or (expected > 0 and at > expected + tonumber(ARGV[7])) then
  local from = '-'
  while from do
    local page = redis.call('XPENDING', KEYS[1], ARGV[1], from, '+', 1000)
    for _, pending in ipairs(page) do
      redis.call('XCLAIM', KEYS[1], ARGV[1], pending[2], 0, pending[1], 'IDLE', 0, 'RETRYCOUNT', pending[4], 'JUSTID')
    end
    from = #page == 1000 and '(' .. page[1000][1] or nil
  end
  return {{'0-0', {{}}, at, 'stepped'}}
end
if expected == 0 and at - before > idle + tonumber(ARGV[7]) then return {{ARGV[4], {{}}, at, 'unsure'}} end
local reply = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local entries = {{}}
for _, entry in ipairs(reply[2]) do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)
  entries[#entries + 1] = {{entry[1], entry[2] or {{}}, pending[1] and pending[1][4] or 1}}
end
return {{reply[1], entries, at, ''}}
"""

# KEYS: stream, lone deliveries.  ARGV: group, consumer, idle ms, deliveries after which an entry is handled alone.
# Takes the one of the first such entries that has the fewest deaths to its name: {id, fields, deliveries} or nothing.
TAKE_LONE = """
local least, least_id
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', 1000)) do
  if pending[4] > tonumber(ARGV[4]) then
    local deaths = tonumber(redis.call('HGET', KEYS[2], pending[1]) or 0)
    if not least or deaths < least then least, least_id = deaths, pending[1] end
  end
end
if not least_id then return {} end
local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], least_id)[1]
if not claimed then return {} end
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], least_id, least_id, 1)[1]
return {claimed[1], claimed[2], pending[4]}
"""

# KEYS: stream.  ARGV: group, consumer, entry ids.  Returns how many of them the consumer still has.
KEEP_ALIVE = f"""#!lua flags=allow-oom
{_MINE}
local held = 0
for at = 3, #ARGV do
  if mine(KEYS[1], ARGV[1], ARGV[2], ARGV[at]) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at], 'JUSTID')
    held = held + 1
  end
end
return held
"""

# KEYS: stream, lone deliveries.
# ARGV: group, consumer, idle ms from now on, deliveries to note, 1 to take back what was counted against the entries,
#       else 0, entry ids.
RELEASE = f"""#!lua flags=allow-oom
{_MINE}
for at = 6, #ARGV do
  if mine(KEYS[1], ARGV[1], ARGV[2], ARGV[at]) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at], 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
    if ARGV[5] == '1' then redis.call('HDEL', KEYS[2], ARGV[at]) end
  end
end
return 1
"""

# KEYS: stream.  ARGV: group, consumer, ids of entries that the consumer gave back.
# Returns those that nobody took meanwhile, as {id, fields, deliveries}.
TAKE_BACK = f"""
{_MINE}
local entries = {{}}
for at = 3, #ARGV do
  if mine(KEYS[1], ARGV[1], ARGV[2], ARGV[at]) then
    local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at])[1]
    if claimed then entries[#entries + 1] = {{claimed[1], claimed[2], 1}} end
  end
end
return entries
"""

# KEYS: stream, lone deliveries.  ARGV: group, consumer, entry id, weight of a death, weight at which it is enough.
# Returns the weight of earlier deaths; -1 when another consumer has the entry now. Counts this delivery as a death
# until its end takes that back, unless it is enough already.
BEGIN_ALONE = f"""#!lua flags=allow-oom
{_MINE}
if not mine(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return -1 end
local before = tonumber(redis.call('HGET', KEYS[2], ARGV[3]) or 0)
if before < tonumber(ARGV[5]) then redis.call('HINCRBY', KEYS[2], ARGV[3], ARGV[4]) end
return before
"""

# KEYS: stream.  ARGV: group, ms of silence.  Removes consumers that hold nothing and have been silent for so long.
REMOVE_SILENT = """#!lua flags=allow-oom
local removed = 0
for _, facts in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for at = 1, #facts, 2 do consumer[facts[at]] = facts[at + 1] end
  if consumer['pending'] == 0 and consumer['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer['name'])
    removed = removed + 1
  end
end
return removed
"""

# KEYS: stream, its dead letters, their payloads, their totals, counts of the run in flight, dead letters of the run,
#       spec of the run, lone deliveries.
# ARGV: group, entry id, payload, reason, deliveries, run that the entry counted for or '', run it belongs to or '',
#       trace, most letters, most bytes.
# Returns how many older letters went to make room, -1 when another delivery had finished the entry before.
DEAD_LETTER = f"""#!lua flags=allow-oom
{_UNCOUNT}
{_NOW}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return -1 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[8], ARGV[2])
if ARGV[6] ~= '' then uncount(KEYS[5], KEYS[1]) end
if ARGV[7] ~= '' and redis.call('EXISTS', KEYS[7]) == 1 then
  redis.call('HINCRBY', KEYS[6], KEYS[1], 1)
  redis.call('HSET', KEYS[6], KEYS[1] .. ':reason', ARGV[4])
end
local size = #ARGV[3]
local id = redis.call('XADD', KEYS[2], '*', 'reason', ARGV[4], 'deliveries', ARGV[5], 'at_unix_ms', now(),
  'run', ARGV[7], 'counted', ARGV[6], 'trace', ARGV[8], 'bytes', size)
redis.call('HSET', KEYS[3], id, ARGV[3])
local bytes = redis.call('HINCRBY', KEYS[4], 'bytes', size)
local gone = 0
while redis.call('XLEN', KEYS[2]) > 1
    and (redis.call('XLEN', KEYS[2]) > tonumber(ARGV[9]) or bytes > tonumber(ARGV[10])) do
  local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
  bytes = redis.call('HINCRBY', KEYS[4], 'bytes', -redis.call('HSTRLEN', KEYS[3], oldest[1]))
  redis.call('HDEL', KEYS[3], oldest[1])
  redis.call('XDEL', KEYS[2], oldest[1])
  gone = gone + 1
end
if gone > 0 then redis.call('HINCRBY', KEYS[4], 'gone', gone) end
return gone
"""

# KEYS: dead letters, their payloads, their totals.  ARGV: letter ids.  Returns how many were there.
DROP = """#!lua flags=allow-oom
local dropped = 0
for _, id in ipairs(ARGV) do
  if redis.call('XDEL', KEYS[1], id) == 1 then
    redis.call('HINCRBY', KEYS[3], 'bytes', -redis.call('HSTRLEN', KEYS[2], id))
    redis.call('HDEL', KEYS[2], id)
    dropped = dropped + 1
  end
end
return dropped
"""

# KEYS: stream, its dead letters, their payloads, their totals, counts of the run in flight, dead letters of the run,
#       spec of the run.
# ARGV: letter id.
# Returns 1 when the entry is on its stream again, 0 when the letter is not there, -1 when its run is deleted.
REDRIVE = f"""#!lua
{_UNCOUNT}
local letter = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not letter then return 0 end
local found = {{}}
for at = 1, #letter[2], 2 do found[letter[2][at]] = letter[2][at + 1] end
if found['run'] ~= '' and redis.call('EXISTS', KEYS[7]) == 0 then return -1 end
local fields = {{'payload', redis.call('HGET', KEYS[3], ARGV[1])}}
if found['trace'] ~= '' then fields[3], fields[4] = 'trace', found['trace'] end
if found['counted'] ~= '' then
  fields[#fields + 1] = 'run'
  fields[#fields + 1] = found['counted']
end
redis.call('XADD', KEYS[1], '*', unpack(fields))
if found['counted'] ~= '' then redis.call('HINCRBY', KEYS[5], KEYS[1], 1) end
if found['run'] ~= '' then uncount(KEYS[6], KEYS[1]) end
redis.call('HINCRBY', KEYS[4], 'bytes', -found['bytes'])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('XDEL', KEYS[2], ARGV[1])
return 1
"""

# KEYS: troubles of the run, spec of the run.  ARGV: place, reason, ms after which an older trouble is another one.
NOTE_TROUBLE = f"""#!lua flags=allow-oom
{_NOW}
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local at, since = now(), now()
local before = redis.call('HGET', KEYS[1], ARGV[1])
if before then
  local known = cjson.decode(before)
  if at - known['at_unix_ms'] <= tonumber(ARGV[3]) then since = known['since_unix_ms'] end
end
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({{at_unix_ms = at, since_unix_ms = since, reason = ARGV[2]}}))
redis.call('PEXPIRE', KEYS[1], 10 * ARGV[3])
return 1
"""


@dataclass(frozen=True)
class Entry:
    """One delivery of a stream entry; deliveries counts from 1, trace is a traceparent or "".

    run_id is the run that it is counted for, "" on a stream of one run. alone: it must be handled by itself, since
    those who had it before vanished.
    """

    entry_id: str
    payload: bytes
    deliveries: int
    trace: str = ""
    run_id: str = ""
    alone: bool = False

    def span(self, name: str, **facts: str | int) -> Span:
        """What a service does with it, as a span of its trace; one that records nothing where there is no trace."""
        if not self.trace:
            return Span()
        span = begin(name, parent=self.trace, kind="CONSUMER")
        span.note(**facts)
        return span


def decoded(kind: type[Decoded], entry: Entry) -> Decoded:
    """The message that an entry holds. Raises InvalidInput (malformed_entry)."""
    try:
        return kind.FromString(entry.payload)
    except DecodeError as error:
        raise InvalidInput(f"not a {kind.__name__}: {error}", code="malformed_entry") from None


def publish(client: RedisClient, stream: str, payloads: Sequence[bytes]) -> None:
    """Append messages to a stream in one round trip. Raises redis.RedisError; nothing is partly acknowledged."""
    with client.pipeline(transaction=True) as pipe:
        for payload in payloads:
            pipe.xadd(stream, {"payload": payload})
        pipe.execute()


def append_words(stream: str, payload: bytes, trace: str = "") -> tuple[str | bytes, ...]:
    """The command that appends one message, for writers whose append is part of a larger atomic step."""
    words = ("XADD", stream, "*", "payload", payload)
    return (*words, "trace", trace) if trace else words


def counted_append_words(stream: str, payload: bytes, run_id: str) -> list[tuple[str | bytes | int, ...]]:
    """The commands that append one message to a stream that runs share, counted for its run; for one atomic step."""
    return [
        (*append_words(stream, payload), "run", run_id),
        ("HINCRBY", redis_keys.entries_in_flight(run_id), stream, 1),
    ]


def entries_of_run(client: RedisClient, run_id: str, own: str, shared: Sequence[str]) -> dict[str, int]:
    """The unfinished entries of a run on its own stream and on streams that it shares, all at one moment."""
    with client.pipeline(transaction=True) as pipe:
        pipe.hmget(redis_keys.entries_in_flight(run_id), list(shared))
        for stream in (own, *shared):
            pipe.xlen(stream)
        counts, length, *lengths = pipe.execute()
    # At most what is there: should somebody empty a stream by hand, no count outlasts its entries.
    found = (min(int(count or 0), there) for count, there in zip(counts, lengths, strict=True))
    return {own: length} | dict(zip(shared, found, strict=True))


def read_after(client: RedisClient, stream: str, position: str, block_seconds: float, count: int = 1000) -> list[Entry]:
    """Entries of an append-only stream after an entry id ("0-0": from the start), without a group.

    Waits at most block_seconds for one; the last entry's id is the next position.
    """
    replies = client.xread({stream: position}, count=count, block=max(1, int(block_seconds * 1000)))
    return [entry_of(entry_id, fields, 0) for entry_id, fields in raw_entries(replies)]


def raw_entries(replies: StreamReplies) -> list[StreamEntry]:
    """The entries of a reply about one stream, under RESP2 or RESP3."""
    if isinstance(replies, dict):
        return [raw for batches in replies.values() for batch in batches for raw in batch]
    return [raw for _, batch in replies for raw in batch]


def entry_of(entry_id: bytes, fields: Mapping[bytes, bytes], deliveries: int) -> Entry:
    """One delivery as the server tells it; something that is not a message of ours has an empty payload."""
    return Entry(
        entry_id.decode(),
        fields.get(b"payload", b""),
        deliveries,
        trace=fields.get(b"trace", b"").decode(errors="replace"),
        run_id=fields.get(b"run", b"").decode(errors="replace"),
    )


@dataclass(frozen=True)
class StreamDepth:
    """lag: entries no consumer has seen; pending: entries delivered and not finished."""

    lag: int
    pending: int


def depth(client: RedisClient, stream: str, group: str) -> StreamDepth:
    """How much work waits on a stream for a group; zeros when the stream does not exist yet."""
    return depths(client, [(stream, group)])[0]


def depths(client: RedisClient, wanted: Sequence[tuple[str, str]]) -> list[StreamDepth]:
    """The depths of several (stream, group) in one round trip."""
    with client.pipeline(transaction=False) as pipe:
        for stream, _ in wanted:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)
        # XINFO of a stream that does not exist yet is an error, in its place among the replies.
        replies = pipe.execute(raise_on_error=False)
    found = zip(wanted, replies[::2], replies[1::2], strict=True)
    return [_depth(length, groups, group) for (_, group), length, groups in found]


def _depth(length: int | Exception, groups: list[GroupState] | Exception, group: str) -> StreamDepth:
    if isinstance(length, Exception):
        raise length
    for facts in [] if isinstance(groups, Exception) else groups:
        if facts["name"] == group.encode():
            lag = facts.get("lag")
            return StreamDepth(lag=length if lag is None else int(lag), pending=int(facts["pending"]))
    return StreamDepth(lag=length, pending=0)


def oldest_unix_ms(client: RedisClient, stream: str) -> int | None:
    """When the oldest entry that is not finished was appended, by the server's clock; None when nothing waits."""
    first = client.xrange(stream, count=1)
    return int(first[0][0].split(b"-")[0]) if first else None
