"""The queue: which jobs run, and which wait for a place among them, submitted or to go on after a pause."""

from __future__ import annotations

import threading

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.jobs.waiting import by_priority, no_longer_waits, waiting, wants_to_resume
from services.orchestrator.replicas.registry import ReplicaRegistry
from spo.spec.job_state import HOLDS_SLOT, JobState


class JobQueue:
    """Gives free places to the waiting jobs, the highest priority first and of equal ones the oldest."""

    def __init__(self, jobs: JobStore, replicas: ReplicaRegistry, max_running_jobs: int) -> None:
        self.jobs = jobs
        self.replicas = replicas
        self.max_running_jobs = max_running_jobs
        self._lock = threading.Lock()

    def capacity(self) -> int:
        """Jobs past `queued` at one time: as configured, or one per live trainer while each has an inference replica.

        Nobody who runs is stopped when a trainer leaves.
        """
        if self.max_running_jobs:
            return self.max_running_jobs
        live = self.replicas.counts()
        return max(1, min(live.get("trainer", 0), live.get("inference", 0)))

    def fill(self) -> None:
        """Let waiting jobs take the free places."""
        with self._lock:
            free = self.capacity() - len(self.jobs.in_states(HOLDS_SLOT))
            if free <= 0:
                return
            for job_id in list(by_priority(self.jobs.client, waiting(self.jobs.client)))[:free]:
                if not self.jobs.transition(job_id, JobState.VALIDATING, "its turn came", expected=(JobState.QUEUED,)):
                    self._go_on(job_id)

    def _go_on(self, job_id: str) -> None:
        paused = (JobState.PAUSED,)
        if not self.jobs.transition(
            job_id, JobState.RUNNING, "its turn came again", expected=paused, writes=no_longer_waits(job_id)
        ):
            # Cancelled while it waited.
            self.jobs.client.zrem(own_keys.resuming(), job_id)

    def reasons(self, job_id: str, state: JobState) -> list[str]:
        """Why a job in this state that waits for a place waits."""
        waits = state is JobState.QUEUED or (state is JobState.PAUSED and wants_to_resume(self.jobs.client, job_id))
        if not waits:
            return []
        holding, queue = len(self.jobs.in_states(HOLDS_SLOT)), self.capacity()
        return [f"the job waits for a place: {holding} of {queue} are taken; higher priorities go first"]
