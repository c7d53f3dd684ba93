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

from services.orchestrator import desk_keys
from services.orchestrator.commit import timestamp
from services.orchestrator.jobs import JobStore
from services.orchestrator.scoring import Exam, Scorer, Stopped, summary, upload_tests
from services.orchestrator.sharing import SERVED, Sharing
from services.orchestrator.task_sets import TaskLibrary
from services.orchestrator.weights import WeightVersions
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.job_spec import EvaluationSpec, TasksSpec
from spo.logs import get_logger

log = get_logger("examinations")

POLL_SECONDS = 1.0
# A replica is kept on the run so long after the last sign of life of its examination.
ASSIGNED_SECONDS = 300

State = Literal["queued", "running", "succeeded", "failed"]
OPEN: tuple[State, ...] = ("queued", "running")


@dataclass(frozen=True)
class Examination:
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


class Examinations:
    """Asked for by the API, carried out by `run`."""

    def __init__(
        self, jobs: JobStore, library: TaskLibrary, weights: WeightVersions, scorer: Scorer, sharing: Sharing
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights
        self.scorer = scorer
        self.sharing = sharing

    def ask(self, job_id: str, version: int, tasks: TasksSpec | None, protocol: EvaluationSpec) -> Examination:
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
        asked = Examination(
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

    def get(self, examination_id: str) -> Examination:
        """Raises NotFound."""
        stored: Any = self.jobs.client.hget(redis_keys.examinations(), examination_id)
        if stored is None:
            raise NotFound(f"there is no evaluation {examination_id}", code="evaluation_not_found")
        return Examination(**json.loads(stored))

    def all(self) -> list[Examination]:
        """Newest first."""
        stored: Any = self.jobs.client.hvals(redis_keys.examinations())
        return sorted((Examination(**json.loads(raw)) for raw in stored), key=lambda each: each.id, reverse=True)

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
                self.jobs.client.zadd(desk_keys.open_examinations(), {each.id: 0})

    def _waiting(self) -> list[Examination]:
        """Oldest first; their ids sort by time."""
        ids: Any = self.jobs.client.zrange(desk_keys.open_examinations(), 0, -1)
        return [self.get(each.decode()) for each in ids]

    def _carry_out(self, asked: Examination, stop: threading.Event) -> None:
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
        self.jobs.client.delete(redis_keys.examined_run())
        log.info("evaluation ended", evaluation=asked.id, job=asked.job_id, state=ended.state)

    def _examine(self, asked: Examination, stop: threading.Event) -> dict[str, Any]:
        spec = self.jobs.spec(asked.job_id)
        tasks = TasksSpec.model_validate(asked.tasks) if asked.tasks else spec.tasks
        problems = self.library.load(tasks).evaluation
        upload_tests(self.scorer.judge, problems)
        protocol = EvaluationSpec.model_validate(asked.protocol)
        exam = Exam(asked.id, asked.job_id, asked.version, spec, protocol, problems)

        def wanted() -> bool:
            if stop.is_set() or not self._has_its_turn(asked.job_id):
                return False
            self.jobs.client.set(redis_keys.examined_run(), asked.job_id, ex=ASSIGNED_SECONDS)
            return True

        return summary(exam, self.scorer.score(exam, wanted))

    def _has_its_turn(self, job_id: str) -> bool:
        """When its run has replicas of its own, or no job wants any."""
        return not self.jobs.in_states(SERVED) or bool(self.sharing.serving(job_id))

    def _store(self, examination: Examination) -> None:
        open_ones = desk_keys.open_examinations()
        with self.jobs.client.pipeline(transaction=True) as pipe:
            pipe.hset(redis_keys.examinations(), examination.id, json.dumps(asdict(examination)))
            if examination.state in OPEN:
                pipe.zadd(open_ones, {examination.id: 0})
            else:
                pipe.zrem(open_ones, examination.id)
            pipe.execute()
