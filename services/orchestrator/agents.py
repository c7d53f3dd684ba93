"""Sessions of agents: each episode of an agent's own program has a URL and a key, and its calls make a tree of tokens.

What is trained on was sampled after exactly the tokens that stand before it: a call's messages are matched by their
digests against what the session has answered, and the tokens of what matches are fed again as they are. What does not
match begins another branch, or another root; nothing is mended or guessed. The tree is in Redis, written a call at a
time, once the answer is whole.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, cast

from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth import Principal
from services.orchestrator.commit import now_ms
from services.orchestrator.jobs import JobStore
from services.orchestrator.versions import announcement_of
from spo import observability, redis_keys
from spo.errors import Conflict, InvalidInput, NotFound, ResourceExhausted
from spo.redis_keys import digest
from spo.spec.section import record_of

# A session is known for so long after its deadline: what it holds can be looked at.
KEEP_SECONDS = 86_400
# The same request again within it, from a client that says it tries again, gets the same answer.
REMEMBERED_SECONDS = 600
MOST_BYTES = 64 << 20
# Of one tenant, open at once, beside those of leased episodes, which their groups bound.
MOST_OPEN = 1000
# A call names so many of those before it, so that a path is read in a few parts, however long it is.
MOST_ABOVE = 64
KNOWN_FORMATS = 256

Turn = Mapping[str, object]

_IN_ORDER = json.JSONEncoder(sort_keys=True)

# Where a path ends at the answer whose state is ARGV[1]: the call, whether one went on from there, those above it and
# above the last of these, then the tokens of all of them. Nothing where no answer has that state.
_PATH = """#!lua flags=no-writes
local number = redis.call('HGET', KEYS[1], ARGV[1])
if not number then return false end
local above = redis.call('HGET', KEYS[2], number .. ':above')
local found = {tonumber(number), redis.call('HEXISTS', KEYS[1], 'child:' .. number), above, false}
if not above then return found end
local each = number
for at = 0, #above, 4 do
    for _, kind in ipairs({':sampled', ':read'}) do
        found[#found + 1] = redis.call('HGET', KEYS[2], each .. kind)
    end
    if at == #above then break end
    each = string.format('%d', (struct.unpack('<i4', above, at + 1)))
end
found[4] = redis.call('HGET', KEYS[2], each .. ':above')
return found
"""

# Store a call as a whole, or nothing of it: its number, "ended" or "full". KEYS: the session, its calls, its states.
# ARGV: the parent or "", seconds to live, bytes of the call, most bytes; tokens read, sampled, and known before;
# two states and the retry; the header behind its number; names and contents of what is packed.
_APPEND = """#!lua
if redis.call('HEXISTS', KEYS[1], 'outcome') == 1 then return redis.status_reply('ended') end
local stored = tonumber(redis.call('HGET', KEYS[1], 'bytes') or 0)
if stored + tonumber(ARGV[3]) > tonumber(ARGV[4]) then return redis.status_reply('full') end
local count = redis.call('HINCRBY', KEYS[1], 'calls', 1) - 1
local number = string.format('%d', count)
local read, sampled = tonumber(ARGV[5]), tonumber(ARGV[6])
-- Another branch is trained on with all that it reads.
local spelled = sampled + (count > 0 and read or 0)
if ARGV[1] ~= '' and redis.call('HSETNX', KEYS[3], 'child:' .. ARGV[1], 1) == 0 then
    spelled = spelled + tonumber(ARGV[7])
end
redis.call('HSET', KEYS[2], number, '{"number": ' .. number .. ', ' .. ARGV[11])
for at = 12, #ARGV, 2 do redis.call('HSET', KEYS[2], number .. ':' .. ARGV[at], ARGV[at + 1]) end
redis.call('HSET', KEYS[3], ARGV[8], number, ARGV[9], number, ARGV[10], number)
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[2])
redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'tokens', read + sampled)
redis.call('HINCRBY', KEYS[1], 'spelled', spelled)
redis.call('HDEL', KEYS[1], 'unserved')
return count
"""


class SessionFull(ResourceExhausted):
    """A session has used what it may: to try again is of no use."""

    default_code = "session_full"
    retryable = False


@dataclass(frozen=True)
class AgentSession:
    """What an episode is of, what it may use, and how its calls are sampled.

    version: the weight version of all calls; None: whichever is loaded. deadline_unix_ms: calls are refused after it.
    """

    id: str
    job_id: str
    tenant: str
    key_digest: str
    token_digest: str
    deadline_unix_ms: int
    created_unix_ms: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    version: int | None = None
    max_calls: int = 200
    max_tokens: int = 131_072
    problem_id: str = ""
    # Of a path that is to be trained on; None: as far as the engine goes.
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    # Of all branches after the first prompt, each written out; None: one path alone is trained on.
    max_episode_tokens: int | None = None
    # Of earlier answers once more is asked; as_template: what the template leaves out is not read again.
    reasoning: str = "keep"
    # Of a job's episode: which sample it is. group_id "": of none.
    group_id: str = ""
    sample: int = 0
    attempt: int = 0

    @property
    def path(self) -> str:
        """Where its calls go, before /v1."""
        return f"/s/{self.id}"

    @property
    def life_seconds(self) -> int:
        """For so long from now what is stored of it is kept: to its deadline, and KEEP_SECONDS."""
        return max(1, self.deadline_unix_ms // 1000 + KEEP_SECONDS - int(time.time()))


# A session, and its counts as they were read with it.
Standing = tuple[AgentSession, dict[str, str]]


@dataclass(frozen=True)
class SessionSecrets:
    """What opens a session, stored as digests alone: the agent's key for calls, the runner's token for the outcome."""

    key: str
    token: str


@dataclass(frozen=True)
class CallNode:
    """One call: what was read since its parent (None: a root), what was sampled, and what it was answered as.

    state: the digest of all messages up to the answer. text: without its calls. reason: why it is no continuation of
    what the session had answered before; "" where it is, or where nothing of it was known.
    """

    number: int
    parent: int | None
    state: str
    messages: tuple[Turn, ...]
    text: str
    calls: tuple[Mapping[str, object], ...]
    finish_reason: str
    version_first: int
    version_last: int
    prompt_tokens: int
    cached_tokens: int
    sampler: str
    model_hash: str
    at_unix_ms: int
    # When it was asked, and when the first of its answer came; 0: nobody noted it.
    began_unix_ms: int = 0
    first_unix_ms: int = 0
    reason: str = ""
    constrained: bool = False
    label: str = ""
    # As the agent named it: side calls, such as for titles, often name a smaller one.
    model: str = ""
    reasoning_characters: int = 0
    read: tuple[int, ...] = field(default=(), repr=False)
    sampled: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)


_PACKED = {"read": "i", "sampled": "i", "logprobs": "f"}


@dataclass(frozen=True)
class Continuation:
    """Where a call's messages stand in the tree: after a call and so many of them, with the tokens up to there.

    number: of the call; None: at a root. state: the digest of all messages. reason: as a node's. above: the call and
    the nearest before it, MOST_ABOVE at most. begins: tokens that the path's root has read. is_leaf: no call has gone
    on from there yet.
    """

    number: int | None
    turns: int
    token_ids: tuple[int, ...]
    state: str
    reason: str = ""
    above: tuple[int, ...] = ()
    begins: int = 0
    is_leaf: bool = True
    # The newest weights that its job has announced, as read with it; 0: none yet.
    version: int = 0


def _turn_digest(state: str, turn: Turn) -> str:
    return digest(state, _IN_ORDER.encode(turn))


def as_answered(text: str, calls: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The turn that an answer is when it comes back: arguments as values, no content as empty content."""
    turn: dict[str, object] = {"role": "assistant", "content": text}
    return turn | ({"tool_calls": list(calls)} if calls else {})


def loosely(turn: Turn) -> dict[str, object]:
    """The turn as clients change it that mean the same: white space around, ids of calls renamed."""
    found = {**turn, "content": str(turn.get("content") or "").strip()}
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [each["function"] for each in calls]
    return {"loosely": found}


class SessionTree:
    """The calls of one session in Redis."""

    def __init__(self, jobs: JobStore, session: AgentSession) -> None:
        self.client = jobs.client
        self.session = session
        self.key = own_keys.agent_nodes(session.id)
        self.states = own_keys.agent_states(session.id)

    def node(self, number: int) -> CallNode:
        """A call with its tokens. Raises NotFound."""
        if found := self._read([number]):
            return found[0]
        raise NotFound(f"session {self.session.id} has no call {number}", code="session_not_found")

    def _read(self, numbers: Sequence[int]) -> list[CallNode]:
        """Those of the calls that are there."""
        if not numbers:
            return []
        names = [name for number in numbers for name in (f"{number}", *(f"{number}:{each}" for each in _PACKED))]
        stored = iter(self.client.hmget(self.key, names))
        found: list[CallNode] = []
        for header, *packed in zip(*[stored] * (1 + len(_PACKED)), strict=True):
            if header is None:
                continue
            values: dict[str, tuple[float, ...]] = {}
            for (name, kind), raw in zip(_PACKED.items(), packed, strict=True):
                values[name] = tuple(array(kind, raw or b""))
            found.append(record_of(CallNode, {**json.loads(header), **values}))
        return found

    def path(self, node: CallNode) -> list[CallNode]:
        """The nodes from the root to this one."""
        found = [node]
        while found[-1].parent is not None:
            found.append(self.node(found[-1].parent))
        return found[::-1]

    def nodes(self, most: int | None = None) -> list[CallNode]:
        """All calls in the order of their numbers, or the first of them."""
        numbers = sorted(int(name) for name in self.client.hkeys(self.key) if name.isdigit())
        parts = [numbers[:most][first : first + MOST_ABOVE] for first in range(0, len(numbers[:most]), MOST_ABOVE)]
        return [node for part in parts for node in self._read(part)]

    def find(self, turns: Sequence[Turn], tools: Sequence[object]) -> Continuation:
        """Where messages continue what the session has answered; tools: what the template is shown."""
        root = self._root(tools)
        states = [root]
        for turn in turns:
            states.append(_turn_digest(states[-1], turn))
        answered = max((place for place, turn in enumerate(turns, 1) if turn["role"] == "assistant"), default=None)
        with self.client.pipeline(transaction=False) as reads:
            reads.xrevrange(redis_keys.weights(self.session.job_id), count=1)
            if answered is not None:
                # As its history mostly comes back: what the session has answered, and more.
                reads.eval(_PATH, 2, self.states, self.key, states[answered])
            newest, *parts = reads.execute()
        version = announcement_of(newest[0]).version if newest else 0
        if answered is None:
            return Continuation(None, 0, (), states[-1], version=version)
        if parts[0] is None:
            return replace(self._searched(root, turns), version=version)
        return replace(self._up_to(parts[0]), turns=answered, state=states[-1], version=version)

    def _searched(self, root: str, turns: Sequence[Turn]) -> Continuation:
        """The same where the last answer came back otherwise: the last one before that is known, exactly or loosely."""
        known = self.client.hgetall(self.states)
        state, found, matched, ends = root, None, 0, ""
        foreign = False
        for place, turn in enumerate(turns, 1):
            exact = _turn_digest(state, turn)
            if turn["role"] != "assistant":
                state = exact
                continue
            number = known.get(exact.encode())
            if number is not None:
                state = exact
            elif (number := known.get(_turn_digest(state, loosely(turn)).encode())) is not None:
                # From here on as it was answered, whatever a client has made of it.
                state = self._state(int(number))
            else:
                foreign, state = True, exact
                continue
            found, matched, ends, foreign = int(number), place, state, False
        reason = ""
        if foreign:
            reason = "edited" if known else "foreign_assistant"
        part = None if found is None else self.client.eval(_PATH, 2, self.states, self.key, ends)
        if part is None:
            return Continuation(None, 0, (), state, reason)
        return replace(self._up_to(cast("list[Any]", part)), turns=matched, state=state, reason=reason)

    def _state(self, number: int) -> str:
        """The digest of all messages up to an answer."""
        header = self.client.hget(self.key, str(number))
        return "" if header is None else str(json.loads(header)["state"])

    def _up_to(self, part: Sequence[Any]) -> Continuation:
        """After an answer: the tokens of its path, of which the part is the last, in more such of MOST_ABOVE calls."""
        number, child, raw, last, *tokens = part
        if raw is None:
            # As an older release stored it.
            path = self.path(self.node(number))
            tokens = [array("i", each).tobytes() for node in path[::-1] for each in (node.sampled, node.read)]
        above = tuple(array("i", raw or b""))
        before: Sequence[int] = array("i", last or b"") if above else ()
        while before:
            names = [f"{each}:{kind}" for each in before for kind in ("sampled", "read")]
            *more, last = self.client.hmget(self.key, [*names, f"{before[-1]}:above"])
            tokens += more
            before = array("i", last or b"")
        token_ids = tuple(array("i", b"".join(each or b"" for each in tokens[::-1])))
        begins = len(tokens[-1] or b"") // array("i").itemsize
        above = (number, *above)[:MOST_ABOVE]
        return Continuation(number, 0, token_ids, "", above=above, begins=begins, is_leaf=not child)

    def room(self, continued: Continuation, counts: Mapping[str, str]) -> int | None:
        """How long a path may be that goes on from here, prompt included, for the episode to stay within its tokens.

        Branches that will not be trained on count too: which these are is only known at the end. None: no bound.
        """
        most = self.session.max_episode_tokens
        if most is None or not int(counts["calls"]):
            return None
        left = most - int(counts.get("spelled", 0))
        goes_on = continued.number is not None and continued.is_leaf
        return max(1, left + (len(continued.token_ids) if goes_on else 0))

    def retried(self, body_digest: str) -> CallNode | None:
        """The call that answered the same request a short while ago."""
        number = self.client.hget(self.states, f"retry:{body_digest}")
        if number is None:
            return None
        node = self.node(int(number))
        return node if now_ms() - node.at_unix_ms < REMEMBERED_SECONDS * 1000 else None

    def append(self, node: CallNode, body_digest: str, above: Sequence[int] = ()) -> CallNode:
        """Store a call; returns it with its number. above: its parent and those before it, as a continuation has them.

        Raises SessionFull where the tree takes no more, Conflict (code "already_decided") where the session has ended.
        """
        answered = as_answered(node.text, node.calls)
        alike = _turn_digest(node.state, loosely(answered))
        node = replace(node, state=_turn_digest(node.state, answered))
        # asdict would copy each of thousands of tokens.
        header = json.dumps({name: each for name, each in vars(node).items() if name not in ("number", *_PACKED)})
        packed: dict[str, str | bytes] = {}
        packed |= {name: array(kind, getattr(node, name)).tobytes() for name, kind in _PACKED.items()}
        packed["above"] = array("i", above).tobytes()
        size = len(header) + sum(map(len, packed.values()))
        number = self.client.eval(
            _APPEND,
            3,
            *(own_keys.agent_session(self.session.id), self.key, self.states),
            *("" if node.parent is None else node.parent, self.session.life_seconds, size, MOST_BYTES),
            *(len(node.read), len(node.sampled), node.cached_tokens),
            *(node.state, alike, f"retry:{body_digest}", header[1:]),
            *(word for name_and_content in packed.items() for word in name_and_content),
        )
        if number == b"ended":
            raise Conflict("the session has ended meanwhile: nothing more is stored", code="already_decided")
        if not isinstance(number, int):
            raise SessionFull(f"the session holds {MOST_BYTES} bytes")
        return replace(node, number=number)

    def note_unserved(self) -> None:
        """Count a call that no replica answered: should the episode fail now, it is not at fault."""
        session = own_keys.agent_session(self.session.id)
        with self.client.pipeline(transaction=True) as writes:
            writes.hincrby(session, "unserved", 1)
            # Where the session has gone with its job meanwhile, so does this.
            writes.expire(session, self.session.life_seconds)
            writes.execute()

    def _root(self, tools: Sequence[object]) -> str:
        """Another set of tools is written into another prompt, so it is another root."""
        return digest(self.session.id, json.dumps(list(tools), sort_keys=True))


class AgentSessions:
    """Opens sessions, knows their keys, and ends them. Safe from several threads."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        # A job's spec stays as it is.
        self.chat_format = lru_cache(maxsize=KNOWN_FORMATS)(lambda job_id: jobs.spec(job_id).model.chat_format)

    def open(self, session: AgentSession) -> tuple[AgentSession, SessionSecrets]:
        """Store a session; its id and secrets are made here."""
        session_id = f"ses_{ULID()}"
        opened = SessionSecrets(f"{session_id}.{secrets.token_urlsafe(32)}", f"tok_{secrets.token_urlsafe(32)}")
        session = replace(session, id=session_id, key_digest=_secret(opened.key), token_digest=_secret(opened.token))
        self._write(session)
        # The operator has no bound, so nothing would ever look through its own.
        if session.tenant and not session.group_id:
            key = own_keys.open_agent_sessions(session.tenant)
            with self.jobs.client.pipeline(transaction=False) as writes:
                writes.zremrangebyscore(key, 0, now_ms())
                writes.zadd(key, {session.id: session.deadline_unix_ms})
                writes.execute()
        return session, opened

    def require_place(self, tenant: str) -> None:
        """Raises ResourceExhausted (code "quota_exceeded") where a tenant has as many sessions open as it may."""
        key = own_keys.open_agent_sessions(tenant)
        with self.jobs.client.pipeline(transaction=False) as counted:
            counted.zremrangebyscore(key, 0, now_ms())
            counted.zcard(key)
            _, count = counted.execute()
        if count < MOST_OPEN:
            return
        ids = [each.decode() for each in self.jobs.client.zrange(key, 0, -1)]
        with self.jobs.client.pipeline(transaction=False) as reads:
            for each in ids:
                reads.hget(own_keys.agent_session(each), "record")
            records = reads.execute()
        # Sessions of deleted jobs are gone without having been closed.
        if gone := [each for each, record in zip(ids, records, strict=True) if record is None]:
            self.jobs.client.zrem(key, *gone)
        if len(ids) - len(gone) >= MOST_OPEN:
            message = f"{MOST_OPEN} sessions are open: end some by their outcome, or wait for their deadline"
            raise ResourceExhausted(message, code="quota_exceeded")

    def _write(self, session: AgentSession) -> None:
        key = own_keys.agent_session(session.id)
        self.jobs.write(
            ("HSET", key, "record", json.dumps(asdict(session)), "calls", 0, "tokens", 0, "bytes", 0),
            ("EXPIRE", key, session.life_seconds),
            ("ZADD", own_keys.agent_sessions(session.job_id), session.deadline_unix_ms, session.id),
            ("ZREMRANGEBYSCORE", own_keys.agent_sessions(session.job_id), 0, now_ms() - KEEP_SECONDS * 1000),
        )

    def get(self, session_id: str) -> AgentSession:
        """Raises NotFound."""
        raw = self.jobs.client.hget(own_keys.agent_session(session_id), "record")
        if raw is None:
            raise NotFound(f"there is no session {session_id}", code="session_not_found")
        return record_of(AgentSession, json.loads(raw))

    def standing(self, session_id: str) -> Standing:
        """A session and its counts, in one read. Raises NotFound."""
        fields = self.jobs.client.hgetall(own_keys.agent_session(session_id))
        if b"record" not in fields:
            raise NotFound(f"there is no session {session_id}", code="session_not_found")
        return _standing(fields)

    def of_job(
        self, job_id: str, most: int, skip: int = 0, after: str | None = None
    ) -> list[tuple[AgentSession, dict[str, object]]]:
        """The newest sessions of a job and what is shown of each, after so many newer ones, or after that session."""
        key = own_keys.agent_sessions(job_id)
        if after is not None:
            rank = self.jobs.client.zrevrank(key, after)
            if rank is None:
                return []
            skip = rank + 1
        ids = self.jobs.client.zrevrange(key, skip, skip + most - 1)
        with self.jobs.client.pipeline(transaction=False) as reads:
            for each in ids:
                reads.hgetall(own_keys.agent_session(each.decode()))
            stored = reads.execute()
        found = [_standing(fields) for fields in stored if b"record" in fields]
        return [(session, _seen(counts)) for session, counts in found]

    def seen(self, session: AgentSession) -> dict[str, object]:
        """What is shown of a session beside its record."""
        return _seen(self.counts(session))

    def counts(self, session: AgentSession) -> dict[str, str]:
        """How many calls and tokens it has used, why it is closed, and its outcome."""
        found = self.jobs.client.hgetall(own_keys.agent_session(session.id))
        return {name.decode(): raw.decode() for name, raw in found.items() if name != b"record"}

    def tree(self, session: AgentSession) -> SessionTree:
        return SessionTree(self.jobs, session)

    def admitted(self, session_id: str, key: str) -> tuple[Principal, Standing]:
        """Who calls a session's paths, and what is there. Raises InvalidInput (code "unauthorized"): another key, or
        a closed session.
        """
        try:
            session, counts = self.standing(session_id)
        except NotFound:
            raise InvalidInput("this is no key of this session", code="unauthorized") from None
        if not hmac.compare_digest(_secret(key), session.key_digest):
            raise InvalidInput("this is no key of this session", code="unauthorized")
        if reason := counts.get("closed"):
            raise InvalidInput(f"the session is closed: {reason}", code="unauthorized")
        principal = Principal(f"session {session.id}", session.tenant, frozenset({"models:query"}))
        return principal, (session, counts)

    def require_token(self, session: AgentSession, token: str) -> None:
        """Raises InvalidInput (code "forbidden") unless it is the session's own token, which its agent never sees."""
        if not hmac.compare_digest(_secret(token), session.token_digest):
            raise InvalidInput("the outcome needs the session's token, not its key", code="forbidden")

    def require_room(self, session: AgentSession, counts: Mapping[str, str]) -> None:
        """Raises SessionFull or InvalidInput (code "prompt_too_long") where a session has used what it may."""
        if now_ms() > session.deadline_unix_ms:
            raise SessionFull("the session's time is over")
        if int(counts["calls"]) >= session.max_calls:
            raise SessionFull(f"the session has made its {session.max_calls} calls")
        if int(counts["tokens"]) >= session.max_tokens:
            raise InvalidInput(f"the session has used its {session.max_tokens} tokens", code="prompt_too_long")

    def outcome(self, session: AgentSession) -> dict[str, object] | None:
        """How it ended; None while it is open."""
        raw = self.jobs.client.hget(own_keys.agent_session(session.id), "outcome")
        return None if raw is None else dict(json.loads(raw))

    def close(self, session: AgentSession, outcome: Mapping[str, object], reason: str) -> Mapping[str, object]:
        """End a session with its outcome; once more with the same changes nothing.

        Returns the outcome. Raises Conflict (code "already_decided") for another one.
        """
        key = own_keys.agent_session(session.id)
        said = json.dumps(outcome, sort_keys=True)
        if self.jobs.client.hsetnx(key, "outcome", said):
            self.jobs.client.hset(key, "ended", now_ms())
            observability.AGENT_CALLS_OF_EPISODE.observe(int(self.counts(session).get("calls", 0)))
        else:
            first = self.jobs.client.hget(key, "outcome")
            if first is None or first.decode() != said:
                raise Conflict("the episode has another outcome already", code="already_decided")
        self.jobs.client.hset(key, "closed", reason)
        if session.tenant and not session.group_id:
            self.jobs.client.zrem(own_keys.open_agent_sessions(session.tenant), session.id)
        return outcome


def _standing(fields: Mapping[bytes, bytes]) -> Standing:
    counts = {name.decode(): raw.decode() for name, raw in fields.items() if name != b"record"}
    return record_of(AgentSession, json.loads(fields[b"record"])), counts


def _seen(counts: Mapping[str, str]) -> dict[str, object]:
    used = {name: int(counts.get(name, 0)) for name in ("calls", "tokens")}
    outcome = counts.get("outcome")
    return {**used, "closed": counts.get("closed", ""), "outcome": None if outcome is None else json.loads(outcome)}


def _secret(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def note_call(dialect: str, node: CallNode, repeated: int) -> None:
    """Count a stored call. repeated: tokens of its prompt that were known, and written anew."""
    observability.AGENT_CALLS.labels(dialect=dialect).inc()
    if node.reason:
        observability.AGENT_BREAKS.labels(reason=node.reason).inc()
        observability.AGENT_REPEATED.labels(reason=node.reason).inc(repeated)


def leaves(nodes: Iterable[CallNode]) -> list[CallNode]:
    """Calls that no other call goes on from, in the order of their numbers."""
    known = list(nodes)
    parents = {node.parent for node in known}
    return [node for node in known if node.number not in parents]


def trained_leaves(nodes: Sequence[CallNode]) -> list[CallNode]:
    """The leaves whose paths an episode is trained on, in the order of their numbers; the last call is always one.

    Not those of calls that name another model than the last one, which serve its program and not its problem; nor,
    of several answers to one prompt, those that no call went on from where it did from another, or where another is
    later: they were thrown away.
    """
    last = nodes[-1]
    ends = {leaf.number for leaf in leaves(nodes)}
    answers: dict[tuple[int | None, tuple[int, ...]], list[int]] = {}
    for node in nodes:
        answers.setdefault((node.parent, node.read), []).append(node.number)
    # Those that were gone on from, else the last.
    kept = {
        number
        for numbers in answers.values()
        for number in ([each for each in numbers if each not in ends] or numbers[-1:])
    }
    own = [node for node in nodes if node.number in ends and node.number in kept and node.model == last.model]
    return own if last in own else [*own, last]
