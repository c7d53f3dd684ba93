"""Evaluations side by side, one of each job at a time, and the two triggers that feed them.

A job's schedule: pass@k of the reference first, then of the newest version in each new interval of steps, and of the
last version always. A request: any weight version of any job on any task set, also after the job has ended. What the
schedule still owes follows from the job's stored results, and requests are stored, so a restart loses neither.

One job's trouble is its own: each job is evaluated in a lane (thread) of its own, what failed waits before it is tried
again, and what fails too often ends with its reason. Requests whose runs have no replicas share those that idle: one
at a time, oldest first, and of one model as long as others of that model wait, since a change of model costs a replica
its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.backoff import Backoff
from services.orchestrator.evaluation.requests import EvaluationRequests, RequestedEvaluation
from services.orchestrator.evaluation.schedule import SCHEDULED, UNDER_WAY, EvaluationSchedule, ScheduledEvaluation
from services.orchestrator.evaluation.scorer import EvaluationTask, Scorer, Stopped, is_passing, summary, upload_tests
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import SERVED, ReplicaAssigner
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.observability.logs import get_logger
from spo.rpc.client import SILENT_SECONDS
from spo.spec.job_spec import EvaluationSpec, TasksSpec
from spo.spec.job_state import TERMINAL, JobState
from spo.spec.stored import read_stored

log = get_logger("evaluation")

POLL_SECONDS = 1.0
# While no job trains, replicas serve the evaluated run until its evaluation has given no sign of life for so long.
ASSIGNED_SECONDS = 300
# Requests of other models wait at most so long for those of the model that is served.
MODEL_SECONDS = 1800
# More than jobs can run at a time; an evaluation that waits costs a thread.
MAX_LANES = 64
IDLE_REPLICAS = "idle replicas"

Pending = ScheduledEvaluation | RequestedEvaluation


@dataclass(frozen=True)
class EvaluationLimits:
    """Failures after which an evaluation is given up on, and how many ended ones stay of a job."""

    attempts: int
    kept: int


class EvaluationQueue:
    """Works off what schedules owe and what was requested; a job's schedule goes before requests for the job."""

    def __init__(
        self,
        jobs: JobStore,
        library: TaskLibrary,
        weights: WeightAnnouncements,
        scorer: Scorer,
        assigner: ReplicaAssigner,
        limits: EvaluationLimits,
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights
        self.scorer = scorer
        self.assigner = assigner
        self.limits = limits
        self.schedule = EvaluationSchedule(jobs, weights, limits.attempts, limits.kept)
        self.requests = EvaluationRequests(jobs, limits.kept)
        self._backoff = Backoff()
        self._model = ("", 0.0)

    def standing(self, job_id: str) -> list[str]:
        """How the evaluations of a job that are under way stand, in words."""
        found = []
        is_trained = self.jobs.record(job_id).is_trained
        for (run_id, name), progress in list(self.scorer.under_way.items()):
            silent = time.monotonic() - progress.patience.answered_at > SILENT_SECONDS
            failure = progress.patience.failure or ("nothing was heard of it lately" if silent else "")
            if run_id == job_id and (failure or is_trained):
                done = f"{len(progress.scores)} of {progress.total} problems done"
                again = f", try {progress.tries}" if progress.tries > 1 else ""
                found.append(
                    f"an evaluation ({name}) is under way, {done}{again}" + (f": {failure}" if failure else "")
                )
        return found

    def request(
        self, job_id: str, version: int, tasks: TasksSpec | None, protocol: EvaluationSpec, key: str = ""
    ) -> RequestedEvaluation:
        """Queue an evaluation of one version; under a key that the job has one of this version with, return that.

        Raises InvalidInput (a pointer per field), NotFound, ResourceExhausted when too many of the job wait.
        """
        if key and (known := self.requests.with_key(job_id, version, key)):
            return known
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
            job_had_ended=self.jobs.state(job_id) in TERMINAL,
            key=key,
        )
        self.requests.add(requested)
        return requested

    def run(self, stop: threading.Event) -> None:
        """Work until stop; what was interrupted, or failed for a passing reason, begins anew."""
        lanes: dict[str, tuple[str, Future[None]]] = {}
        with ThreadPoolExecutor(MAX_LANES, thread_name_prefix="evaluation") as pool:
            while not stop.is_set():
                lanes = {lane: (name, future) for lane, (name, future) in lanes.items() if not future.done()}
                try:
                    under_way = {lane: name for lane, (name, _) in lanes.items()}
                    for lane, pending in self._pending(under_way):
                        lanes[lane] = _name(pending), pool.submit(self._work_off, pending, stop)
                except (SpoError, redis.RedisError) as error:
                    log.warning("evaluations wait", reason=str(error))
                stop.wait(POLL_SECONDS)

    def _pending(self, under_way: Mapping[str, str]) -> Iterator[tuple[str, Pending]]:
        """What may begin now, with its lane; under_way names what each busy lane works on."""
        owing = set()
        for job_id in self.jobs.in_states(SCHEDULED):
            if job_id in under_way:
                owing.add(job_id)
            elif scheduled := self._due(job_id):
                owing.add(job_id)
                yield job_id, scheduled
        found = [self._requested(each) for each in self.requests.open_ids() if each not in under_way.values()]
        waiting = [requested for requested in found if requested is not None and requested.job_id not in owing]
        with_replicas = set(self.jobs.in_states(SERVED))
        for job_id in dict.fromkeys(requested.job_id for requested in waiting):
            lane = f"{job_id} requested"
            if job_id in with_replicas and lane not in under_way and self.assigner.serving(job_id):
                yield lane, next(requested for requested in waiting if requested.job_id == job_id)
        if waiting and not with_replicas and IDLE_REPLICAS not in under_way:
            chosen = self._of_one_model(waiting)
            self.jobs.write(("SET", own_keys.evaluated_run(), chosen.job_id, "EX", ASSIGNED_SECONDS))
            yield IDLE_REPLICAS, chosen

    def _due(self, job_id: str) -> ScheduledEvaluation | None:
        try:
            if self.assigner.left_out(job_id):
                return None
            due = self.schedule.due(job_id)
            return due if due is None or self._backoff.is_over(_name(due)) else None
        except redis.RedisError:
            raise
        except Exception as error:
            # A fault of one job's documents is no reason for the others to wait.
            log.warning("a job's evaluations wait", job=job_id, reason=f"{type(error).__name__}: {error}")
            return None

    def _requested(self, evaluation_id: str) -> RequestedEvaluation | None:
        """The evaluation, unless it has to wait; ends it when its job is gone."""
        try:
            requested = self.requests.get(evaluation_id)
            reason = self._why_unwanted(requested)
            if reason:
                self.requests.cancel(evaluation_id, reason)
            return requested if not reason and self._backoff.is_over(evaluation_id) else None
        except redis.RedisError:
            raise
        except Exception as error:
            log.warning("an evaluation waits", evaluation=evaluation_id, reason=f"{type(error).__name__}: {error}")
            return None

    def _why_unwanted(self, requested: RequestedEvaluation) -> str:
        try:
            state = self.jobs.state(requested.job_id)
        except NotFound:
            return "its job was deleted"
        cancelled = state in (JobState.CANCELLING, JobState.CANCELLED) and not requested.job_had_ended
        return "its job was cancelled" if cancelled else ""

    def _of_one_model(self, waiting: Sequence[RequestedEvaluation]) -> RequestedEvaluation:
        """The oldest whose model is served already, else the oldest; after MODEL_SECONDS another model has its turn."""
        models = [self._model_of(requested.job_id) for requested in waiting]
        served, since = self._model
        if served in models and time.monotonic() - since < MODEL_SECONDS:
            return waiting[models.index(served)]
        others = [number for number, model in enumerate(models) if model != served]
        chosen = others[0] if others else 0
        self._model = (models[chosen], time.monotonic())
        return waiting[chosen]

    def _model_of(self, job_id: str) -> str:
        try:
            return self.jobs.spec(job_id).model.path
        except (SpoError, ValueError):
            # The evaluation itself will say what is wrong with the spec.
            return ""

    def _work_off(self, pending: Pending, stop: threading.Event) -> None:
        """Evaluate; what goes wrong is noted and tried again later."""
        name = _name(pending)
        try:
            if isinstance(pending, ScheduledEvaluation):
                self._evaluate_scheduled(pending, stop)
            else:
                self._evaluate_requested(pending, stop)
            self._backoff.clear(name)
        except Stopped:
            log.info("an evaluation is left for later", job=pending.job_id, version=pending.version)
        except Exception as error:
            seconds = self._backoff.fail(name)
            log.warning(
                "an evaluation will be tried again", job=pending.job_id, in_seconds=seconds, reason=_in_words(error)
            )

    def _evaluate_scheduled(self, scheduled: ScheduledEvaluation, stop: threading.Event) -> None:
        """Store the result, or why there is none; raises what failed."""
        try:
            result = self._score_scheduled(scheduled, stop)
            self.schedule.store(scheduled, {"step": scheduled.step, **result})
        except (Stopped, redis.RedisError):
            raise
        except Exception as error:
            passing = isinstance(error, SpoError) and is_passing(error)
            code = error.code if isinstance(error, SpoError) else "internal"
            self.schedule.note_failure(scheduled, code, _in_words(error), is_passing=passing)
            raise
        log.info("evaluated", job=scheduled.job_id, step=scheduled.step, version=scheduled.version)

    def _score_scheduled(self, scheduled: ScheduledEvaluation, stop: threading.Event) -> dict[str, object]:
        job_id = scheduled.job_id
        spec = self.jobs.spec(job_id)
        problems = self.library.load(spec.tasks).evaluation
        name = f"evaluation-{scheduled.step}"
        task = EvaluationTask(name, job_id, scheduled.version, spec, spec.evaluation, problems)

        def is_wanted() -> bool:
            return self.jobs.state(job_id) in UNDER_WAY and not stop.is_set() and not self.assigner.left_out(job_id)

        return self._scored(task, is_wanted)

    def _evaluate_requested(self, requested: RequestedEvaluation, stop: threading.Event) -> None:
        """Store the result, or why there is none. Raises SpoErrors that may pass, Stopped."""
        requested = replace(requested, state="queued")
        if not self.requests.update(replace(requested, state="running")):
            return
        began = time.monotonic()
        try:
            ended = replace(requested, state="succeeded", result=self._answer(requested, stop), failure={})
        except Stopped:
            self.requests.update(requested)
            self._let_go(requested.job_id)
            raise
        except redis.RedisError:
            raise
        except SpoError as error:
            if is_passing(error) and not self._is_last_turn(requested, began, error):
                raise
            ended = requested.failed(error.code, error.message)
        except Exception as error:
            # A fault of ours ends this evaluation, loudly, and no other.
            log.exception("an evaluation failed", evaluation=requested.id)
            ended = requested.failed("internal", _in_words(error))
        self.requests.update(ended)
        self._let_go(requested.job_id)
        log.info("evaluation ended", evaluation=requested.id, job=requested.job_id, state=ended.state)

    def _is_last_turn(self, requested: RequestedEvaluation, began: float, error: SpoError) -> bool:
        """Note a turn that passed without any answer, and let others have the replicas; whether it was the last one."""
        in_vain = time.monotonic() - began > self.scorer.patience_seconds
        turns = requested.turns + in_vain
        waits = {"code": error.code, "message": error.message[:2000]}
        self.requests.update(replace(requested, turns=turns, failure=waits))
        self._let_go(requested.job_id)
        return turns >= self.limits.attempts

    def _answer(self, requested: RequestedEvaluation, stop: threading.Event) -> dict[str, object]:
        spec = self.jobs.spec(requested.job_id)
        tasks = read_stored(TasksSpec, requested.tasks, "the tasks of an evaluation") if requested.tasks else spec.tasks
        problems = self.library.load(tasks).evaluation
        upload_tests(self.scorer.judges, problems)
        protocol = read_stored(EvaluationSpec, requested.protocol, "an evaluation")
        task = EvaluationTask(requested.id, requested.job_id, requested.version, spec, protocol, problems)

        def is_wanted() -> bool:
            if stop.is_set() or not self.requests.is_open(requested.id) or self._why_unwanted(requested):
                return False
            return self._has_replicas(requested.job_id)

        return self._scored(task, is_wanted)

    def _has_replicas(self, job_id: str) -> bool:
        """Whether its run is served, or may be by the replicas that idle: jobs that train go first."""
        running = self.jobs.in_states(SERVED)
        if running:
            return job_id in running and bool(self.assigner.serving(job_id))
        key = own_keys.evaluated_run()
        holder = self.jobs.client.get(key)
        if holder not in (None, job_id.encode()):
            return False
        self.jobs.write(("SET", key, job_id, "EX", ASSIGNED_SECONDS))
        return True

    def _let_go(self, job_id: str) -> None:
        if self.jobs.client.get(own_keys.evaluated_run()) == job_id.encode():
            self.jobs.write(("DEL", own_keys.evaluated_run()))

    def _scored(self, task: EvaluationTask, is_wanted: Callable[[], bool]) -> dict[str, object]:
        began = time.monotonic()
        scores = self.scorer.score(task, is_wanted)
        return {**summary(task, scores), "seconds": round(time.monotonic() - began, 2), "at": timestamp()}


def _name(pending: Pending) -> str:
    return pending.id if isinstance(pending, RequestedEvaluation) else f"{pending.job_id}:{pending.step}"


def _in_words(error: Exception) -> str:
    return error.message if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"[:2000]
