"""pass@k on held-out problems: the reference first, then a version per interval of steps, the last one always."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.evaluation.scorer import EvaluationTask, Scorer, Stopped, summary
from services.orchestrator.jobs.commit import Precondition, timestamp
from services.orchestrator.jobs.series import evaluation_results
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo import redis_keys
from spo.errors import SpoError
from spo.observability.logs import get_logger
from spo.spec.job_state import JobState

log = get_logger("evaluation")

POLL_SECONDS = 1.0
EVALUATED = (JobState.ESTIMATING, JobState.RUNNING)


@dataclass(frozen=True)
class Due:
    """A weight version to evaluate and the training step it stands for."""

    step: int
    version: int


class Evaluator:
    """Runs one evaluation at a time, beside training; results are keyed by step, so a repeated one changes nothing."""

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

    def run(self, stop: threading.Event) -> None:
        """Evaluate whatever is due until stop; a failed evaluation is tried again."""
        while not stop.is_set():
            try:
                for job_id in self.jobs.in_states(EVALUATED):
                    self._evaluate_due(job_id, stop)
            except (SpoError, redis.RedisError) as error:
                log.warning("evaluation will be tried again", reason=str(error))
            stop.wait(POLL_SECONDS)

    def _evaluate_due(self, job_id: str, stop: threading.Event) -> None:
        due = None if self.assigner.left_out(job_id) else self.due(job_id)
        if due is None:
            return
        try:
            self.evaluate(job_id, due, stop)
        except Stopped:
            log.info("an evaluation is left for later", job=job_id, step=due.step)

    def due(self, job_id: str) -> Due | None:
        """The evaluation to do next, or None: step 0, then the newest version of a new interval, and the final one."""
        spec = self.jobs.spec(job_id)
        if spec.tasks.evaluation_problems == 0:
            return None
        done = [int(result["step"]) for result in evaluation_results(self.jobs.client, job_id)]
        if 0 not in done:
            return Due(0, int(self.jobs.record(job_id).get("start_version", 0)))
        versions = self.weights.versions(job_id)
        newest = versions[-1] if versions else {"step": 0, "version": 0}
        due = Due(int(newest["step"]), int(newest["version"]))
        if due.step in done:
            return None
        final = "trained_steps" in self.jobs.record(job_id)
        interval = spec.evaluation.interval_steps
        return due if final or due.step // interval > max(done) // interval else None

    def evaluate(self, job_id: str, due: Due, stop: threading.Event) -> None:
        """Score every held-out problem under one version and store the result."""
        spec = self.jobs.spec(job_id)
        problems = self.library.load(spec.tasks).evaluation
        task = EvaluationTask(f"evaluation-{due.step}", job_id, due.version, spec, spec.evaluation, problems)
        began = time.monotonic()
        scores = self.scorer.score(task, self._still_wanted(job_id, stop))
        seconds = round(time.monotonic() - began, 2)
        result = {"step": due.step, **summary(task, scores), "seconds": seconds, "at": timestamp()}
        key = redis_keys.evaluations(job_id)
        brief = {name: value for name, value in result.items() if name != "per_problem"}
        writes = [("HSET", key, due.step, json.dumps(result))]
        self.jobs.once(job_id, Precondition(key, str(due.step)), "evaluation", brief, writes)
        log.info("evaluated", job=job_id, step=due.step, version=due.version, seconds=seconds)

    def _still_wanted(self, job_id: str, stop: threading.Event) -> Callable[[], bool]:
        def wanted() -> bool:
            going_on = self.jobs.state(job_id) in (*EVALUATED, JobState.PAUSING)
            return not stop.is_set() and going_on and not self.assigner.left_out(job_id)

        return wanted
