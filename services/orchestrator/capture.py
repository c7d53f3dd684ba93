"""Captured traffic: kept only where asked for, redacted, rated by people, and collected as trajectories.

Traffic that is kept as experience: what was asked and sampled, by which version, and what people said of it later.
Nothing is kept without being asked for. What is kept lies in Redis until its retention is over, redacted before it gets
there; `collect` makes trajectories of it in the experience store.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points

import regex

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.scoring import WAKING_SECONDS, judge_rows
from spo import redis_keys
from spo.api import CapturePolicy, Feedback, RedactionRule
from spo.errors import FieldViolation, InvalidInput, NotFound, NotReady, SpoError
from spo.experience.columns import StoredTrajectory, statement_digest
from spo.experience.imports import ProblemIndex
from spo.experience.store import ExperienceStore, Origin
from spo.messaging.redis_client import RedisClient
from spo.redis_keys import digest
from spo.rpc.pools import JudgePools
from spo.spec.section import record_of
from spo.tasks.problem import Problem
from spo.tasks.verifier import pool_of
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FinishReason, Trajectory

ENTRY_POINTS = "spo.redaction"
# Of all rules together on one completion; a pattern that takes longer costs the capture, not the service.
REDACT_SECONDS = 0.5

# Of one tenant; the oldest go first.
MOST_CAPTURED = 50_000
READ_AT_ONCE = 200
DAY_SECONDS = 86_400
MOST_SOURCE_CHARACTERS = 64
# Each but the last has lost to somebody whose feedback is stored.
MOST_JOINS = 100
# What may stand in the name of a curve.
_PLAIN = re.compile(r"[^A-Za-z0-9_.:@-]")

MOST_COLLECTED = 10_000


class RedactionFailed(SpoError):
    """A completion that cannot be redacted is not captured."""


def hooks() -> Mapping[str, Callable[[], Callable[[str], str]]]:
    """Installed hooks by name: entry points of the group spo.redaction, each a function from text to text."""
    return {found.name: found.load for found in entry_points(group=ENTRY_POINTS)}


def check_rules(rules: Sequence[RedactionRule], hook: str) -> None:
    """Raises InvalidInput with a pointer to each pattern that is none, and to a hook that is not installed."""
    violations = []
    for index, rule in enumerate(rules):
        if not rule.pattern:
            violations.append(FieldViolation(f"/redactions/{index}/pattern", "must not be empty"))
        try:
            regex.compile(rule.pattern)
        except (regex.error, OverflowError, MemoryError, RecursionError) as error:
            violations.append(FieldViolation(f"/redactions/{index}/pattern", f"no regular expression: {error}"[:500]))
    if hook and hook not in hooks():
        known = ", ".join(sorted(hooks())) or "none"
        violations.append(FieldViolation("/hook", f"no entry point {hook} of {ENTRY_POINTS}; installed: {known}"))
    if violations:
        raise InvalidInput("the capture policy is not valid", code="invalid_request", violations=tuple(violations))


class Redactor:
    """The rules and the hook on one completion, within REDACT_SECONDS in all."""

    def __init__(self, rules: Sequence[RedactionRule], hook: str) -> None:
        self.changed = False
        self._rules = rules
        self._hook = hook
        self._deadline = time.monotonic() + REDACT_SECONDS

    def __call__(self, text: str) -> str:
        """The text as it may be stored. Raises RedactionFailed."""
        found = text
        for rule in self._rules:
            literal = rule.replacement.replace("\\", "\\\\")
            left = self._deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                found = regex.sub(rule.pattern, literal, found, timeout=left, concurrent=True)
            except (TimeoutError, regex.error, MemoryError) as error:
                reason = f"{type(error).__name__} {error}".strip()
                raise RedactionFailed(f"{rule.pattern!r} failed ({reason})", code="redaction_failed") from None
        if self._hook:
            found = self._hooked(found)
        self.changed = self.changed or found != text
        return found

    def _hooked(self, text: str) -> str:
        try:
            return str(hooks()[self._hook]()(text))
        # Whatever a package raises: what could not be redacted is not stored.
        except Exception as error:
            message = f"the hook {self._hook} failed: {type(error).__name__}: {error}"
            raise RedactionFailed(message[:500], code="redaction_failed") from error


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


@dataclass(frozen=True)
class CollectTerms:
    """Under which name trajectories are stored, of which task set, and whether what nobody scored is judged by it.

    patience_seconds: how long a judge may take to answer at all.
    """

    run: str
    tenant: str
    task_set: str
    judge_unscored: bool
    after_unix_ms: int = 0
    patience_seconds: float = WAKING_SECONDS


@dataclass
class Collected:
    """What a pass over the captured traffic has made."""

    rows: list[StoredTrajectory] = field(default_factory=list)
    waiting: list[StoredTrajectory] = field(default_factory=list)
    looked_at: int = 0
    human: int = 0
    judged: int = 0
    unscored: int = 0
    newest_unix_ms: int = 0


def collect(
    captures: CaptureStore,
    store: ExperienceStore,
    judges: JudgePools,
    problems: Sequence[Problem],
    terms: CollectTerms,
) -> Collected:
    """Store the captured completions since `after_unix_ms`, MOST_COLLECTED at most, under the name of the terms.

    The same traffic collected again changes nothing. An edited answer becomes a trajectory of source `human`, which the
    sampled one is the parent of. Raises NotReady when the judge could not decide: nothing is stored then.
    """
    index, found = ProblemIndex(problems), Collected()
    for captured in captures.all(terms.tenant, terms.after_unix_ms):
        if found.looked_at == MOST_COLLECTED:
            break
        found.looked_at += 1
        found.newest_unix_ms = captured.created_unix_ms
        for choice in captured.choices:
            _sort_in(captured, choice, index, terms, found)
    if found.waiting and terms.judge_unscored:
        judge_rows(judges, index, found.waiting, terms.patience_seconds)
        # Others are of prompts that no problem is known for.
        judged = [row for row in found.waiting if row.trajectory.HasField("reward")]
        found.judged = len(judged)
        found.rows += judged
    found.unscored = len(found.waiting) - found.judged
    _store(store, found.rows, terms)
    return found


def _sort_in(
    captured: Captured, choice: CapturedChoice, index: ProblemIndex, terms: CollectTerms, found: Collected
) -> None:
    feedback = captured.feedback.get(choice.index)
    reward = feedback.reward(choice.text) if feedback else None
    row = _row(captured, choice, index, terms, reward)
    if reward is None:
        # What no problem is known for cannot be judged here.
        found.waiting.append(row)
        return
    found.rows.append(row)
    if feedback and feedback.edited is not None and feedback.edited.strip() != choice.text.strip():
        found.rows.append(_edited(row, feedback.edited, terms))
        found.human += 1


def _row(
    captured: Captured, choice: CapturedChoice, index: ProblemIndex, terms: CollectTerms, reward: float | None
) -> StoredTrajectory:
    prompt = _prompt(captured.statement, index, terms.task_set)
    trajectory = Trajectory(
        trajectory_id=_id(terms.run, captured.id, str(choice.index), repr(reward)),
        group_id=captured.id,
        run_id=terms.run,
        prompt_id=prompt.prompt_id,
        sample_index=choice.index,
        source=SOURCE_OTHER_RUN,
        response_text=choice.text,
        policy_version_first=choice.version_first,
        policy_version_last=choice.version_last,
        temperature=captured.temperature,
        top_p=captured.top_p,
        seed=captured.seed,
        finish_reason=FinishReason.Value(f"FINISH_REASON_{choice.finish_reason.upper()}"),
        sampler=captured.sampler,
        created_unix_ms=captured.created_unix_ms,
        licence=captured.licence,
        consent=captured.consent,
        said_by=captured.source,
    )
    if choice.token_ids and captured.prompt_token_ids:
        trajectory.prompt_token_ids.extend(captured.prompt_token_ids)
        trajectory.response_token_ids.extend(choice.token_ids)
        trajectory.reference_hash = captured.model_hash
    if reward is not None:
        trajectory.reward = reward
    return StoredTrajectory(trajectory, prompt)


def _edited(row: StoredTrajectory, text: str, terms: CollectTerms) -> StoredTrajectory:
    sampled, human = row.trajectory, Trajectory()
    human.CopyFrom(sampled)
    for name in ("prompt_token_ids", "response_token_ids", "reference_hash", "sampler", "temperature", "top_p", "seed"):
        human.ClearField(name)
    human.trajectory_id = _id(terms.run, sampled.trajectory_id, text)
    human.parents[:] = [sampled.trajectory_id]
    human.source = SOURCE_HUMAN
    human.response_text = text
    human.finish_reason = FinishReason.Value("FINISH_REASON_STOP")
    human.reward = 0.0
    return replace(row, trajectory=human)


def _prompt(statement: str, index: ProblemIndex, task_set: str) -> Prompt:
    problem = index.find("", statement)
    if problem is None:
        return Prompt(prompt_id=statement_digest(statement), text=statement, task_set=task_set)
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set=task_set,
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
        verifier_pool=pool_of(problem.tests),
    )


def _store(store: ExperienceStore, rows: Sequence[StoredTrajectory], terms: CollectTerms) -> None:
    """One file for each model and licence; its name follows from what is in it, so it is written once."""
    groups: dict[tuple[str, str], list[StoredTrajectory]] = defaultdict(list)
    for row in rows:
        groups[row.trajectory.reference_hash, row.trajectory.licence].append(row)
    known = _known(store, terms.run) if rows else set()
    for (reference_hash, licence), chosen in groups.items():
        fresh = [row for row in chosen if row.trajectory.trajectory_id not in known]
        if fresh:
            origin = Origin(terms.run, "traffic", terms.task_set, reference_hash, licence, tenant=terms.tenant)
            name = redis_keys.digest(*sorted(row.trajectory.trajectory_id for row in fresh))
            store.write(origin, f"part-{name[:32]}", fresh)


def _known(store: ExperienceStore, run: str) -> set[str]:
    """Ids that the run has in the store."""
    tables = (store.table(file, ["trajectory_id"]) for file in store.files(run))
    return {each for table in tables for each in table["trajectory_id"].to_pylist()}


def _id(*parts: str) -> str:
    return "traj_" + redis_keys.digest("traffic", *parts)[:32]
