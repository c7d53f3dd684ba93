"""What the schedule of a job owes: its reference first, then a version per interval of steps, and the last one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition, Write
from services.orchestrator.jobs.record import write_fields
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState

SCHEDULED = (JobState.ESTIMATING, JobState.RUNNING)
# A job that pauses lets the evaluation under way finish.
UNDER_WAY = (*SCHEDULED, JobState.PAUSING)


@dataclass(frozen=True)
class ScheduledEvaluation:
    """A weight version that a job's schedule wants evaluated, and the training step it stands for."""

    job_id: str
    step: int
    version: int


@dataclass(frozen=True)
class EvaluationFailure:
    """Why there is no result for a step yet; `failed_attempts` counts those that failed for no passing reason."""

    step: int
    version: int
    failed_attempts: int
    code: str
    message: str


class EvaluationSchedule:
    """Results and failures by step; a step is given up on after `attempts` failures, and `kept` results stay."""

    def __init__(self, jobs: JobStore, weights: WeightAnnouncements, attempts: int, kept: int) -> None:
        self.jobs = jobs
        self.weights = weights
        self.attempts = attempts
        self.kept = kept

    def due(self, job_id: str) -> ScheduledEvaluation | None:
        """What the job's schedule wants next: step 0, then the newest version of a new interval, and the last one."""
        spec = self.jobs.spec(job_id)
        if spec.tasks.evaluation_problems == 0 or spec.trainer.steps == 0:
            return None
        settled = {*self._evaluated(job_id), *(failure.step for failure in self.given_up(job_id))}
        record = self.jobs.record(job_id)
        if 0 not in settled:
            return ScheduledEvaluation(job_id, 0, record.start_version)
        versions = self.weights.versions(job_id)
        newest = versions[-1] if versions else {"step": 0, "version": 0}
        due = ScheduledEvaluation(job_id, int(newest["step"]), int(newest["version"]))
        if due.step in settled:
            return None
        interval = spec.evaluation.interval_steps
        return due if record.is_trained or due.step // interval > max(settled) // interval else None

    def store(self, scheduled: ScheduledEvaluation, result: dict[str, Any]) -> None:
        """Keep a result under its step: evaluated twice, it counts once."""
        key, step = own_keys.evaluations(scheduled.job_id), scheduled.step
        brief = {name: value for name, value in result.items() if name != "per_problem"}
        writes: list[Write] = [
            ("HSET", key, step, json.dumps(result)),
            ("HDEL", own_keys.evaluation_failures(scheduled.job_id), step),
        ]
        known = self._evaluated(scheduled.job_id)
        if step >= max(known, default=0):
            scores = {f"pass@{k}": float(score["value"]) for k, score in result["pass_at_k"].items()}
            writes.append(write_fields(scheduled.job_id, scores=scores))
        # The reference's stays: everything is compared with it.
        older = sorted(known - {0})
        surplus = older[: max(0, len(older) + 1 - self.kept)]
        writes += [("HDEL", key, *surplus)] if surplus else []
        self.jobs.once(scheduled.job_id, Precondition(key, str(step)), "evaluation", brief, writes)

    def failures(self, job_id: str) -> list[EvaluationFailure]:
        """Steps whose evaluation has failed, or waits for something, in order."""
        return failures_of(self.jobs.client, job_id)

    def given_up(self, job_id: str) -> list[EvaluationFailure]:
        """Steps that stay without a result."""
        return [failure for failure in self.failures(job_id) if failure.failed_attempts >= self.attempts]

    def note_failure(self, scheduled: ScheduledEvaluation, code: str, message: str, *, is_passing: bool) -> None:
        """Store why there is no result. The last attempt, which a passing failure does not use up, becomes an event."""
        key, field = own_keys.evaluation_failures(scheduled.job_id), str(scheduled.step)
        stored = self.jobs.client.hget(key, field) or b""
        before = json.loads(stored)["failed_attempts"] if stored else 0
        failure = EvaluationFailure(
            scheduled.step, scheduled.version, before if is_passing else before + 1, code, message[:2000]
        )
        kind = "evaluation_failed" if failure.failed_attempts >= self.attempts else ""
        document = json.dumps(asdict(failure))
        guard, writes = Precondition(key, field, stored.decode()), [("HSET", key, field, document)]
        commit = Commit(scheduled.job_id, UNDER_WAY, guard=guard, writes=writes, kind=kind, body=document)
        self.jobs.commit(commit, durable=False)

    def _evaluated(self, job_id: str) -> set[int]:
        found = self.jobs.client.hkeys(own_keys.evaluations(job_id))
        return {int(step) for step in found}


def failures_of(client: RedisClient, job_id: str) -> list[EvaluationFailure]:
    """Steps of a job whose evaluation has failed, or waits for something, in order."""
    found = client.hvals(own_keys.evaluation_failures(job_id))
    return sorted((EvaluationFailure(**json.loads(raw)) for raw in found), key=lambda failure: failure.step)
