"""Moves every job along its life: one small, repeatable step at a time, so that a restart goes on where it stopped.

queued -> validating   when there is a free slot
validating -> estimating   tests uploaded
estimating -> running   enough training prompts have a value; the others get theirs while it trains
running -> succeeded   the trainer finished and the last evaluation is there
cancelling -> cancelled, pausing -> paused   the trainer gave the job back
"""

from __future__ import annotations

import threading
import time

import redis

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.job_steps import JobSteps
from services.orchestrator.lifecycle.monitor import JobMonitor
from services.orchestrator.lifecycle.preparation import JobPreparation
from services.orchestrator.lifecycle.queue import JobQueue
from services.orchestrator.lifecycle.training import JobTraining
from services.orchestrator.replicas.assignment import ReplicaAssigner
from spo.errors import IntegrityError, NotFound, NotReady, SpoError, Unreachable
from spo.observability.logs import get_logger
from spo.spec.job_state import ACTIVE, JobState

log = get_logger("runner")

TICK_SECONDS = 1.0
HOUSEKEEPING_SECONDS = 2.0
ADOPTION_SECONDS = 30.0
# Of a round that is asked for by itself; the loop waits for no step longer than for its next round.
PATIENCE_SECONDS = 30.0
# A step that takes so long is named among the job's waits.
LONG_STEP_SECONDS = 5.0


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
        self._adoption = JobSteps(self._adopt, "adoption")
        self._steps = JobSteps(self._advance, "job-step")

    def run(self, stop: threading.Event) -> None:
        """Adopt what an earlier process left and advance all jobs until stop."""
        adopted = False
        try:
            while not stop.is_set():
                try:
                    if not adopted:
                        self.adopt()
                        adopted = True
                    self.tick(TICK_SECONDS)
                except redis.RedisError as error:
                    log.warning("Redis does not answer; trying again", reason=str(error))
                except NotReady as error:
                    log.warning("jobs wait", reason=error.message)
                stop.wait(TICK_SECONDS)
        finally:
            self._adoption.close()
            self._steps.close()

    def adopt(self) -> None:
        """Check the state of every unfinished job against its events and say that it has an owner again."""
        self._adoption.round(self.jobs.in_states([*ACTIVE, JobState.QUEUED]), ADOPTION_SECONDS)

    def tick(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """One round: fill the free slots, then advance every active job by one step.

        A step that takes longer than patience_seconds goes on beside the following rounds.
        """
        self.queue.fill()
        active = self.jobs.in_states(ACTIVE)
        adopted_later = self._adoption.seconds_under_way()
        self._steps.round([job_id for job_id in active if job_id not in adopted_later], patience_seconds)
        for job_id, seconds in self._steps.seconds_under_way().items():
            if seconds > LONG_STEP_SECONDS:
                self.monitor.note_wait(job_id, f"its step in the orchestrator has taken {seconds:.0f} s so far")
        self.assigner.balance()
        if time.monotonic() - self._tidied_at > HOUSEKEEPING_SECONDS:
            self._tidied_at = time.monotonic()
            self.assigner.replicas.drop_silent()
            self.monitor.forget(active)
            self.training.forget(active)

    def _adopt(self, job_id: str) -> None:
        try:
            state = self.jobs.refold(job_id)
            self.jobs.append(job_id, "adopted", {"state": state.value})
            log.info("adopted a job", job=job_id, state=state.value)
        except (redis.RedisError, NotReady):
            raise
        except NotFound:
            self._forget_ghost(job_id)
        except Exception as error:
            self._quarantine(job_id, error)

    def _quarantine(self, job_id: str, error: Exception) -> None:
        """End one job whose history cannot be; nobody else waits for it."""
        reason = error.message if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"
        log.error("a job's history is damaged; it fails, others go on", job=job_id, reason=reason)
        if not self.jobs.fail(job_id, "history_damaged", reason):
            log.error("and it cannot even be failed; it stays as it is", job=job_id)

    def _forget_ghost(self, job_id: str) -> None:
        if self.jobs.forget_ghost(job_id):
            log.error("a job that is not there was on the lists; it is taken off", job=job_id)

    def _advance(self, job_id: str) -> None:
        try:
            self._step(job_id, self.jobs.state(job_id))
            self.monitor.observe(job_id)
            self.monitor.note_wait(job_id, self._move_events(job_id))
        except redis.RedisError:
            raise
        except SpoError as error:
            if error.code == "job_not_found":
                self._forget_ghost(job_id)
            elif error.retryable:
                log.warning("a job waits", job=job_id, reason=error.message)
                self.monitor.note_wait(job_id, error.message)
            else:
                self.jobs.fail(job_id, error.code, error.message)
        except Exception as error:
            # A fault of ours ends this job, loudly, and no other.
            log.exception("advancing a job failed", job=job_id)
            self.jobs.fail(job_id, "internal", f"{type(error).__name__}: {error}")

    def _move_events(self, job_id: str) -> str:
        """Keep what Redis has of the job's events within bounds; why it cannot be, "" when it is."""
        try:
            self.jobs.move_events_to_files(job_id)
        except (OSError, IntegrityError, Unreachable) as error:
            log.warning("events stay in Redis", job=job_id, reason=str(error))
            return f"its older events cannot be written to files, and stay in Redis: {error}"
        return ""

    def _step(self, job_id: str, state: JobState) -> None:
        if state in (JobState.ESTIMATING, JobState.RUNNING):
            self.assigner.require_served(job_id)
        match state:
            case JobState.VALIDATING:
                self.preparation.validate(job_id)
            case JobState.ESTIMATING:
                self.preparation.estimate(job_id)
            case JobState.RUNNING:
                if self.jobs.record(job_id).estimates_pending:
                    self.preparation.estimate_beside_training(job_id)
                self.training.advance(job_id)
            case JobState.PAUSING:
                self.training.pause(job_id)
            case JobState.CANCELLING:
                self.training.cancel(job_id)
            case _:
                pass
