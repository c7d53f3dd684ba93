"""A job while it trains: until it has succeeded, is paused, or is cancelled."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.orchestrator.evaluation.queue import EvaluationQueue
from services.orchestrator.jobs.checkpoints import recorded_checkpoints
from services.orchestrator.jobs.commit import Write
from services.orchestrator.jobs.leases import Leases
from services.orchestrator.jobs.series import latest_step
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.dead_letters import DeadLetterWatch
from services.orchestrator.settings import Settings
from services.orchestrator.values.refresh import ReferenceRefresh
from spo import redis_keys
from spo.spec.job_state import JobState

DEAD_LETTER_SECONDS = 2.0


class JobTraining:
    """running -> succeeded, pausing -> paused, cancelling -> cancelled; every step may be repeated."""

    def __init__(
        self,
        jobs: JobStore,
        leases: Leases,
        evaluations: EvaluationQueue,
        references: ReferenceRefresh,
        settings: Settings,
    ) -> None:
        self.jobs = jobs
        self.leases = leases
        self.evaluations = evaluations
        self.references = references
        self.settings = settings
        self.dead_letters = DeadLetterWatch(jobs, settings.max_dead_letter_share)
        self._checked_at: dict[str, float] = {}
        self._pausing_since: dict[str, float] = {}

    def advance(self, job_id: str) -> None:
        """A running job: refresh its reference, and end it when it is trained and evaluated.

        Raises PreconditionFailed (code "too_many_dead_letters").
        """
        self._pausing_since.pop(job_id, None)
        self._check_dead_letters(job_id)
        record = self.jobs.record(job_id)
        if not record.estimates_pending:
            # A later reference takes its prompts from those that have a value: all of them, then.
            self.references.advance(job_id)
        trained_steps = record.trained_steps
        if trained_steps is not None and self.evaluations.schedule.due(job_id) is None:
            reason = f"{trained_steps} steps trained and evaluated"
            given_up = self.evaluations.schedule.given_up(job_id)
            if given_up:
                steps = ", ".join(str(failure.step) for failure in given_up)
                reason = f"{trained_steps} steps trained; the evaluation of step {steps} failed: {given_up[-1].message}"
            self.jobs.transition(job_id, JobState.SUCCEEDED, reason, writes=[_drop_prompts(job_id)])

    def pause(self, job_id: str) -> None:
        """A pausing job is paused once its last step is saved, or nobody is there to save it."""
        since = self._pausing_since.setdefault(job_id, time.monotonic())
        if not self.leases.lease(job_id).live:
            self.jobs.transition(job_id, JobState.PAUSED, "no trainer holds the job")
        elif self._is_saved(job_id):
            self.jobs.transition(job_id, JobState.PAUSED, "the last step is saved")
        elif time.monotonic() - since > self.settings.pause_grace_seconds:
            self.jobs.transition(job_id, JobState.PAUSED, "no checkpoint came within the grace; the last one counts")

    def cancel(self, job_id: str) -> None:
        """A cancelling job is cancelled once no trainer holds it."""
        if not self.leases.lease(job_id).live:
            reason = "no trainer holds the job"
            self.jobs.transition(job_id, JobState.CANCELLED, reason, writes=[_drop_prompts(job_id)])

    def forget(self, active: Sequence[str]) -> None:
        """Drop what is remembered of jobs that ended."""
        for remembered in (self._checked_at, self._pausing_since):
            for ended in remembered.keys() - set(active):
                del remembered[ended]

    def _check_dead_letters(self, job_id: str) -> None:
        if time.monotonic() - self._checked_at.get(job_id, float("-inf")) <= DEAD_LETTER_SECONDS:
            return
        self._checked_at[job_id] = time.monotonic()
        dispatched = int(self.jobs.client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
        self.dead_letters.check_groups(job_id, dispatched)

    def _is_saved(self, job_id: str) -> bool:
        saved = recorded_checkpoints(self.jobs.client, job_id)
        return bool(saved) and saved[-1].step >= latest_step(self.jobs.client, job_id) > 0


def _drop_prompts(job_id: str) -> Write:
    """Drop the prompts of an ended run; the consumer group stays for those who still read."""
    return ("XTRIM", redis_keys.prompts(job_id), "MAXLEN", 0)
