"""Moves every job along its life: one small, repeatable step at a time, so that a restart goes on where it stopped.

queued -> validating   when there is a free slot
validating -> estimating   tests uploaded
estimating -> running   every training prompt has a value
running -> succeeded   the trainer finished and the last evaluation is there
cancelling -> cancelled, pausing -> paused   the trainer gave the job back
"""

from __future__ import annotations

import threading
import time

import redis

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.monitor import JobMonitor
from services.orchestrator.lifecycle.preparation import JobPreparation
from services.orchestrator.lifecycle.queue import JobQueue
from services.orchestrator.lifecycle.training import JobTraining
from services.orchestrator.replicas.assignment import ReplicaAssigner
from spo.errors import SpoError
from spo.observability.logs import get_logger
from spo.spec.job_state import ACTIVE, JobState

log = get_logger("runner")

TICK_SECONDS = 1.0
HOUSEKEEPING_SECONDS = 2.0


class JobRunner:
    """The loop over all jobs that have not ended."""

    def __init__(
        self,
        jobs: JobStore,
        queue: JobQueue,
        preparation: JobPreparation,
        training: JobTraining,
        monitor: JobMonitor,
        assigner: ReplicaAssigner,
    ) -> None:
        self.jobs = jobs
        self.queue = queue
        self.preparation = preparation
        self.training = training
        self.monitor = monitor
        self.assigner = assigner
        self._tidied_at = 0.0

    def run(self, stop: threading.Event) -> None:
        """Adopt what an earlier process left and advance all jobs until stop."""
        adopted = False
        while not stop.is_set():
            try:
                if not adopted:
                    self.adopt()
                    adopted = True
                self.tick()
            except redis.RedisError as error:
                log.warning("Redis does not answer; trying again", reason=str(error))
            stop.wait(TICK_SECONDS)

    def adopt(self) -> None:
        """Check the state of every unfinished job against its events and say that it has an owner again."""
        for job_id in self.jobs.in_states([*ACTIVE, JobState.QUEUED]):
            state = self.jobs.refold(job_id)
            self.jobs.append(job_id, "adopted", {"state": state.value})
            log.info("adopted a job", job=job_id, state=state.value)

    def tick(self) -> None:
        """One round: fill the free slots, then advance every active job by one step."""
        self.queue.fill()
        active = self.jobs.in_states(ACTIVE)
        for job_id in active:
            self._advance(job_id)
        self.assigner.balance()
        if time.monotonic() - self._tidied_at > HOUSEKEEPING_SECONDS:
            self._tidied_at = time.monotonic()
            self.assigner.replicas.drop_silent()
            self.monitor.forget(active)
            self.training.forget(active)

    def _advance(self, job_id: str) -> None:
        try:
            self._step(job_id, self.jobs.state(job_id))
            self.monitor.observe(job_id)
        except redis.RedisError:
            raise
        except SpoError as error:
            if error.retryable:
                log.warning("a job waits", job=job_id, reason=error.message)
                return
            self.jobs.fail(job_id, error.code, error.message)
        except Exception as error:
            # A fault of ours ends this job, loudly, and no other.
            log.exception("advancing a job failed", job=job_id)
            self.jobs.fail(job_id, "internal", f"{type(error).__name__}: {error}")

    def _step(self, job_id: str, state: JobState) -> None:
        match state:
            case JobState.VALIDATING:
                self.preparation.validate(job_id)
            case JobState.ESTIMATING:
                self.preparation.estimate(job_id)
            case JobState.RUNNING:
                self.training.advance(job_id)
            case JobState.PAUSING:
                self.training.pause(job_id)
            case JobState.CANCELLING:
                self.training.cancel(job_id)
            case _:
                pass
