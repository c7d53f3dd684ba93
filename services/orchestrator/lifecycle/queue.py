"""The queue: which jobs run, and which wait for a slot among them, newly submitted or to resume after a pause."""

from __future__ import annotations

import threading

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Write
from services.orchestrator.jobs.record import clear_fields, while_field_is, write_fields
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.registry import ReplicaRegistry
from spo import redis_keys
from spo.spec.job_state import HOLDS_SLOT, JobState


class JobQueue:
    """Gives free slots to the waiting jobs, the highest priority first and of equal ones the oldest."""

    def __init__(self, jobs: JobStore, replicas: ReplicaRegistry, max_running_jobs: int) -> None:
        self.jobs = jobs
        self.replicas = replicas
        self.max_running_jobs = max_running_jobs
        self._lock = threading.Lock()

    def capacity(self) -> int:
        """Jobs past `queued` at one time: as configured, or one per live trainer while each has an inference replica.

        A job that has a slot keeps it when a trainer leaves.
        """
        if self.max_running_jobs:
            return self.max_running_jobs
        live = self.replicas.counts()
        return max(1, min(live.get("trainer", 0), live.get("inference", 0)))

    def waiting(self) -> list[str]:
        """Ids of the jobs that wait for a slot, oldest first."""
        with self.jobs.client.pipeline(transaction=True) as pipe:
            for key in (redis_keys.jobs_in_state(JobState.QUEUED), own_keys.resuming()):
                pipe.zrange(key, 0, -1, withscores=True)
            found = [(score, raw.decode()) for members in pipe.execute() for raw, score in members]
        return [job_id for _, job_id in sorted(found)]

    def fill(self) -> None:
        """Give the free slots to waiting jobs."""
        with self._lock:
            free = self.capacity() - len(self.jobs.in_states(HOLDS_SLOT))
            if free <= 0:
                return
            for job_id in list(self.jobs.by_priority(self.waiting()))[:free]:
                if not self.jobs.transition(job_id, JobState.VALIDATING, "its turn came", expected=(JobState.QUEUED,)):
                    self._resume(job_id)

    def _resume(self, job_id: str) -> None:
        if not self.jobs.transition(
            job_id, JobState.RUNNING, "its turn came again", expected=(JobState.PAUSED,), writes=_leave_queue(job_id)
        ):
            # Cancelled while it waited.
            self.jobs.write(("ZREM", own_keys.resuming(), job_id))
            # Not there at all, it would take its turn for ever.
            self.jobs.forget_ghost(job_id)

    def ask_to_resume(self, job_id: str, actor: str) -> bool:
        """Let a paused job wait for a slot; asked again, it keeps its turn. False when it is not paused any more."""
        created_unix_ms = self.jobs.record(job_id).created_unix_ms
        outcome = self.jobs.commit(
            Commit(
                job_id,
                (JobState.PAUSED,),
                guard=while_field_is(job_id, "resume_asked"),
                writes=[
                    write_fields(job_id, resume_asked=True),
                    ("ZADD", own_keys.resuming(), created_unix_ms, job_id),
                ],
                kind="resume_asked",
                actor=actor,
            )
        )
        return outcome.verdict != "state"

    def withdraw(self, job_id: str) -> None:
        """Let a paused job that waits for a slot stay paused after all."""
        guard = while_field_is(job_id, "resume_asked", 1)
        commit = Commit(job_id, guard=guard, writes=_leave_queue(job_id), kind="resume_withdrawn")
        self.jobs.commit(commit, durable=False)

    def reasons(self, job_id: str, state: JobState) -> list[str]:
        """Why a job in this state waits, where it waits for a slot."""
        waits = state is JobState.QUEUED or (state is JobState.PAUSED and self.jobs.record(job_id).resume_asked)
        if not waits:
            return []
        holding, capacity = len(self.jobs.in_states(HOLDS_SLOT)), self.capacity()
        return [f"the job waits for a slot: {holding} of {capacity} are taken; higher priorities go first"]


def _leave_queue(job_id: str) -> list[Write]:
    """What takes a job that resumes, or shall not, out of the queue."""
    return [clear_fields(job_id, "resume_asked"), ("ZREM", own_keys.resuming(), job_id)]
