"""Evaluations that somebody asks for: any weight version of a job on any task set, whatever became of the job.

One at a time, when its run has replicas anyway or no job wants any: training goes first.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.scorer import EvaluationTask, Scorer, Stopped, summary, upload_tests
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import SERVED, ReplicaAssigner
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.observability.logs import get_logger
from spo.spec.job_spec import EvaluationSpec, TasksSpec

log = get_logger("on_demand")

POLL_SECONDS = 1.0
# A replica is kept on the run so long after the last sign of life of its examination.
ASSIGNED_SECONDS = 300

State = Literal["queued", "running", "succeeded", "failed"]
OPEN: tuple[State, ...] = ("queued", "running")


@dataclass(frozen=True)
class OnDemandEvaluation:
    """What was asked and what came of it; `tasks` null means the job's own held-out problems."""

    id: str
    job_id: str
    version: int
    tasks: dict[str, Any] | None
    protocol: dict[str, Any]
    state: State = "queued"
    created_at: str = ""
    result: dict[str, Any] | None = None
    failure: dict[str, str] = field(default_factory=dict)
    # Of whoever owns the job: an evaluation outlives it. None in those stored before this was.
    tenant: str | None = None


class OnDemandEvaluations:
    """Asked for by the API, carried out by `run`."""

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

    def ask(self, job_id: str, version: int, tasks: TasksSpec | None, protocol: EvaluationSpec) -> OnDemandEvaluation:
        """Queue an examination. Raises InvalidInput by field, NotFound."""
        spec = self.jobs.spec(job_id)
        published = [int(each["version"]) for each in self.weights.versions(job_id)]
        violations = []
        if version not in (0, *published):
            violations.append(FieldViolation("/version", f"job {job_id} has published {published or 'no version'}"))
        if not self.library.load(tasks or spec.tasks).evaluation:
            violations.append(FieldViolation("/tasks/evaluation_problems", "there is no held-out problem"))
        if violations:
            message = "this cannot be evaluated"
            raise InvalidInput(message, code="invalid_evaluation", violations=tuple(violations))
        asked = OnDemandEvaluation(
            id=f"eval_{ULID()}",
            job_id=job_id,
            version=version,
            tasks=tasks.model_dump(mode="json") if tasks else None,
            protocol=protocol.model_dump(mode="json"),
            created_at=timestamp(),
            tenant=self.jobs.tenant(job_id),
        )
        self._store(asked)
        return asked

    def get(self, evaluation_id: str) -> OnDemandEvaluation:
        """Raises NotFound."""
        stored: Any = self.jobs.client.hget(redis_keys.on_demand_evaluations(), evaluation_id)
        if stored is None:
            raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
        return OnDemandEvaluation(**json.loads(stored))

    def all(self) -> list[OnDemandEvaluation]:
        """Newest first."""
        stored: Any = self.jobs.client.hvals(redis_keys.on_demand_evaluations())
        return sorted((OnDemandEvaluation(**json.loads(raw)) for raw in stored), key=lambda each: each.id, reverse=True)

    def run(self, stop: threading.Event) -> None:
        """Carry out what is asked, oldest first, until stop; what was under way when a process ended begins anew."""
        adopted = False
        while not stop.is_set():
            try:
                if not adopted:
                    self._adopt()
                    adopted = True
                for asked in self._waiting():
                    if self._has_its_turn(asked.job_id):
                        self._carry_out(asked, stop)
            except Stopped:
                continue
            except redis.RedisError as error:
                log.warning("evaluations wait for Redis", reason=str(error))
            finally:
                stop.wait(POLL_SECONDS)

    def _adopt(self) -> None:
        """Find the open ones that were stored before there was a list of them."""
        for each in self.all():
            if each.state in OPEN:
                self.jobs.client.zadd(own_keys.open_evaluations(), {each.id: 0})

    def _waiting(self) -> list[OnDemandEvaluation]:
        """Oldest first; their ids sort by time."""
        ids: Any = self.jobs.client.zrange(own_keys.open_evaluations(), 0, -1)
        return [self.get(each.decode()) for each in ids]

    def _carry_out(self, asked: OnDemandEvaluation, stop: threading.Event) -> None:
        began = time.monotonic()
        self._store(replace(asked, state="running"))
        try:
            result = self._examine(asked, stop) | {"seconds": round(time.monotonic() - began, 2), "at": timestamp()}
            ended = replace(asked, state="succeeded", result=result)
        except SpoError as error:
            if error.retryable:
                log.warning("an evaluation will be tried again", evaluation=asked.id, reason=error.message)
                return
            ended = replace(asked, state="failed", failure={"code": error.code, "message": error.message})
        except (Stopped, redis.RedisError):
            raise
        except Exception as error:
            # A fault of ours ends this evaluation, loudly, and no other.
            log.exception("an evaluation failed", evaluation=asked.id)
            failure = {"code": "internal", "message": f"{type(error).__name__}: {error}"[:2000]}
            ended = replace(asked, state="failed", failure=failure)
        self._store(ended)
        self.jobs.client.delete(redis_keys.evaluated_run())
        log.info("evaluation ended", evaluation=asked.id, job=asked.job_id, state=ended.state)

    def _examine(self, asked: OnDemandEvaluation, stop: threading.Event) -> dict[str, Any]:
        spec = self.jobs.spec(asked.job_id)
        tasks = TasksSpec.model_validate(asked.tasks) if asked.tasks else spec.tasks
        problems = self.library.load(tasks).evaluation
        upload_tests(self.scorer.judge, problems)
        protocol = EvaluationSpec.model_validate(asked.protocol)
        task = EvaluationTask(asked.id, asked.job_id, asked.version, spec, protocol, problems)

        def wanted() -> bool:
            if stop.is_set() or not self._has_its_turn(asked.job_id):
                return False
            self.jobs.client.set(redis_keys.evaluated_run(), asked.job_id, ex=ASSIGNED_SECONDS)
            return True

        return summary(task, self.scorer.score(task, wanted))

    def _has_its_turn(self, job_id: str) -> bool:
        """When its run has replicas of its own, or no job wants any."""
        return not self.jobs.in_states(SERVED) or bool(self.assigner.serving(job_id))

    def _store(self, evaluation: OnDemandEvaluation) -> None:
        open_ones = own_keys.open_evaluations()
        with self.jobs.client.pipeline(transaction=True) as pipe:
            pipe.hset(redis_keys.on_demand_evaluations(), evaluation.id, json.dumps(asdict(evaluation)))
            if evaluation.state in OPEN:
                pipe.zadd(open_ones, {evaluation.id: 0})
            else:
                pipe.zrem(open_ones, evaluation.id)
            pipe.execute()
