"""Jobs as append-only events: submit, read, and move them along the one table of transitions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import (
    Commit,
    CommitOutcome,
    Fence,
    Precondition,
    Write,
    timestamp,
)
from services.orchestrator.jobs.listing import JobFilter, JobIdPage, label_writes, page_of_jobs
from services.orchestrator.jobs.states import TRANSITIONS, JobAction, fold, may_become, refuse
from services.orchestrator.jobs.waiting import ask_to_resume, withdraw_resume
from spo import redis_keys
from spo.errors import InvalidInput, LeaseLost, NotFound
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, spec_from_json, spec_to_json
from spo.spec.job_state import TERMINAL, JobState

log = get_logger("jobs")

IDEMPOTENCY_SECONDS = 86_400
FIRST_EVENT = "0-0"


@dataclass(frozen=True)
class JobEvent:
    """One entry of a job's history; seq counts from 1 without gaps."""

    seq: int
    at: str
    actor: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True)
class NewJob:
    """What a job has from the start that was not submitted as a spec: its id, what its request was, further writes."""

    job_id: str
    request_digest: str
    writes: Sequence[Write]


class JobStore:
    """All jobs in Redis. Every change goes through `Commit`."""

    def __init__(self, client: RedisClient, durable: bool = True) -> None:
        self.client = client
        self.durable = durable
        self.parse_spec = lru_cache(maxsize=64)(spec_from_json)

    def submit(
        self,
        spec: JobSpec,
        idempotency_key: str | None = None,
        actor: str = "api",
        tenant: str = "",
        new_job: NewJob | None = None,
    ) -> str:
        """Create a queued job and return its id; the same key and spec of a tenant return the same job.

        Raises InvalidInput (code "idempotency_mismatch") when the key was used for another spec.
        """
        job_id = new_job.job_id if new_job else new_job_id()
        created_unix_ms = int(time.time() * 1000)
        document = spec_to_json(spec)
        body_digest = new_job.request_digest if new_job else redis_keys.digest(document)
        writes: list[Write] = [
            ("SET", redis_keys.run_spec(job_id), document),
            ("ZADD", redis_keys.job_index(), created_unix_ms, job_id),
            ("ZADD", own_keys.tenant_jobs(tenant), created_unix_ms, job_id),
            *_record_writes(job_id, spec, created_unix_ms, tenant),
            *label_writes(spec.labels, job_id, created_unix_ms),
            *(new_job.writes if new_job else ()),
        ]
        guard = None
        if idempotency_key is not None:
            key = _idempotency(tenant, idempotency_key)
            guard = Precondition(key, "job_id")
            writes += [
                ("HSET", key, "job_id", job_id, "body_digest", body_digest),
                ("EXPIRE", key, IDEMPOTENCY_SECONDS),
            ]
        body = json.dumps({"reason": "submitted"})
        commit = Commit(
            job_id, ("absent",), JobState.QUEUED, guard=guard, writes=writes, kind="state", body=body, actor=actor
        )
        outcome = commit.run(self.client, self.durable)
        if outcome.verdict == "guard" and guard is not None:
            return self._same_job(guard.key, outcome.guard_value, body_digest)
        return job_id

    def made_before(self, idempotency_key: str | None, request_digest: str, tenant: str) -> str | None:
        """The job that this request has made already. Raises InvalidInput (code "idempotency_mismatch")."""
        key = _idempotency(tenant, idempotency_key) if idempotency_key else None
        made = self.client.hget(key, "job_id") if key else None
        return self._same_job(key, made.decode(), request_digest) if key and made else None

    def _same_job(self, key: str, job_id: str, body_digest: str) -> str:
        if self.client.hget(key, "body_digest") != body_digest.encode():
            raise InvalidInput(
                "this Idempotency-Key was used with another body; take a new key", code="idempotency_mismatch"
            )
        return job_id

    def state(self, job_id: str) -> JobState:
        """Raises NotFound."""
        state = self.client.get(redis_keys.run_state(job_id))
        if state is None:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return JobState(state.decode())

    def spec(self, job_id: str) -> JobSpec:
        """Raises NotFound."""
        document = self.client.get(redis_keys.run_spec(job_id))
        if document is None:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return self.parse_spec(document)

    def record(self, job_id: str) -> dict[str, str]:
        """The job's record; raises NotFound."""
        fields = self.client.hgetall(redis_keys.job_record(job_id))
        if not fields:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return {name.decode(): value.decode() for name, value in fields.items()}

    def events(self, job_id: str, after_seq: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Events after a sequence number, oldest first."""
        entries = self.client.xrange(own_keys.job_events(job_id), min=f"({after_seq}-0", count=limit)
        return [event_of(entry) for entry in entries]

    def tenant(self, job_id: str) -> str:
        """Whose job it is; the operator's own have the tenant "". Raises NotFound."""
        tenant = self.client.hget(redis_keys.job_record(job_id), "tenant")
        if tenant is None:
            # Before there were tenants all jobs were the operator's.
            self.state(job_id)
            return ""
        return str(tenant.decode())

    def active_of(self, tenant: str) -> int:
        """How many of a tenant's jobs have not ended."""
        ended = [redis_keys.jobs_in_state(state) for state in TERMINAL]
        left = self.client.zdiff([own_keys.tenant_jobs(tenant), *ended])
        return len(left)

    def page(
        self,
        states: Sequence[JobState],
        cursor: str | None,
        limit: int,
        tenant: str | None = None,
        labels: Sequence[str] = (),
        created: tuple[int | None, int | None] = (None, None),
    ) -> JobIdPage:
        """Jobs newest first, by what `listing` finds them."""
        return page_of_jobs(self.client, JobFilter(states, labels, created, tenant), cursor, limit)

    def in_states(self, states: Iterable[JobState]) -> list[str]:
        """Ids of the jobs in any of these states, oldest first."""
        with self.client.pipeline(transaction=True) as pipe:
            for state in states:
                pipe.zrange(redis_keys.jobs_in_state(state), 0, -1, withscores=True)
            found = [(score, raw.decode()) for members in pipe.execute() for raw, score in members]
        return [job_id for _, job_id in sorted(found)]

    def users_of(self, dataset_id: str) -> list[str]:
        """Jobs that have not ended and whose tasks are this dataset."""
        unfinished = self.in_states([state for state in JobState if state not in TERMINAL])
        stored = self.client.mget(list(map(redis_keys.run_spec, unfinished))) if unfinished else []
        # Thousands may wait; only those that hold the id somewhere are worth parsing.
        found = [
            (job_id, raw) for job_id, raw in zip(unfinished, stored, strict=True) if dataset_id.encode() in (raw or b"")
        ]
        return [job_id for job_id, raw in found if self.parse_spec(raw).tasks.id == dataset_id]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self.client.pipeline(transaction=False) as pipe:
            for state in JobState:
                pipe.zcard(redis_keys.jobs_in_state(state))
            return dict(zip(JobState, pipe.execute(), strict=True))

    def transition(
        self,
        job_id: str,
        to: JobState,
        reason: str,
        *,
        expected: Iterable[JobState] | None = None,
        actor: str = "orchestrator",
        writes: Sequence[Write] = (),
    ) -> bool:
        """Move a job; False when it is not (or no longer) in an expected state, by default any that may become `to`."""
        allowed = may_become(to) if expected is None else frozenset(expected) & may_become(to)
        body = json.dumps({"reason": reason})
        commit = Commit(job_id, sorted(allowed), to, writes=writes, kind="state", body=body, actor=actor)
        outcome = commit.run(self.client, self.durable)
        if outcome.done:
            log.info("job state", job=job_id, before=outcome.state, to=to.value, reason=reason)
        return outcome.done

    def fail(self, job_id: str, code: str, message: str) -> bool:
        """Move a job to failed with the reason people will read."""
        record = ("HSET", redis_keys.job_record(job_id), "failure_code", code, "failure_message", message[:2000])
        return self.transition(job_id, JobState.FAILED, f"{code}: {message[:2000]}", writes=[record])

    def act(self, job_id: str, action: JobAction, actor: str = "api") -> JobState:
        """Do what a person asks; repeated asking changes nothing. Raises NotFound, Conflict (illegal_transition)."""
        while True:
            state = self.state(job_id)
            if state in action.already:
                if action.name == "pause":
                    withdraw_resume(self.client, job_id)
                return state
            if state not in action.moves:
                raise refuse(action.name, state)
            if state in action.queues:
                if ask_to_resume(self.client, job_id, actor, self.durable):
                    return state
                continue
            to = action.moves[state]
            if self.transition(job_id, to, f"{action.name} asked for", expected=(state,), actor=actor):
                return to

    def append(self, job_id: str, kind: str, body: dict[str, Any], writes: Sequence[Write] = ()) -> None:
        """Add an event that is not a transition, with the writes it tells of."""
        Commit(job_id, writes=writes, kind=kind, body=json.dumps(body)).run(self.client, durable=False)

    def once(
        self,
        job_id: str,
        guard: Precondition,
        kind: str,
        body: dict[str, Any],
        writes: Sequence[Write],
        durable: bool | None = None,
    ) -> bool:
        """As append, durably unless told otherwise, only while the guard holds; False when it does not."""
        commit = Commit(job_id, guard=guard, writes=writes, kind=kind, body=json.dumps(body))
        return commit.run(self.client, self.durable if durable is None else durable).done

    def fenced(self, commit: Commit) -> CommitOutcome:
        """Run a commit of a lease holder. Raises LeaseLost when another trainer has the job."""
        outcome = commit.run(self.client, self.durable)
        if outcome.verdict == "fence":
            trainer = commit.fence or Fence("", 0)
            raise LeaseLost(f"trainer {trainer.trainer_id} (epoch {trainer.epoch}) does not hold {commit.job_id}")
        return outcome

    def refold(self, job_id: str) -> JobState:
        """Recompute the state from the events and correct the stored one if it differs."""
        bodies = [event.body for event in self.events(job_id, limit=1_000_000) if event.kind == "state"]
        state = fold(bodies)
        if self.state(job_id) is not state:
            log.error("stored state differs from its events; corrected", job=job_id, folded=state.value)
            self.client.set(redis_keys.run_state(job_id), state.value)
        return state


def new_job_id() -> str:
    return f"job_{ULID()}"


def _idempotency(tenant: str, key: str) -> str:
    return own_keys.idempotency(redis_keys.digest(tenant, key))


def legal_transitions() -> dict[str, list[str]]:
    """The table as plain words, for documents and OpenAPI."""
    return {state.value: sorted(following) for state, following in TRANSITIONS.items()}


def event_of(entry: tuple[bytes, dict[bytes, bytes]]) -> JobEvent:
    """Decode one stream entry."""
    entry_id, fields = entry
    body = json.loads(fields[b"body"])
    if fields[b"kind"] == b"state":
        body = {"from": fields[b"from"].decode() or None, "to": fields[b"to"].decode(), **body}
    return JobEvent(
        seq=int(entry_id.split(b"-")[0]),
        at=fields[b"at"].decode(),
        actor=fields[b"actor"].decode(),
        kind=fields[b"kind"].decode(),
        body=body,
    )


def _record_writes(job_id: str, spec: JobSpec, created_unix_ms: int, tenant: str) -> list[Write]:
    created: Write = ("created_at", timestamp(), "created_unix_ms", created_unix_ms)
    named: Write = ("name", spec.name, "labels", json.dumps(spec.labels), "tenant", tenant, "priority", spec.priority)
    return [("HSET", redis_keys.job_record(job_id), *created, *named)]
