"""Which running jobs want a trainer: read from Redis once for all trainers that wait, however many they are."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from services.orchestrator.jobs.lease import read_leases
from services.orchestrator.jobs.store import JobStore
from spo import redis_keys
from spo.spec.job_state import JobState

LEASABLE = (JobState.RUNNING,)


@dataclass(frozen=True)
class Vacancy:
    """A job that is not trained yet, and who holds its lease ("" where nobody does)."""

    job_id: str
    holder: str


class Vacancies:
    """The jobs in want of a trainer, as they were at one moment."""

    def __init__(self, jobs: JobStore, lease_ms: int) -> None:
        """lease_ms: how long a lease lasts."""
        self._jobs = jobs
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._found: list[Vacancy] = []

    def wanted_by(self, trainer_id: str, since: float) -> list[str]:
        """Jobs that this trainer may lease, oldest first; read no earlier than `since` (time.monotonic)."""
        # Who waits here for another's reading takes its result: hundreds of trainers cost at most two readings.
        with self._lock:
            if self._read_at < since:
                began = time.monotonic()
                self._found = self._read()
                self._read_at = began
            found = self._found
        return [vacancy.job_id for vacancy in found if vacancy.holder in ("", trainer_id)]

    def _read(self) -> list[Vacancy]:
        job_ids = self._jobs.in_states(LEASABLE)
        with self._jobs.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(redis_keys.job_record(job_id), "trained_steps")
            trained = pipe.execute()
        untrained = [job_id for job_id, steps in zip(job_ids, trained, strict=True) if steps is None]
        leases = read_leases(self._jobs.client, untrained, self._lease_ms)
        found = zip(untrained, leases, strict=True)
        return [Vacancy(job_id, lease.trainer_id if lease.live else "") for job_id, lease in found]
