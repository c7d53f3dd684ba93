"""What services other than the orchestrator read of a run besides its spec: its state and its tenant."""

from __future__ import annotations

from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState, decode_state


def run_state(client: RedisClient, run_id: str) -> JobState | None:
    """The run's state; None for a run that was never submitted, or is deleted."""
    stored = client.get(redis_keys.run_state(run_id))
    return decode_state(stored if isinstance(stored, bytes) else None)


def estimates_are_pending(client: RedisClient, run_id: str) -> bool:
    """Whether a job that trains already still waits for values of its prompts."""
    return bool(client.hexists(redis_keys.job_record(run_id), "estimates_pending"))


def run_tenant(client: RedisClient, run_id: str) -> str | None:
    """The tenant whose run it is, "" for the operator's own; None where no record names one."""
    stored = client.hget(redis_keys.job_record(run_id), "tenant")
    return stored.decode() if isinstance(stored, bytes) else None
