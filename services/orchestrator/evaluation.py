"""pass@k on held-out problems: the reference first, then a version per interval of steps, the last one always."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from services.orchestrator.commit import Guard, timestamp
from services.orchestrator.jobs import JobStore
from services.orchestrator.seeds import seed_of
from services.orchestrator.series import evaluation_results
from services.orchestrator.states import JobState
from services.orchestrator.task_sets import TaskLibrary, prompt_of
from services.orchestrator.weights import WeightVersions
from spo import redis_keys
from spo.algorithm.pass_at_k import ProblemCounts, distinct_correct, mean_pass_at_k
from spo.errors import NotReady, SpoError
from spo.job_spec import JobSpec
from spo.logs import get_logger
from spo.rpc import Client
from spo.tasks.problem import Problem, extract_program
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR

log = get_logger("evaluation")

POLL_SECONDS = 1.0
RETRY_SECONDS = 1.0
PROBLEM_SECONDS = 600.0
CALL_SECONDS = 120.0
EVALUATED = (JobState.ESTIMATING, JobState.RUNNING)


@dataclass(frozen=True)
class Due:
    """A weight version to evaluate and the training step it stands for."""

    step: int
    version: int


@dataclass(frozen=True)
class ProblemScore:
    """What the samples of one problem came to."""

    prompt_id: str
    samples: int
    correct: int
    distinct: int
    mean_surprise: float
    response_tokens: float


class Stopped(Exception):
    """The process drains or the job ended: the evaluation is left for the next start."""


class Evaluator:
    """Runs one evaluation at a time, beside training; results are keyed by step, so a repeated one changes nothing."""

    def __init__(
        self,
        jobs: JobStore,
        library: TaskLibrary,
        weights: WeightVersions,
        inference: Client,
        judge: Client,
        width: int,
    ) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights
        self.inference = inference
        self.judge = judge
        self.width = width

    def run(self, stop: threading.Event) -> None:
        """Evaluate whatever is due until stop; a failed evaluation is tried again."""
        while not stop.is_set():
            try:
                for job_id in self.jobs.in_states(EVALUATED):
                    due = self.due(job_id)
                    if due is not None:
                        self.evaluate(job_id, due, stop)
            except Stopped:
                continue
            except (SpoError, redis.RedisError) as error:
                log.warning("evaluation will be tried again", reason=str(error))
            stop.wait(POLL_SECONDS)

    def due(self, job_id: str) -> Due | None:
        """The evaluation to do next, or None: step 0, then the newest version of a new interval, and the final one."""
        spec = self.jobs.spec(job_id)
        if spec.tasks.evaluation_problems == 0:
            return None
        done = [int(result["step"]) for result in evaluation_results(self.jobs.client, job_id)]
        if 0 not in done:
            return Due(0, 0)
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
        began = time.monotonic()
        wanted = _still_wanted(self.jobs, job_id, stop)
        with ThreadPoolExecutor(self.width, thread_name_prefix="evaluation") as pool:
            futures = [pool.submit(self._score, job_id, spec, problem, due, wanted) for problem in problems]
            try:
                scores = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        result = summary(spec, due, scores) | {"seconds": round(time.monotonic() - began, 2), "at": timestamp()}
        key = redis_keys.evaluations(job_id)
        brief = {name: value for name, value in result.items() if name != "per_problem"}
        writes = [("HSET", key, due.step, json.dumps(result))]
        self.jobs.once(job_id, Guard(key, str(due.step)), "evaluation", brief, writes)
        log.info("evaluated", job=job_id, step=due.step, version=due.version, seconds=result["seconds"])

    def _score(
        self, job_id: str, spec: JobSpec, problem: Problem, due: Due, wanted: Callable[[], bool]
    ) -> ProblemScore:
        group = _evaluation_group(job_id, spec, problem, due)
        deadline = time.monotonic() + PROBLEM_SECONDS
        while True:
            if not wanted():
                raise Stopped
            try:
                return self._score_once(problem, group)
            except SpoError as error:
                # A replica still loads or is full, or the judge restarts: worth waiting for, within a limit.
                if not error.retryable or time.monotonic() > deadline:
                    raise
                log.debug("evaluation waits", job=job_id, reason=error.message)
                time.sleep(RETRY_SECONDS)

    def _score_once(self, problem: Problem, group: PromptGroup) -> ProblemScore:
        generated: GenerateResponse = self.inference.call("Generate", GenerateRequest(group=group), CALL_SECONDS)
        samples = generated.group.trajectories
        programs = [extract_program(sample.response_text, problem.response_format) for sample in samples]
        judged: JudgeResponse = self.judge.call(
            "Judge",
            JudgeRequest(
                programs=programs,
                language=problem.language,
                tests_digest=problem.tests_digest,
                priority=PRIORITY_EVALUATION,
            ),
            CALL_SECONDS,
        )
        outcomes = [verdict.outcome for verdict in judged.verdicts]
        if len(outcomes) != group.sampling.samples or OUTCOME_INTERNAL_ERROR in outcomes:
            raise NotReady("the judge could not judge every sample", code="judge_incomplete")
        correct = [outcome == OUTCOME_ACCEPTED for outcome in outcomes]
        surprises = [-logprob for sample in samples for logprob in sample.sampling_logprobs]
        return ProblemScore(
            prompt_id=problem.problem_id,
            samples=len(outcomes),
            correct=sum(correct),
            distinct=distinct_correct([_normalised(program) for program in programs], correct),
            mean_surprise=sum(surprises) / max(1, len(surprises)),
            response_tokens=sum(len(sample.response_token_ids) for sample in samples) / max(1, len(samples)),
        )


def summary(spec: JobSpec, due: Due, scores: Sequence[ProblemScore]) -> dict[str, Any]:
    """The result document: pass@k with intervals over problems, diversity, and each problem's counts.

    entropy is the mean of -ln pi(a_t) of the sampled tokens under the sampling distribution, nats per token.
    """
    counts = [ProblemCounts(samples=score.samples, correct=score.correct) for score in scores]
    estimates = {k: mean_pass_at_k(counts, k, seed=spec.seed) for k in spec.evaluation.ks}
    return {
        "step": due.step,
        "version": due.version,
        "pass_at_k": {
            str(k): {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
            for k, estimate in estimates.items()
        },
        "distinct_solutions": sum(score.distinct for score in scores) / len(scores),
        "entropy": sum(score.mean_surprise for score in scores) / len(scores),
        "response_tokens": sum(score.response_tokens for score in scores) / len(scores),
        "problems": len(scores),
        "samples": spec.evaluation.samples,
        "per_problem": [
            {"prompt_id": score.prompt_id, "correct": score.correct, "distinct": score.distinct} for score in scores
        ],
    }


def _evaluation_group(job_id: str, spec: JobSpec, problem: Problem, due: Due) -> PromptGroup:
    evaluation = spec.evaluation
    return PromptGroup(
        group_id=f"{job_id}-evaluation-{due.step}-{problem.problem_id[:16]}",
        run_id=job_id,
        prompt=prompt_of(problem, spec),
        sampling=Sampling(
            samples=evaluation.samples,
            temperature_min=evaluation.temperature,
            temperature_max=evaluation.temperature,
            top_p=evaluation.top_p,
            max_tokens=spec.model.max_response_tokens,
            seed=seed_of(spec.seed, "evaluation", problem.problem_id),
        ),
        policy_version=due.version,
    )


def _still_wanted(jobs: JobStore, job_id: str, stop: threading.Event) -> Callable[[], bool]:
    def wanted() -> bool:
        return not stop.is_set() and jobs.state(job_id) in (*EVALUATED, JobState.PAUSING, JobState.PAUSED)

    return wanted


def _normalised(program: str) -> str:
    """Programs that differ only in blank lines or trailing spaces count as one."""
    return "\n".join(line.rstrip() for line in program.splitlines() if line.strip())
