"""Evaluations of a job: what its schedule owes, what people requested, and the queue that carries both out.

Evaluations side by side, one of each job at a time, and the two triggers that feed them.
A job's schedule: pass@k of the reference first, then of the newest version in each new interval of steps, and of the
last version always. A request: any weight version of any job on any task set, also after the job has ended. What the
schedule still owes follows from the job's stored results, and requests are stored, so a restart loses neither.

One job's trouble is its own: each job is evaluated in a lane (thread) of its own, what failed waits before it is tried
again, and what fails too often ends with its reason. Requests whose runs have no replicas share those that idle: one
at a time, oldest first, and of one model as long as others of that model wait, since a change of model costs a replica
its start.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import IS_LEADER, Commit, Precondition, Write, timestamp
from services.orchestrator.datasets import TaskLibrary
from services.orchestrator.job_records import EvaluationFailure, failures_of, write_fields
from services.orchestrator.jobs import JobStore
from services.orchestrator.replicas import SERVED, ReplicaAssigner
from services.orchestrator.scoring import EvaluationTask, Scorer, Stopped, is_passing, summary, upload_tests
from services.orchestrator.versions import published_versions
from spo.errors import Conflict, FieldViolation, InvalidInput, NotFound, ResourceExhausted, SpoError, storage_error
from spo.messaging.redis_client import as_spo_error
from spo.messaging.streams.recovery import Outage
from spo.observability import get_logger
from spo.rpc.client import SILENT_SECONDS
from spo.spec.job_spec import EvaluationSpec, TasksSpec
from spo.spec.section import TERMINAL, JobState, read_stored, record_from_json

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
MOST_NAMES = 10_000

EvaluationState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
OPEN: tuple[EvaluationState, ...] = ("queued", "running")

MAX_OPEN_PER_JOB = 100
# Of a tenant, all jobs together: those of deleted jobs outlive the list of their job.
MAX_KEPT = 10_000

# KEYS: open evaluations, evaluations, leader.  ARGV: id, JSON, 1 when it ends, holder and epoch of the leader.  Only an
# open one changes: of a result and a cancellation the first one stands.
_UPDATE = f"""#!lua flags=allow-oom
{IS_LEADER}
if not is_leader(KEYS[3], ARGV[4], ARGV[5]) then return -1 end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if ARGV[3] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
"""

SCHEDULED = (JobState.ESTIMATING, JobState.RUNNING)
# A job that pauses lets the evaluation under way finish.
UNDER_WAY = (*SCHEDULED, JobState.PAUSING)

log = get_logger("evaluation")

POLL_SECONDS = 1.0
# While no job trains, replicas serve the evaluated run until its evaluation has given no sign of life for so long.
ASSIGNED_SECONDS = 300
# Requests of other models wait at most so long for those of the model that is served.
MODEL_SECONDS = 1800
# More than jobs can run at a time; an evaluation that waits costs a thread.
MAX_LANES = 64
IDLE_REPLICAS = "idle replicas"


class Backoff:
    """Doubles the pause with each failure in a row; safe from several threads."""

    def __init__(self, first_seconds: float = FIRST_SECONDS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self.first_seconds = first_seconds
        self.longest_seconds = longest_seconds
        self._lock = threading.Lock()
        self._failures: dict[str, tuple[int, float]] = {}

    def is_over(self, name: str) -> bool:
        """Whether it may be tried now."""
        with self._lock:
            _, until = self._failures.get(name, (0, 0.0))
        return time.monotonic() >= until

    def fail(self, name: str) -> float:
        """Note a failure; returns the pause in seconds."""
        with self._lock:
            failures, _ = self._failures.pop(name, (0, 0.0))
            seconds = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures, 30))
            self._failures[name] = (failures + 1, time.monotonic() + seconds)
            while len(self._failures) > MOST_NAMES:
                del self._failures[next(iter(self._failures))]
        return seconds

    def clear(self, name: str) -> None:
        """Forget the failures of what worked."""
        with self._lock:
            self._failures.pop(name, None)


@dataclass(frozen=True)
class RequestedEvaluation:
    """What was requested and what came of it; `tasks` None means the job's own held-out problems.

    It outlives its job, so it says itself which tenant it belongs to. One whose job had ended before the request goes
    on however the job ended; any other ends with a job that is cancelled. `turns` counts those without any answer.
    key: under which it was requested, "" for none; a request that is repeated under it makes no other.
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
    job_had_ended: bool = False
    turns: int = 0
    key: str = ""

    @classmethod
    def from_json(cls, stored: bytes | str) -> RequestedEvaluation:
        """The evaluation as stored; fields that this release does not know are left out."""
        return record_from_json(cls, stored)

    def failed(self, code: str, message: str) -> RequestedEvaluation:
        """The evaluation, ended without a result for a reason that people read."""
        return replace(self, state="failed", failure={"code": code, "message": message[:2000]})


class EvaluationRequests:
    """Requested evaluations in Redis; `kept` of a job stay after they have ended."""

    def __init__(self, jobs: JobStore, kept: int) -> None:
        self.jobs = jobs
        self.client = jobs.client
        self.kept = kept

    def add(self, evaluation: RequestedEvaluation) -> None:
        """Store a new one. Raises ResourceExhausted when too many of its job have not ended."""
        of_job = own_keys.requested_evaluations(evaluation.job_id)
        waiting = self._open_among(self._ids(of_job))
        if len(waiting) >= MAX_OPEN_PER_JOB:
            message = f"{len(waiting)} evaluations of {evaluation.job_id} have not ended yet; cancel some, or wait"
            raise ResourceExhausted(message, code="too_many_evaluations")
        self.jobs.write(
            ("HSET", own_keys.on_demand_evaluations(), evaluation.id, json.dumps(asdict(evaluation))),
            ("ZADD", own_keys.open_evaluations(), 0, evaluation.id),
            ("ZADD", of_job, 0, evaluation.id),
            ("ZADD", own_keys.tenant_evaluations(evaluation.tenant), 0, evaluation.id),
        )

    def get(self, evaluation_id: str) -> RequestedEvaluation:
        """A requested evaluation, ended or not. Raises NotFound."""
        stored = self.client.hget(own_keys.on_demand_evaluations(), evaluation_id)
        if stored is None:
            raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
        return RequestedEvaluation.from_json(stored)

    def with_key(self, job_id: str, version: int, key: str) -> RequestedEvaluation | None:
        """The evaluation of a job's version that was requested under a key, ended or not."""
        ids = self._ids(own_keys.requested_evaluations(job_id))
        stored = self.client.hmget(own_keys.on_demand_evaluations(), ids) if ids else []
        found = (RequestedEvaluation.from_json(raw) for raw in stored if raw is not None)
        return next((each for each in found if (each.version, each.key) == (version, key)), None)

    def all(self) -> list[RequestedEvaluation]:
        """Every requested evaluation, ended or not, newest first."""
        stored = self.client.hvals(own_keys.on_demand_evaluations())
        return sorted(map(RequestedEvaluation.from_json, stored), key=lambda found: found.id, reverse=True)

    def open_ids(self) -> list[str]:
        """Ids of those that have not ended, oldest first: ids sort by the time of the request."""
        return self._ids(own_keys.open_evaluations())

    def update(self, evaluation: RequestedEvaluation) -> bool:
        """Store its new state; False when it has ended meanwhile, and so stays as it is."""
        ends = evaluation.state not in OPEN
        keys = own_keys.open_evaluations(), own_keys.on_demand_evaluations(), own_keys.leader()
        document = json.dumps(asdict(evaluation))
        fence, told = self.jobs.fence, (evaluation.id, document, int(ends))
        reply = self.client.eval(_UPDATE, len(keys), *keys, *told, fence.holder, fence.epoch)
        if reply == -1:
            raise fence.refusal()
        changed = bool(reply)
        if changed and ends:
            self._drop_oldest(evaluation)
        return changed

    def cancel(self, evaluation_id: str, reason: str) -> RequestedEvaluation:
        """End one without a result; doing it again changes nothing. Raises NotFound, Conflict when it has ended."""
        found = self.get(evaluation_id)
        if found.state in OPEN:
            self.update(replace(found, state="cancelled", failure={"code": "cancelled", "message": reason}))
            found = self.get(evaluation_id)
        if found.state != "cancelled":
            raise Conflict(f"evaluation {evaluation_id} has {found.state}", code="evaluation_ended")
        return found

    def is_open(self, evaluation_id: str) -> bool:
        """Whether it has not ended."""
        return self.client.zscore(own_keys.open_evaluations(), evaluation_id) is not None

    def _drop_oldest(self, evaluation: RequestedEvaluation) -> None:
        """Forget the oldest ones that have ended: of its job, and of its tenant."""
        of_job = own_keys.requested_evaluations(evaluation.job_id)
        of_tenant = own_keys.tenant_evaluations(evaluation.tenant)
        surplus = self._ids(of_job)[: -self.kept] + self._ids(of_tenant)[:-MAX_KEPT]
        ended = set(surplus) - self._open_among(surplus)
        if ended:
            lists = [("ZREM", key, *ended) for key in (of_job, of_tenant)]
            self.jobs.write(("HDEL", own_keys.on_demand_evaluations(), *ended), *lists)

    def _open_among(self, ids: list[str]) -> set[str]:
        return set(ids) & set(self.open_ids()) if ids else set()

    def _ids(self, key: str) -> list[str]:
        found = self.client.zrange(key, 0, -1)
        return [raw.decode() for raw in found]


@dataclass(frozen=True)
class ScheduledEvaluation:
    """A weight version that a job's schedule wants evaluated, and the training step it stands for."""

    job_id: str
    step: int
    version: int


Pending = ScheduledEvaluation | RequestedEvaluation


class EvaluationSchedule:
    """Results and failures by step; a step is given up on after `attempts` failures, and `kept` results stay."""

    def __init__(self, jobs: JobStore, attempts: int, kept: int) -> None:
        self.jobs = jobs
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
        versions = published_versions(self.jobs, job_id)
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
        scorer: Scorer,
        assigner: ReplicaAssigner,
        limits: EvaluationLimits,
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.scorer = scorer
        self.assigner = assigner
        self.limits = limits
        self.schedule = EvaluationSchedule(jobs, limits.attempts, limits.kept)
        self.requests = EvaluationRequests(jobs, limits.kept)
        self._backoff = Backoff()
        self._outages: dict[str, Outage] = {}
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
        published = [int(announced["version"]) for announced in published_versions(self.jobs, job_id)]
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
        outage = Outage("evaluations wait")
        with ThreadPoolExecutor(MAX_LANES, thread_name_prefix="evaluation") as pool:
            while not stop.is_set():
                lanes = {lane: (name, future) for lane, (name, future) in lanes.items() if not future.done()}
                try:
                    under_way = {lane: name for lane, (name, _) in lanes.items()}
                    for lane, pending in self._pending(under_way):
                        lanes[lane] = _name(pending), pool.submit(self._work_off, pending, stop)
                    outage.over()
                except (SpoError, redis.RedisError) as error:
                    outage.failed(error)
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
            found = due if due is None or self._backoff.is_over(_name(due)) else None
        except Exception as error:
            if isinstance(error, redis.RedisError) and as_spo_error(error).retryable:
                raise
            # A fault of one job's documents is no reason for the others to wait.
            self._outages.setdefault(job_id, Outage("a job's evaluations wait", job=job_id)).failed(error)
            return None
        self._outages.pop(job_id, None)
        return found

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
        except Exception as failure:
            error = storage_error(failure) or failure
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
            away = storage_error(error)
            if away:
                self.requests.update(replace(requested, failure={"code": away.code, "message": away.message[:2000]}))
                raise away from error
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
