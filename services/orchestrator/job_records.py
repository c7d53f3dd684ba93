"""The records of jobs: the table of legal transitions, what is stored of a job, how one is created, lists of them,
and the curves that trainers and evaluations report.

The life of a job: ONE table of legal transitions, used by the code, the error messages and the documents.
queued -> validating -> estimating -> running -> succeeded    (estimating -> succeeded: nothing is to be trained)
                                        |  ^
                                        v  |
                                    pausing -> paused
paused -> running waits in the queue for a slot;
every state before the last may go to failed, and by cancelling to cancelled
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field, Json
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit, Precondition, Word, Write, timestamp
from spo import redis_keys
from spo.errors import Conflict, IntegrityError, InvalidInput
from spo.messaging.redis_client import RedisClient, replies_by_key, write_even_when_full
from spo.spec.job_spec import JobSpec, spec_to_json
from spo.spec.section import JobState

Column = list[float | None]

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.VALIDATING, JobState.FAILED, JobState.CANCELLED}),
    JobState.VALIDATING: frozenset({JobState.ESTIMATING, JobState.FAILED, JobState.CANCELLING}),
    JobState.ESTIMATING: frozenset({JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLING}),
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.PAUSING, JobState.FAILED, JobState.CANCELLING}),
    JobState.PAUSING: frozenset({JobState.PAUSED, JobState.RUNNING, JobState.FAILED, JobState.CANCELLING}),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLING}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

# Fields that are conditions of a commit, or that are removed again.
RecordMark = Literal[
    "checkpoint_asked",
    "resume_asked",
    "estimates_published",
    "estimates_pending",
    "pivotal_published",
    "prompts_too_long",
    "reference_asked",
    "reference_total",
    "reference_version",
    "events_in_files",
    "trained_steps",
    "published_again",
]

INDEX_SECONDS = 30

IDEMPOTENCY_SECONDS = 86_400


def may_become(state: JobState) -> frozenset[JobState]:
    """The states from which this one may be entered."""
    return frozenset(before for before, following in TRANSITIONS.items() if state in following)


@dataclass(frozen=True)
class JobAction:
    """What a person may ask of a job: where each state goes, and the states in which it is already so.

    Out of the states `queues` the move waits for a slot in the queue.
    """

    name: str
    moves: dict[JobState, JobState]
    already: frozenset[JobState]
    queues: frozenset[JobState] = frozenset()


CANCEL = JobAction(
    "cancel",
    {JobState.QUEUED: JobState.CANCELLED} | dict.fromkeys(sorted(may_become(JobState.CANCELLING)), JobState.CANCELLING),
    frozenset({JobState.CANCELLING, JobState.CANCELLED}),
)
PAUSE = JobAction("pause", {JobState.RUNNING: JobState.PAUSING}, frozenset({JobState.PAUSING, JobState.PAUSED}))
RESUME = JobAction(
    "resume",
    {JobState.PAUSING: JobState.RUNNING, JobState.PAUSED: JobState.RUNNING},
    frozenset({JobState.RUNNING}),
    queues=frozenset({JobState.PAUSED}),
)
ACTIONS = (CANCEL, PAUSE, RESUME)


def legal_transitions() -> dict[str, list[str]]:
    """The table as plain words, for documents and OpenAPI."""
    return {state.value: sorted(following) for state, following in TRANSITIONS.items()}


def refuse(action: str, state: JobState) -> Conflict:
    """The error of an action that this state does not allow; names the transitions and actions that are legal."""
    states = ", ".join(sorted(TRANSITIONS[state])) or "none"
    actions = ", ".join(legal.name for legal in ACTIONS if state in legal.moves) or "none"
    return Conflict(
        f"a job that is {state} cannot {action}; legal transitions: {states}; legal actions: {actions}",
        code="illegal_transition",
    )


def fold(transitions: Iterable[Mapping[str, Any]], state: JobState | None = None) -> JobState:
    """The state after transition bodies {"from", "to"} in order, from `state` on; None: from before the first.

    Raises IntegrityError at an illegal or missing one.
    """
    for body in transitions:
        before = JobState(body["from"]) if body["from"] else None
        after = JobState(body["to"])
        legal = after is JobState.QUEUED if state is None else before is state and after in TRANSITIONS[state]
        if not legal:
            raise IntegrityError(f"the events of the job go from {state} by {before} to {after}")
        state = after
    if state is None:
        raise IntegrityError("the job has no events")
    return state


@dataclass(frozen=True)
class ForkLineage:
    """Where a job comes from; null: not from there."""

    parent: str
    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    forked_at: str


class JobRecord(BaseModel):
    """The fields of a job's record; times are RFC 3339 UTC.

    trained_steps is set once the trainer has finished, start_version where training begins at a published version.
    reference_asked is "version:position" of the refresh under way: prompts before the position have been asked about,
    reference_total is how many there are once all have been, reference_version the version in force.
    scores: pass@k of the newest evaluation, "pass@10" by name; a copy, so that lists need not read whole evaluations.
    estimates_pending is set while a job trains beside its estimates, and gone once they are over.
    events_in_files is the last event that is in a file and no more in Redis, state_in_files the state after it.
    published_again: the last weights were found damaged and have been asked for once more.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    labels: Json[dict[str, str]]
    created_at: str
    created_unix_ms: int
    updated_at: str = ""
    tenant: str = ""
    priority: int = 1
    prompts_total: int | None = None
    evaluation_total: int | None = None
    prompts_too_long: int = 0
    start_version: int = 0
    trained_steps: int | None = None
    checkpoint_asked: bool = False
    resume_asked: bool = False
    estimates_published: int = 0
    estimates_pending: bool = False
    pivotal_published: int = 0
    reference_asked: str = Field(default="", pattern=r"^(\d+:\d+)?$")
    reference_total: int | None = None
    reference_version: int = 0
    failure_code: str = ""
    failure_message: str = ""
    scores: Json[dict[str, float]] = Field(default_factory=dict)
    lineage: Json[ForkLineage] | None = None
    events_in_files: int = 0
    state_in_files: JobState | None = None
    published_again: bool = False

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> JobRecord:
        """The record of a hash as Redis holds it; fields of other names are left out.

        Raises IntegrityError (code "keys_damaged").
        """
        try:
            return cls.model_validate({name.decode(): value.decode() for name, value in fields.items()})
        except ValueError as error:
            raise IntegrityError(f"the record of a job in Redis is none: {error}", code="keys_damaged") from error

    @classmethod
    def shown(cls, job_id: str, fields: object) -> JobRecord:
        """As from_redis, for lists and pages; of what is no record, what the id says: others are listed beside it."""
        if isinstance(fields, dict):
            with suppress(IntegrityError):
                return cls.from_redis(fields)
        created = ULID.from_str(job_id.removeprefix("job_")).datetime
        at = created.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return cls.model_validate(
            {
                "name": "its record in Redis is damaged",
                "labels": "{}",
                "created_at": at,
                "created_unix_ms": int(created.timestamp() * 1000),
            }
        )

    @property
    def is_trained(self) -> bool:
        """Whether the trainer has done all its steps."""
        return self.trained_steps is not None


class RecordFields(TypedDict, total=False):
    """What may be written into a record; `updated_at` moves with every event."""

    name: str
    labels: dict[str, str]
    created_at: str
    created_unix_ms: int
    tenant: str
    priority: int
    prompts_total: int
    evaluation_total: int
    prompts_too_long: int
    start_version: int
    trained_steps: int
    checkpoint_asked: bool
    resume_asked: bool
    estimates_published: int
    estimates_pending: bool
    pivotal_published: int
    reference_asked: str
    reference_total: int
    reference_version: int
    failure_code: str
    failure_message: str
    scores: dict[str, float]
    lineage: ForkLineage
    events_in_files: int
    state_in_files: JobState
    published_again: bool


def write_fields(job_id: str, **fields: Unpack[RecordFields]) -> Write:
    """The write that sets fields of a job's record."""
    words: list[Word] = []
    for name, value in fields.items():
        words += [name, _word(value)]
    return ("HSET", redis_keys.job_record(job_id), *words)


def clear_fields(job_id: str, *names: RecordMark) -> Write:
    """The write that removes fields of a job's record."""
    return ("HDEL", redis_keys.job_record(job_id), *names)


def while_field_is(job_id: str, name: RecordMark, value: str | int = "") -> Precondition:
    """The condition that a field of a job's record holds a value; "" and 0: that it is absent."""
    return Precondition(redis_keys.job_record(job_id), name, str(value) if value else "")


def _word(value: object) -> Word:
    if isinstance(value, ForkLineage):
        return json.dumps(asdict(value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return int(value)
    assert isinstance(value, str | int)
    return value


@dataclass(frozen=True)
class JobIdPage:
    """Job ids, newest first, and where the next page begins."""

    job_ids: list[str]
    next_cursor: str | None


@dataclass(frozen=True)
class JobFilter:
    """Which jobs; what is not named does not matter. Labels are `key` or `key:value`, all of which a job has.

    created: unix ms from and to, both included; null is open.
    """

    states: Sequence[JobState] = ()
    labels: Sequence[str] = ()
    created: tuple[int | None, int | None] = (None, None)
    tenant: str | None = None
    # Sorted sets that hold the wanted jobs between them.
    indexes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        indexes = [own_keys.labelled_jobs(label) for label in self.labels]
        if self.tenant is not None:
            indexes.append(own_keys.tenant_jobs(self.tenant))
        if self.states:
            indexes.append(redis_keys.jobs_in_state(self.states[0]))
        object.__setattr__(self, "indexes", sorted(set(indexes)) or [redis_keys.job_index()])


def label_writes(labels: Mapping[str, str], job_id: str, created_unix_ms: int) -> Iterator[Write]:
    """What makes a job be found by its labels."""
    for name in label_names(labels):
        yield ("ZADD", own_keys.labelled_jobs(name), created_unix_ms, job_id)


def label_names(labels: Mapping[str, str]) -> set[str]:
    """The words a job is found by: each label's key, and its key:value."""
    return {*labels, *(f"{key}:{value}" for key, value in labels.items())}


def page_of_jobs(client: RedisClient, wanted: JobFilter, cursor: str | None, limit: int) -> JobIdPage:
    """Jobs newest first; the cursor is a created time, so pages stay stable while jobs are submitted."""
    key = _index(client, wanted.indexes)
    oldest, newest = wanted.created
    before: str | int = f"({cursor}" if cursor else "+inf"
    if newest is not None and (not cursor or newest < int(cursor)):
        before = newest
    after: str | int = "-inf" if oldest is None else oldest
    found = client.zrevrangebyscore(key, before, after, start=0, num=limit + 1, withscores=True)
    jobs = [(raw.decode(), int(score)) for raw, score in found]
    shown = jobs[:limit]
    if len(jobs) > limit:
        # Jobs of one millisecond stay on one page: the cursor cannot point between them.
        last = shown[-1][1]
        same = client.zrangebyscore(key, last, last)
        shown += [(raw.decode(), last) for raw in same if (raw.decode(), last) not in shown]
    return JobIdPage([job for job, _ in shown], str(shown[-1][1]) if len(jobs) > limit else None)


def _index(client: RedisClient, indexes: Sequence[str]) -> str:
    """The sorted set that holds the wanted jobs; several are intersected for a moment."""
    if len(indexes) == 1:
        return indexes[0]
    key = own_keys.listing(redis_keys.digest(*indexes))
    write_even_when_full(
        client,
        ("ZINTERSTORE", key, len(indexes), *indexes, "AGGREGATE", "MIN"),
        ("EXPIRE", key, INDEX_SECONDS),
    )
    return key


@dataclass(frozen=True)
class NewJob:
    """What a forked job has besides its spec: its id, the digest of the request, and further writes."""

    job_id: str
    request_digest: str
    writes: Sequence[Write]


@dataclass(frozen=True)
class Submission:
    """Who submits a spec, and how; of the same key of a tenant only the first makes a job."""

    spec: JobSpec
    idempotency_key: str | None = None
    actor: str = "api"
    tenant: str = ""
    new_job: NewJob | None = None

    def request_digest(self) -> str:
        """Two requests of one Idempotency-Key must not differ in it."""
        return self.new_job.request_digest if self.new_job else redis_keys.digest(spec_to_json(self.spec))

    def commit(self) -> Commit:
        """The one step that makes the job; its guard fails where the key has been used before."""
        job_id = self.new_job.job_id if self.new_job else new_job_id()
        created_unix_ms = int(time.time() * 1000)
        writes: list[Write] = [
            ("SET", redis_keys.run_spec(job_id), spec_to_json(self.spec)),
            ("ZADD", redis_keys.job_index(), created_unix_ms, job_id),
            ("ZADD", own_keys.tenant_jobs(self.tenant), created_unix_ms, job_id),
            self._record(job_id, created_unix_ms),
            *label_writes(self.spec.labels, job_id, created_unix_ms),
            *(self.new_job.writes if self.new_job else ()),
        ]
        guard = None
        if self.idempotency_key is not None:
            key = idempotency_hash(self.tenant, self.idempotency_key)
            guard = Precondition(key, "job_id")
            writes += [
                ("HSET", key, "job_id", job_id, "body_digest", self.request_digest()),
                ("EXPIRE", key, IDEMPOTENCY_SECONDS),
            ]
        body = json.dumps({"reason": "submitted"})
        return Commit(
            job_id,
            ("absent",),
            JobState.QUEUED,
            guard=guard,
            writes=writes,
            kind="state",
            body=body,
            actor=self.actor,
            needs_room=True,
        )

    def _record(self, job_id: str, created_unix_ms: int) -> Write:
        return write_fields(
            job_id,
            created_at=timestamp(),
            created_unix_ms=created_unix_ms,
            name=self.spec.name,
            labels=self.spec.labels,
            tenant=self.tenant,
            priority=self.spec.priority,
        )


def submitted_before(client: RedisClient, idempotency_key: str | None, request_digest: str, tenant: str) -> str | None:
    """The job that this request has made already. Raises InvalidInput (code "idempotency_mismatch")."""
    key = idempotency_hash(tenant, idempotency_key) if idempotency_key else None
    job_id = client.hget(key, "job_id") if key else None
    if key is None or job_id is None:
        return None
    require_same_request(client, key, request_digest)
    return job_id.decode()


def require_same_request(client: RedisClient, key: str, request_digest: str) -> None:
    """Raises InvalidInput (code "idempotency_mismatch") when the key stands for another request."""
    if client.hget(key, "body_digest") != request_digest.encode():
        raise InvalidInput(
            "this Idempotency-Key was used with another body; take a new key", code="idempotency_mismatch"
        )


def idempotency_hash(tenant: str, key: str) -> str:
    """The Redis key under which a tenant's Idempotency-Key is remembered."""
    return own_keys.idempotency(redis_keys.digest(tenant, key))


def new_job_id() -> str:
    return f"job_{ULID()}"


def tenants_of(client: RedisClient, job_ids: Sequence[str]) -> dict[str, str]:
    """Whose each job is; those before there were tenants are the operator's, ""."""
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(redis_keys.job_record(job_id), "tenant")
        return {job_id: (raw or b"").decode() for job_id, raw in zip(job_ids, replies_by_key(pipe), strict=True)}


def in_turns(ranked: Iterable[str], tenants: Mapping[str, str], held: Iterable[str] = ()) -> list[str]:
    """Jobs in the order in which they get what is scarce: who has the least of it first, each tenant's own as ranked.

    held: the tenant of each that has some already.
    """
    has, queues = Counter(held), dict[str, deque[str]]()
    for job_id in ranked:
        queues.setdefault(tenants[job_id], deque()).append(job_id)
    found = []
    while queues:
        # Of equal ones the first as ranked: dictionaries keep their order.
        tenant = min(queues, key=lambda each: has[each])
        found.append(queues[tenant].popleft())
        has[tenant] += 1
        if not queues[tenant]:
            del queues[tenant]
    return found


def turns_of(client: RedisClient, ranked: Iterable[str], holding: Sequence[str]) -> list[str]:
    """The ranked jobs in the order in which they get what the jobs in `holding` have."""
    waiting = list(ranked)
    tenants = tenants_of(client, [*waiting, *holding])
    return in_turns(waiting, tenants, [tenants[job_id] for job_id in holding])


def equal_for_tenants(priorities: Mapping[str, int], tenants: Mapping[str, str]) -> dict[str, float]:
    """Weights by which every tenant has an equal share, however many jobs it has, divided by their priorities.

    In the order of `in_turns`. Together as much as the priorities, which the jobs of a single tenant keep.
    """
    sums: Counter[str] = Counter()
    for job_id, priority in priorities.items():
        sums[tenants[job_id]] += priority
    share = sum(sums.values()) / max(1, len(sums))
    found = in_turns(priorities, tenants)
    return {job_id: priorities[job_id] * share / sums[tenants[job_id]] for job_id in found}


@dataclass(frozen=True)
class EvaluationFailure:
    """Why there is no result for a step yet; `failed_attempts` counts those that failed for no passing reason."""

    step: int
    version: int
    failed_attempts: int
    code: str
    message: str


@dataclass(frozen=True)
class MetricCurves:
    """Columns of equal length; None where a point has no such scalar."""

    steps: list[int]
    columns: dict[str, Column]


def failures_of(client: RedisClient, job_id: str) -> list[EvaluationFailure]:
    """Steps of a job whose evaluation has failed, or waits for something, in order."""
    found = client.hvals(own_keys.evaluation_failures(job_id))
    return sorted((EvaluationFailure(**json.loads(raw)) for raw in found), key=lambda failure: failure.step)


def report_writes(job_id: str, reports: Iterable[tuple[int, dict[str, float]]]) -> list[Write]:
    """Redis writes that record scalars by step; a step reported again replaces what was there."""
    key = own_keys.job_metrics(job_id)
    writes: list[Write] = []
    for step, scalars in reports:
        writes.append(("ZREMRANGEBYSCORE", key, step, step))
        writes.append(("ZADD", key, step, json.dumps({"step": step, **scalars}, sort_keys=True)))
    return writes


def training_series(
    client: RedisClient, job_id: str, from_step: int = 0, to_step: int | None = None, max_points: int = 1000
) -> MetricCurves:
    """The reported scalars between two steps; thinned evenly to max_points, the newest step always kept."""
    upper = "+inf" if to_step is None else to_step
    found = client.zrangebyscore(own_keys.job_metrics(job_id), from_step, upper)
    return _columns(_thinned([_point(raw) for raw in found], max_points), "step")


def platform_series(client: RedisClient, job_id: str, max_points: int = 1000) -> MetricCurves:
    """Queue depths and replica counts; steps are unix milliseconds here."""
    found = client.zrange(own_keys.job_platform_series(job_id), 0, -1)
    return _columns(_thinned([_point(raw) for raw in found], max_points), "at_unix_ms")


def evaluation_results(client: RedisClient, job_id: str) -> list[dict[str, Any]]:
    """Every evaluation of the job in order of steps."""
    found = client.hgetall(own_keys.evaluations(job_id))
    return sorted((json.loads(raw) for raw in found.values()), key=lambda result: int(result["step"]))


def latest_step(client: RedisClient, job_id: str) -> int:
    """The newest reported training step, 0 before the first."""
    found = client.zrevrange(own_keys.job_metrics(job_id), 0, 0, withscores=True)
    return int(found[0][1]) if found else 0


def latest_point(client: RedisClient, job_id: str) -> dict[str, float]:
    """The scalars of the newest reported training step, empty before the first."""
    found = client.zrevrange(own_keys.job_metrics(job_id), 0, 0)
    return _point(found[0]) if found else {}


def steps_after(client: RedisClient, job_id: str, step: int | None) -> tuple[int, float, float]:
    """The newest reported step, and the seconds that the trainer waited and worked in those after `step` (None: 0)."""
    newest = latest_step(client, job_id)
    if step is None or newest <= step:
        return newest, 0.0, 0.0
    points = [_point(raw) for raw in client.zrangebyscore(own_keys.job_metrics(job_id), f"({step}", "+inf")]
    waited, worked = (sum(point.get(name, 0.0) for point in points) for name in ("wait_seconds", "step_seconds"))
    return newest, waited, worked


def _point(raw: bytes) -> dict[str, float]:
    point: dict[str, float] = json.loads(raw)
    return point


def _thinned(points: list[dict[str, float]], max_points: int) -> list[dict[str, float]]:
    if len(points) <= max_points:
        return points
    stride = -(-len(points) // max_points)
    return points[::-1][::stride][::-1]


def _columns(points: list[dict[str, float]], axis: str) -> MetricCurves:
    names = sorted({name for point in points for name in point} - {axis})
    columns = {name: [_finite(point.get(name)) for point in points] for name in names}
    return MetricCurves([int(point[axis]) for point in points], columns)


def _finite(value: float | None) -> float | None:
    # JSON has no NaN or infinity; a diverged scalar shows as a gap.
    return value if value is not None and abs(value) < float("inf") else None
