"""The one queue of evaluations, worked off one at a time, and the two triggers that feed it.

A job's schedule: pass@k of the reference first, then of the newest version in each new interval of steps, and of the
last version always. A request: any weight version of any job on any task set, also after the job has ended. What the
schedule still owes follows from the job's stored results, and requests are stored, so a restart loses neither.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.scorer import EvaluationTask, Scorer, Stopped, summary, upload_tests
from services.orchestrator.jobs.commit import Precondition, timestamp
from services.orchestrator.jobs.series import evaluation_results
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import SERVED, ReplicaAssigner
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.observability.logs import get_logger
from spo.spec.job_spec import EvaluationSpec, TasksSpec
from spo.spec.job_state import JobState

log = get_logger("evaluation")

POLL_SECONDS = 1.0
# While no job trains, replicas serve the evaluated run until its evaluation has given no sign of life for so long.
ASSIGNED_SECONDS = 300
SCHEDULED = (JobState.ESTIMATING, JobState.RUNNING)

EvaluationState = Literal["queued", "running", "succeeded", "failed"]
OPEN: tuple[EvaluationState, ...] = ("queued", "running")


@dataclass(frozen=True)
class ScheduledEvaluation:
    """A weight version that a job's schedule wants evaluated, and the training step it stands for."""

    job_id: str
    step: int
    version: int


@dataclass(frozen=True)
class RequestedEvaluation:
    """What was requested and what came of it; `tasks` None means the job's own held-out problems.

    It outlives its job, so it says itself which tenant it belongs to.
    """

    id: str
    job_id: str
    version: int
    tasks: dict[str, object] | None
    protocol: dict[str, object]
    tenant: str
    state: EvaluationState = "queued"
    created_at: str = ""
    result: dict[str, object] | None = None
    failure: dict[str, str] = field(default_factory=dict)


class EvaluationQueue:
    """Evaluations in the order in which they are worked off: what schedules owe, then requests, oldest first."""

    def __init__(
        self,
        jobs: JobStore,
        library: TaskLibrary,
        weights: WeightAnnouncements,
        scorer: Scorer,
        assigner: ReplicaAssigner,
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights
        self.scorer = scorer
        self.assigner = assigner

    def request(
        self, job_id: str, version: int, tasks: TasksSpec | None, protocol: EvaluationSpec
    ) -> RequestedEvaluation:
        """Queue an evaluation of one version. Raises InvalidInput (a pointer per field), NotFound."""
        spec = self.jobs.spec(job_id)
        published = [int(announced["version"]) for announced in self.weights.versions(job_id)]
        violations = []
        if version not in (0, *published):
            violations.append(FieldViolation("/version", f"job {job_id} has published {published or 'no version'}"))
        if not self.library.load(tasks or spec.tasks).evaluation:
            violations.append(FieldViolation("/tasks/evaluation_problems", "there is no held-out problem"))
        if violations:
            message = "this cannot be evaluated"
            raise InvalidInput(message, code="invalid_evaluation", violations=tuple(violations))
        requested = RequestedEvaluation(
            id=f"eval_{ULID()}",
            job_id=job_id,
            version=version,
            tasks=tasks.model_dump(mode="json") if tasks else None,
            protocol=protocol.model_dump(mode="json"),
            tenant=self.jobs.tenant(job_id),
            created_at=timestamp(),
        )
        self._store(requested)
        return requested

    def get(self, evaluation_id: str) -> RequestedEvaluation:
        """A requested evaluation, ended or not. Raises NotFound."""
        stored = self.jobs.client.hget(own_keys.on_demand_evaluations(), evaluation_id)
        if stored is None:
            raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
        return RequestedEvaluation(**json.loads(stored))

    def requested(self) -> list[RequestedEvaluation]:
        """Every requested evaluation, ended or not, newest first."""
        stored = self.jobs.client.hvals(own_keys.on_demand_evaluations())
        found = [RequestedEvaluation(**json.loads(raw)) for raw in stored]
        return sorted(found, key=lambda evaluation: evaluation.id, reverse=True)

    def due(self, job_id: str) -> ScheduledEvaluation | None:
        """What the job's schedule wants next: step 0, then the newest version of a new interval, and the last one."""
        spec = self.jobs.spec(job_id)
        if spec.tasks.evaluation_problems == 0:
            return None
        done = [int(result["step"]) for result in evaluation_results(self.jobs.client, job_id)]
        record = self.jobs.record(job_id)
        if 0 not in done:
            return ScheduledEvaluation(job_id, 0, record.start_version)
        versions = self.weights.versions(job_id)
        newest = versions[-1] if versions else {"step": 0, "version": 0}
        due = ScheduledEvaluation(job_id, int(newest["step"]), int(newest["version"]))
        if due.step in done:
            return None
        is_last = record.is_trained
        interval = spec.evaluation.interval_steps
        return due if is_last or due.step // interval > max(done) // interval else None

    def run(self, stop: threading.Event) -> None:
        """Work the queue off until stop; what was interrupted, or failed for a passing reason, begins anew."""
        while not stop.is_set():
            try:
                for pending in self._pending():
                    self._work_off(pending, stop)
            except (SpoError, redis.RedisError) as error:
                log.warning("evaluations wait", reason=str(error))
            stop.wait(POLL_SECONDS)

    def _pending(self) -> Iterator[ScheduledEvaluation | RequestedEvaluation]:
        """What may be evaluated now; looks again after each evaluation, which can take long."""
        for job_id in self.jobs.in_states(SCHEDULED):
            try:
                scheduled = None if self.assigner.left_out(job_id) else self.due(job_id)
            except SpoError as error:
                log.warning("a job's evaluations wait", job=job_id, reason=error.message)
                continue
            if scheduled is not None:
                yield scheduled
        # Ids of evaluations sort by the time of the request.
        ids = self.jobs.client.zrange(own_keys.open_evaluations(), 0, -1)
        for evaluation_id in ids:
            requested = self.get(evaluation_id.decode())
            if self._may_use_replicas(requested.job_id):
                yield requested

    def _work_off(self, pending: ScheduledEvaluation | RequestedEvaluation, stop: threading.Event) -> None:
        try:
            if isinstance(pending, ScheduledEvaluation):
                self._evaluate_scheduled(pending, stop)
            else:
                self._evaluate_requested(pending, stop)
        except Stopped:
            log.info("an evaluation is left for later", job=pending.job_id, version=pending.version)
        except SpoError as error:
            log.warning("an evaluation will be tried again", job=pending.job_id, reason=error.message)

    def _evaluate_scheduled(self, scheduled: ScheduledEvaluation, stop: threading.Event) -> None:
        """Store the result under its step: evaluated twice, it counts once."""
        job_id = scheduled.job_id
        spec = self.jobs.spec(job_id)
        problems = self.library.load(spec.tasks).evaluation
        task = EvaluationTask(
            f"evaluation-{scheduled.step}", job_id, scheduled.version, spec, spec.evaluation, problems
        )

        def is_wanted() -> bool:
            state = self.jobs.state(job_id)
            return state in (*SCHEDULED, JobState.PAUSING) and not stop.is_set() and not self.assigner.left_out(job_id)

        result = {"step": scheduled.step, **self._scored(task, is_wanted)}
        key = own_keys.evaluations(job_id)
        brief = {name: value for name, value in result.items() if name != "per_problem"}
        writes = [("HSET", key, scheduled.step, json.dumps(result))]
        self.jobs.once(job_id, Precondition(key, str(scheduled.step)), "evaluation", brief, writes)
        log.info("evaluated", job=job_id, step=scheduled.step, version=scheduled.version, seconds=result["seconds"])

    def _evaluate_requested(self, requested: RequestedEvaluation, stop: threading.Event) -> None:
        """Store the result, or why there is none. Raises SpoErrors that may pass, Stopped."""
        self._store(replace(requested, state="running"))
        try:
            ended = replace(requested, state="succeeded", result=self._answer(requested, stop))
        except SpoError as error:
            if error.retryable:
                raise
            ended = replace(requested, state="failed", failure={"code": error.code, "message": error.message})
        except (Stopped, redis.RedisError):
            raise
        except Exception as error:
            # A fault of ours ends this evaluation, loudly, and no other.
            log.exception("an evaluation failed", evaluation=requested.id)
            failure = {"code": "internal", "message": f"{type(error).__name__}: {error}"[:2000]}
            ended = replace(requested, state="failed", failure=failure)
        self._store(ended)
        self.jobs.client.delete(own_keys.evaluated_run())
        log.info("evaluation ended", evaluation=requested.id, job=requested.job_id, state=ended.state)

    def _answer(self, requested: RequestedEvaluation, stop: threading.Event) -> dict[str, object]:
        spec = self.jobs.spec(requested.job_id)
        tasks = TasksSpec.model_validate(requested.tasks) if requested.tasks else spec.tasks
        problems = self.library.load(tasks).evaluation
        upload_tests(self.scorer.judge, problems)
        protocol = EvaluationSpec.model_validate(requested.protocol)
        task = EvaluationTask(requested.id, requested.job_id, requested.version, spec, protocol, problems)

        def is_wanted() -> bool:
            if stop.is_set() or not self._may_use_replicas(requested.job_id):
                return False
            self.jobs.client.set(own_keys.evaluated_run(), requested.job_id, ex=ASSIGNED_SECONDS)
            return True

        return self._scored(task, is_wanted)

    def _scored(self, task: EvaluationTask, is_wanted: Callable[[], bool]) -> dict[str, object]:
        began = time.monotonic()
        scores = self.scorer.score(task, is_wanted)
        return {**summary(task, scores), "seconds": round(time.monotonic() - began, 2), "at": timestamp()}

    def _may_use_replicas(self, job_id: str) -> bool:
        """Training goes first: a request waits until its run has replicas anyway, or no job wants any."""
        return not self.jobs.in_states(SERVED) or bool(self.assigner.serving(job_id))

    def _store(self, evaluation: RequestedEvaluation) -> None:
        open_ones = own_keys.open_evaluations()
        with self.jobs.client.pipeline(transaction=True) as pipe:
            pipe.hset(own_keys.on_demand_evaluations(), evaluation.id, json.dumps(asdict(evaluation)))
            if evaluation.state in OPEN:
                pipe.zadd(open_ones, {evaluation.id: 0})
            else:
                pipe.zrem(open_ones, evaluation.id)
            pipe.execute()
