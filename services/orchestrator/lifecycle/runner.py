"""Moves every job along its life: one small, repeatable step at a time, so that a restart goes on where it stopped.

queued -> validating   when there is room for a running job
validating -> estimating   tests uploaded
estimating -> running   every training prompt has a value
running -> succeeded   the trainer finished and the last evaluation is there
cancelling -> cancelled, pausing -> paused   the trainer let go
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.queue import EvaluationQueue
from services.orchestrator.evaluation.scorer import upload_tests
from services.orchestrator.experience.availability import await_stored, needs_estimates, write_prompts
from services.orchestrator.jobs.commit import Write
from services.orchestrator.jobs.leases import Leases
from services.orchestrator.jobs.series import latest_step
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.monitor import MIN_DEAD_LETTERS, Watch, dead_letters, dead_requests
from services.orchestrator.lifecycle.queue import JobQueue
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.registry import ReplicaRegistry
from services.orchestrator.settings import Settings
from services.orchestrator.values.refresh import ReferenceRefresh
from services.orchestrator.values.requests import publish_estimates, publish_pivotal
from spo import redis_keys
from spo.errors import PreconditionFailed, SpoError
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import ACTIVE, JobState
from spo.tasks.problem import Problem

log = get_logger("runner")

TICK_SECONDS = 1.0
PROGRESS_SECONDS = 2.0
HOUSEKEEPING_SECONDS = 2.0


class JobRunner:
    """The loop over all jobs that are not finished."""

    def __init__(
        self,
        jobs: JobStore,
        library: TaskLibrary,
        evaluations: EvaluationQueue,
        leases: Leases,
        replicas: ReplicaRegistry,
        judge: RpcClient,
        settings: Settings,
        references: ReferenceRefresh,
        queue: JobQueue,
        assigner: ReplicaAssigner,
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.evaluations = evaluations
        self.leases = leases
        self.replicas = replicas
        self.judge = judge
        self.settings = settings
        self.references = references
        self.queue = queue
        self.assigner = assigner
        self.watch = Watch(jobs, replicas, leases, assigner, settings.stall_seconds)
        self._told: dict[tuple[str, str], tuple[int, float]] = {}
        self._pausing_since: dict[str, float] = {}
        self._kept_house_at = 0.0

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
        """One round: fill the free places, then advance every active job by one step."""
        self.queue.fill()
        active = self.jobs.in_states(ACTIVE)
        for job_id in active:
            self._advance(job_id)
        self.assigner.balance()
        if time.monotonic() - self._kept_house_at > HOUSEKEEPING_SECONDS:
            self._kept_house_at = time.monotonic()
            self.replicas.drop_silent()
            self.watch.forget(active)

    def _advance(self, job_id: str) -> None:
        try:
            self._step(job_id, self.jobs.state(job_id))
            self.watch.look(job_id)
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
        if state is not JobState.PAUSING:
            self._pausing_since.pop(job_id, None)
        match state:
            case JobState.VALIDATING:
                self._validate(job_id)
            case JobState.ESTIMATING:
                self._estimate(job_id)
            case JobState.RUNNING:
                self._check_dead_letters(job_id)
                self.references.advance(job_id)
                self._finish_when_trained(job_id)
            case JobState.PAUSING:
                self._pause(job_id)
            case JobState.CANCELLING:
                self._cancel(job_id)
            case _:
                pass

    def _validate(self, job_id: str) -> None:
        """Give the judges every test set of the job; content-addressed, so doing it twice changes nothing."""
        spec = self.jobs.spec(job_id)
        await_stored(self.jobs.client, spec)
        tasks = self.library.load(spec.tasks)
        write_prompts(self.jobs.client, job_id, tasks.train, spec)
        problems = [*tasks.train, *tasks.evaluation]
        upload_tests(self.judge, problems)
        record = redis_keys.job_record(job_id)
        totals = ("HSET", record, "prompts_total", len(tasks.train), "evaluation_total", len(tasks.evaluation))
        self.jobs.transition(job_id, JobState.ESTIMATING, f"{len(problems)} problems ready", writes=[totals])

    def _estimate(self, job_id: str) -> None:
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        problems = tasks.train
        if not needs_estimates(spec):
            self.jobs.transition(job_id, JobState.RUNNING, "the objectives need no values")
            return
        publish_estimates(self.jobs, job_id, tasks)
        done = self.jobs.client.hlen(redis_keys.run_values(job_id))
        self._tell_progress(job_id, done, len(problems))
        given_up = len(dead_requests(self.jobs.client, job_id, redis_keys.estimates())) if done < len(problems) else 0
        self._refuse_dead_letters(given_up, len(problems), "estimates")
        if done + given_up >= len(problems) and self._pivotal_is_over(job_id, spec, problems):
            self.jobs.transition(job_id, JobState.RUNNING, f"{done} of {len(problems)} prompts have a value")

    def _pivotal_is_over(self, job_id: str, spec: JobSpec, problems: Sequence[Problem]) -> bool:
        """Ask for pivotal tokens where the spec wants them; whether training may begin."""
        if spec.value is None or spec.value.pivotal is None:
            return True
        publish_pivotal(self.jobs, job_id, problems)
        if spec.value.pivotal.when == "idle":
            return True
        done = self.jobs.client.hlen(redis_keys.run_pivotal(job_id))
        self._tell_progress(job_id, done, len(problems), "pivotal")
        given_up = len(dead_requests(self.jobs.client, job_id, redis_keys.pivotal())) if done < len(problems) else 0
        self._refuse_dead_letters(given_up, len(problems), "pivotal")
        return done + given_up >= len(problems)

    def _tell_progress(self, job_id: str, done: int, total: int, stage: str = "estimating") -> None:
        told, at = self._told.get((job_id, stage), (-1, 0.0))
        if done != told and (done == total or time.monotonic() - at > PROGRESS_SECONDS):
            self._told[job_id, stage] = (done, time.monotonic())
            self.jobs.append(job_id, "progress", {"stage": stage, "done": done, "total": total})

    def _check_dead_letters(self, job_id: str) -> None:
        if time.monotonic() - self._kept_house_at <= HOUSEKEEPING_SECONDS:
            return
        dead = dead_letters(self.jobs.client, job_id)
        dispatched = int(self.jobs.client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
        for stream in ("prompts", "rollouts", "verdicts"):
            self._refuse_dead_letters(dead[stream], dispatched, stream)

    def _refuse_dead_letters(self, dead: int, total: int, stream: str) -> None:
        if dead >= MIN_DEAD_LETTERS and dead > self.settings.max_dead_letter_share * total:
            raise PreconditionFailed(
                f"{dead} of {total} entries of the stream {stream} were given up on; the dead letters name the reasons",
                code="too_many_dead_letters",
            )

    def _finish_when_trained(self, job_id: str) -> None:
        trained = self.jobs.record(job_id).get("trained_steps")
        if trained is not None and self.evaluations.due(job_id) is None:
            reason = f"{trained} steps trained and evaluated"
            self.jobs.transition(job_id, JobState.SUCCEEDED, reason, writes=[_unfeed(job_id)])

    def _pause(self, job_id: str) -> None:
        since = self._pausing_since.setdefault(job_id, time.monotonic())
        if not self.leases.lease(job_id).live:
            self.jobs.transition(job_id, JobState.PAUSED, "no trainer holds the job")
        elif self._is_saved(job_id):
            self.jobs.transition(job_id, JobState.PAUSED, "the last step is saved")
        elif time.monotonic() - since > self.settings.pause_grace_seconds:
            self.jobs.transition(job_id, JobState.PAUSED, "no checkpoint came within the grace; the last one counts")

    def _is_saved(self, job_id: str) -> bool:
        saved = self.jobs.client.hkeys(own_keys.job_checkpoints(job_id))
        return max(map(int, saved), default=0) >= latest_step(self.jobs.client, job_id) > 0

    def _cancel(self, job_id: str) -> None:
        if not self.leases.lease(job_id).live:
            self.jobs.transition(job_id, JobState.CANCELLED, "no trainer holds the job", writes=[_unfeed(job_id)])


def _unfeed(job_id: str) -> Write:
    """Drop the prompts of an ended run, which nobody wants; the consumer group stays for those who still read."""
    return ("XTRIM", redis_keys.prompts(job_id), "MAXLEN", 0)
