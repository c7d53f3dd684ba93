"""Traffic that is kept as experience: what was asked and sampled, by which version, and what people said of it later.

Nothing is kept without being asked for. What is kept lies in Redis until its retention is over, redacted before it gets
there; `collect` makes trajectories of it in the experience store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.serving.redaction import MOST_RULES, RedactionRule, Redactor, check_rules
from spo.errors import NotFound, NotReady
from spo.messaging.redis_client import RedisClient
from spo.redis_keys import digest
from spo.spec.stored import record_of

# Of one tenant; the oldest go first.
MOST_CAPTURED = 50_000
READ_AT_ONCE = 200
DAY_SECONDS = 86_400
MOST_SOURCE_CHARACTERS = 64
# Each but the last has lost to somebody whose feedback is stored.
MOST_JOINS = 100
# What may stand in the name of a curve.
_PLAIN = re.compile(r"[^A-Za-z0-9_.:@-]")


class CapturePolicy(BaseModel):
    """How a tenant's traffic is captured where it is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sampling_rate: float = Field(
        default=1.0, strict=True, ge=0, le=1, description="Share of what is asked for that is kept."
    )
    redactions: list[RedactionRule] = Field(default=[], max_length=MOST_RULES)
    hook: str = Field(default="", max_length=100, description="An installed entry point of spo.redaction.")
    retention_days: float = Field(default=30, strict=True, gt=0, le=3650)
    licence: str = Field(default="", max_length=200)
    consent: str = Field(default="", max_length=200, description="Where a request says nothing of its own.")


class Feedback(BaseModel):
    """What somebody or something said of a completion later; what is not said again stays."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    score: float | None = Field(default=None, strict=True, ge=0, le=1)
    thumbs: Literal["up", "down"] | None = None
    test: Literal["passed", "failed"] | None = None
    edited: str | None = Field(
        default=None, min_length=1, max_length=1 << 20, description="The answer as it should be."
    )
    comment: str | None = Field(default=None, max_length=10_000)

    def reward(self, text: str) -> float | None:
        """Of the completion, best 0 and worst -1: by a test, else a score, thumbs, or whether it was edited."""
        if self.test:
            return 0.0 if self.test == "passed" else -1.0
        if self.score is not None:
            return self.score - 1.0
        if self.thumbs:
            return 0.0 if self.thumbs == "up" else -1.0
        if self.edited is not None:
            return 0.0 if self.edited.strip() == text.strip() else -1.0
        return None


@dataclass(frozen=True)
class CapturedChoice:
    """One sample; without tokens where its text was redacted."""

    index: int
    text: str
    finish_reason: str
    version_first: int
    version_last: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A completion as it is kept; feedback by the index of its choices."""

    id: str
    tenant: str
    by: str
    model: str
    job_id: str
    created_unix_ms: int
    messages: tuple[Mapping[str, str], ...]
    choices: tuple[CapturedChoice, ...]
    prompt_token_ids: tuple[int, ...] = ()
    model_hash: str = ""
    sampler: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    licence: str = ""
    consent: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    redacted: bool = False
    feedback: Mapping[int, Feedback] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Where it comes from, as its rewards are told apart: `metadata.source` as a plain name, else the key."""
        return _PLAIN.sub("_", self.metadata.get("source") or self.by)[:MOST_SOURCE_CHARACTERS]

    @property
    def statement(self) -> str:
        """What was asked, as a problem's statement: the message where there is one, else all with their roles."""
        first = self.messages[0]
        if len(self.messages) == 1 and first["role"] in ("user", "prompt"):
            return first["content"]
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.messages)


# KEYS: a captured completion.  ARGV: field of the feedback, what it held ('' nothing), what it is to hold.  0: not so.
_JOIN = """#!lua
if redis.call('HEXISTS', KEYS[1], 'document') == 0 then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


class CaptureStore:
    """Captured completions of all tenants in Redis. Safe from several threads."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client

    def policy(self, tenant: str) -> CapturePolicy:
        """The tenant's policy, or the usual one."""
        raw = self.client.hget(own_keys.capture_policies(), f"tenant:{tenant}")
        return CapturePolicy.model_validate_json(raw) if raw else CapturePolicy()

    def set_policy(self, tenant: str, policy: CapturePolicy) -> None:
        """From now on; what was captured stays as it is. Raises InvalidInput with a pointer per fault."""
        check_rules(policy.redactions, policy.hook)
        self.client.hset(own_keys.capture_policies(), f"tenant:{tenant}", policy.model_dump_json())

    def keep(self, captured: Captured) -> bool:
        """Redact and store a completion; False when the sampling rate leaves it out. Raises RedactionFailed."""
        policy = self.policy(captured.tenant)
        if int(digest(captured.id)[:8], 16) >= policy.sampling_rate * 2**32:
            return False
        kept = _redacted(captured, policy)
        document = asdict(kept)
        del document["feedback"]
        key, index = own_keys.captured(captured.tenant, captured.id), own_keys.captured_index(captured.tenant)
        seconds = max(1, int(policy.retention_days * DAY_SECONDS))
        with self.client.pipeline(transaction=True) as pipe:
            pipe.hset(key, "document", json.dumps(document))
            pipe.expire(key, seconds)
            pipe.zadd(index, {captured.id: captured.created_unix_ms})
            pipe.zremrangebyscore(index, "-inf", captured.created_unix_ms - seconds * 1000)
            pipe.execute()
        for old in self.client.zrange(index, 0, -MOST_CAPTURED - 1):
            self.forget(captured.tenant, old.decode())
        return True

    def give_feedback(self, tenant: str, completion_id: str, index: int, feedback: Feedback) -> Captured:
        """Join feedback to a choice of a completion; the same again changes nothing.

        Raises NotFound (code "not_captured"), RedactionFailed, NotReady (code "calls_busy").
        """
        policy = self.policy(tenant)
        redact = Redactor(policy.redactions, policy.hook)
        said = feedback.model_dump(exclude_none=True)
        said = {name: redact(value) if name in ("edited", "comment") else value for name, value in said.items()}
        key, field = own_keys.captured(tenant, completion_id), f"feedback:{index}"
        for _ in range(MOST_JOINS):
            stored = self.client.hgetall(key)
            captured = _kept(completion_id, stored)
            if index not in {choice.index for choice in captured.choices}:
                raise NotFound(f"{completion_id} has no choice {index}", code="not_captured")
            known = captured.feedback.get(index, Feedback()).model_dump(exclude_none=True)
            before, joined = stored.get(field.encode(), b""), Feedback.model_validate({**known, **said})
            # Of two at once the second joins what the first has said, and what was forgotten meanwhile stays so.
            if self.client.eval(_JOIN, 1, key, field, before, joined.model_dump_json(exclude_none=True)):
                return replace(captured, feedback={**captured.feedback, index: joined})
        raise NotReady(f"many give feedback on {completion_id} at once; try again", code="calls_busy")

    def get(self, tenant: str, completion_id: str) -> Captured:
        """Raises NotFound (code "not_captured")."""
        return _kept(completion_id, self.client.hgetall(own_keys.captured(tenant, completion_id)))

    def all(self, tenant: str, after_unix_ms: float = 0) -> Iterator[Captured]:
        """What is kept of a tenant since then, oldest first."""
        index = own_keys.captured_index(tenant)
        found = self.client.zrangebyscore(index, after_unix_ms, "+inf")
        for start in range(0, len(found), READ_AT_ONCE):
            with self.client.pipeline(transaction=False) as pipe:
                for raw in found[start : start + READ_AT_ONCE]:
                    pipe.hgetall(own_keys.captured(tenant, raw.decode()))
                yield from (each for each in map(_captured_of, pipe.execute()) if each is not None)

    def count(self, tenant: str) -> int:
        """How many completions are listed; some may have expired."""
        return self.client.zcard(own_keys.captured_index(tenant))

    def forget(self, tenant: str, completion_id: str) -> None:
        """Remove a completion with what was said of it; one that is gone already is no fault."""
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(own_keys.captured(tenant, completion_id))
            pipe.zrem(own_keys.captured_index(tenant), completion_id)
            pipe.execute()


def _redacted(captured: Captured, policy: CapturePolicy) -> Captured:
    redact = Redactor(policy.redactions, policy.hook)
    messages = tuple({**turn, "content": redact(turn["content"])} for turn in captured.messages)
    choices = tuple(replace(choice, text=redact(choice.text)) for choice in captured.choices)
    metadata = {redact(name): redact(value) for name, value in captured.metadata.items()}
    kept = replace(captured, messages=messages, choices=choices, metadata=metadata)
    kept = replace(
        kept,
        licence=captured.licence or policy.licence,
        consent=captured.consent or policy.consent,
        redacted=redact.changed,
    )
    if redact.changed:
        # The tokens still say what was taken out.
        bare = tuple(replace(choice, token_ids=()) for choice in kept.choices)
        kept = replace(kept, prompt_token_ids=(), choices=bare)
    return kept


def _kept(completion_id: str, fields: Mapping[bytes, bytes]) -> Captured:
    found = _captured_of(fields)
    if found is None:
        raise NotFound(f"{completion_id} was not captured, or is not kept any more", code="not_captured")
    return found


def _captured_of(fields: Mapping[bytes, bytes]) -> Captured | None:
    if b"document" not in fields:
        return None
    document = json.loads(fields[b"document"])
    choices: Sequence[Mapping[str, object]] = document.pop("choices")
    feedback = {
        int(name.removeprefix(b"feedback:")): Feedback.model_validate_json(raw)
        for name, raw in fields.items()
        if name.startswith(b"feedback:")
    }
    made = tuple(record_of(CapturedChoice, choice) for choice in choices)
    return record_of(Captured, {**document, "choices": made, "feedback": feedback})
