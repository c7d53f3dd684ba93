"""New jobs: everything that is written when one is submitted, once per Idempotency-Key of a tenant."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition, Write, timestamp
from services.orchestrator.jobs.listing import label_writes
from services.orchestrator.jobs.record import write_fields
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import JobSpec, spec_to_json
from spo.spec.job_state import JobState

IDEMPOTENCY_SECONDS = 86_400


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
