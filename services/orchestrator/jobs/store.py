"""Jobs as append-only events: submit, read, and move them along the one table of transitions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, CommitOutcome, Fence, Precondition, Write
from services.orchestrator.jobs.creation import NewJob, Submission, require_same_request
from services.orchestrator.jobs.events import JobEvent, event_of
from services.orchestrator.jobs.listing import JobFilter, JobIdPage, page_of_jobs
from services.orchestrator.jobs.record import JobRecord, write_fields
from services.orchestrator.jobs.states import fold, may_become
from spo import redis_keys
from spo.errors import LeaseLost, NotFound
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.spec.job_state import TERMINAL, JobState, decode_state

log = get_logger("jobs")


class JobStore:
    """All jobs in Redis. Every change goes through `Commit`."""

    def __init__(self, client: RedisClient, *, durable: bool = True) -> None:
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
        """Create a queued job and return its id; the same key and request of a tenant return the same job.

        Raises InvalidInput (code "idempotency_mismatch") when the key was used for another request.
        """
        submission = Submission(spec, idempotency_key, actor, tenant, new_job)
        commit = submission.commit()
        outcome = commit.run(self.client, durable=self.durable)
        if outcome.verdict == "guard" and commit.guard is not None:
            require_same_request(self.client, commit.guard.key, submission.request_digest())
            return outcome.guard_value
        return commit.job_id

    def state(self, job_id: str) -> JobState:
        """Raises NotFound."""
        state = decode_state(self.client.get(redis_keys.run_state(job_id)))
        if state is None:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return state

    def spec(self, job_id: str) -> JobSpec:
        """Raises NotFound."""
        document = self.client.get(redis_keys.run_spec(job_id))
        if document is None:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return self.parse_spec(document)

    def record(self, job_id: str) -> JobRecord:
        """The job's record; raises NotFound."""
        fields = self.client.hgetall(redis_keys.job_record(job_id))
        if not fields:
            raise NotFound(f"there is no job {job_id}", code="job_not_found")
        return JobRecord.from_redis(fields)

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

    def by_priority(self, job_ids: Sequence[str]) -> dict[str, int]:
        """The jobs with their priorities, the highest first; of equal ones in the order given."""
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(redis_keys.job_record(job_id), "priority")
            found = {job_id: int(raw or 1) for job_id, raw in zip(job_ids, pipe.execute(), strict=True)}
        return dict(sorted(found.items(), key=lambda found: -found[1]))

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
        outcome = commit.run(self.client, durable=self.durable)
        if outcome.done:
            log.info("job state", job=job_id, before=outcome.state, to=to.value, reason=reason)
        return outcome.done

    def fail(self, job_id: str, code: str, message: str) -> bool:
        """Move a job to failed with the reason people will read."""
        message = message[:2000]
        failure = write_fields(job_id, failure_code=code, failure_message=message)
        return self.transition(job_id, JobState.FAILED, f"{code}: {message}", writes=[failure])

    def append(self, job_id: str, kind: str, body: Mapping[str, object], writes: Sequence[Write] = ()) -> None:
        """Add an event that is not a transition, with the writes it tells of."""
        Commit(job_id, writes=writes, kind=kind, body=json.dumps(body)).run(self.client, durable=False)

    def once(
        self,
        job_id: str,
        guard: Precondition,
        kind: str,
        body: Mapping[str, object],
        writes: Sequence[Write],
        *,
        durable: bool | None = None,
    ) -> bool:
        """As append, durably unless told otherwise, only while the guard holds; False when it does not."""
        commit = Commit(job_id, guard=guard, writes=writes, kind=kind, body=json.dumps(body))
        return commit.run(self.client, durable=self.durable if durable is None else durable).done

    def fenced(self, commit: Commit) -> CommitOutcome:
        """Run a commit of a lease holder. Raises LeaseLost when another trainer has the job."""
        outcome = commit.run(self.client, durable=self.durable)
        if outcome.verdict == "fence":
            trainer = commit.fence or Fence("", 0)
            raise LeaseLost(f"trainer {trainer.trainer_id} (epoch {trainer.epoch}) does not hold {commit.job_id}")
        return outcome

    def refold(self, job_id: str) -> JobState:
        """Recompute the state from the events; where the stored one or the sets by state differ, correct them at once.

        Raises NotFound, IntegrityError when the events are none that a job can have.
        """
        while True:
            stored = self.state(job_id)
            state = fold(event.body for event in self.events(job_id, limit=1_000_000) if event.kind == "state")
            listed = self._listed_under(job_id)
            if stored is state and listed == [state]:
                return state
            away = [("ZREM", redis_keys.jobs_in_state(other), job_id) for other in listed]
            # The same step puts it where it belongs; not when the job has moved since it was read.
            if Commit(job_id, (stored,), state, writes=away).run(self.client, durable=self.durable).done:
                log.error("stored state differs from its events; corrected", job=job_id, folded=state.value)

    def _listed_under(self, job_id: str) -> list[JobState]:
        with self.client.pipeline(transaction=True) as pipe:
            for state in JobState:
                pipe.zscore(redis_keys.jobs_in_state(state), job_id)
            return [state for state, score in zip(JobState, pipe.execute(), strict=True) if score is not None]
