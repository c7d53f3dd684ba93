"""How good a policy is on some problems: samples by inference, verdicts by the judge, counts per problem, pass@k."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.jobs.seeds import seed_of
from spo.algorithm.pass_at_k import ProblemCounts, distinct_correct, mean_pass_at_k
from spo.errors import NotReady, PreconditionFailed, SpoError
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient
from spo.spec.job_spec import EvaluationSpec, JobSpec
from spo.tasks.problem import Problem, extract_program
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, Verdict

log = get_logger("scoring")

RETRY_SECONDS = 1.0
PROBLEM_SECONDS = 600.0
CALL_SECONDS = 120.0
UPLOAD_CHUNK = 64


@dataclass(frozen=True)
class EvaluationTask:
    """A weight version of a run, the problems it is asked, and how; `name` makes the ids of its samples."""

    name: str
    run_id: str
    version: int
    spec: JobSpec
    protocol: EvaluationSpec
    problems: Sequence[Problem]


@dataclass(frozen=True)
class ProblemScore:
    """How the samples of one problem did; entropy in nats per token, under the sampling distribution.

    public_only counts programs that pass the public tests and fail a hidden one, hard_coded those of them that seem to
    print remembered answers.
    """

    prompt_id: str
    samples: int
    correct: int
    distinct: int
    public_only: int
    hard_coded: int
    entropy: float
    response_tokens: float


class Stopped(Exception):
    """The process stops, or nobody wants the scores any more."""


@dataclass(frozen=True)
class Scorer:
    """Asks `width` problems at once."""

    inference: RpcClient
    judge: RpcClient
    width: int

    def score(self, task: EvaluationTask, is_wanted: Callable[[], bool]) -> list[ProblemScore]:
        """The scores in the order of the task's problems. Raises Stopped once `is_wanted` says no, and SpoErrors."""
        with ThreadPoolExecutor(self.width, thread_name_prefix="scoring") as pool:
            futures = [pool.submit(self._patiently, task, problem, is_wanted) for problem in task.problems]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _patiently(self, task: EvaluationTask, problem: Problem, is_wanted: Callable[[], bool]) -> ProblemScore:
        group = _group(task, problem)
        deadline = time.monotonic() + PROBLEM_SECONDS
        while True:
            if not is_wanted():
                raise Stopped
            try:
                return self._once(problem, group)
            except SpoError as error:
                # A replica still loads, is full or on its way to this run, or the judge restarts: the call is repeated.
                is_passing = error.retryable or error.code == "other_run"
                if not is_passing or time.monotonic() > deadline:
                    raise
                log.debug("scoring waits", run=task.run_id, reason=error.message)
                time.sleep(RETRY_SECONDS)

    def _once(self, problem: Problem, group: PromptGroup) -> ProblemScore:
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
        negative_logprobs = [-logprob for sample in samples for logprob in sample.sampling_logprobs]
        return ProblemScore(
            prompt_id=problem.problem_id,
            samples=len(outcomes),
            correct=sum(correct),
            distinct=distinct_correct([_normalised(program) for program in programs], correct),
            public_only=sum(map(_passes_only_public_tests, judged.verdicts)),
            hard_coded=sum(verdict.suspected_hard_coded for verdict in judged.verdicts),
            entropy=sum(negative_logprobs) / max(1, len(negative_logprobs)),
            response_tokens=sum(len(sample.response_token_ids) for sample in samples) / max(1, len(samples)),
        )


def summary(task: EvaluationTask, scores: Sequence[ProblemScore]) -> dict[str, object]:
    """The result document: pass@k with intervals over problems, diversity, hacks, and each problem's counts.

    pass@k for other k, up to the samples per problem, follows from the counts in `per_problem`.
    """
    counts = [ProblemCounts(samples=score.samples, correct=score.correct) for score in scores]
    estimates = {k: mean_pass_at_k(counts, k, seed=task.spec.seed) for k in task.protocol.ks}
    samples = sum(score.samples for score in scores)
    return {
        "version": task.version,
        "pass_at_k": {
            str(k): {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
            for k, estimate in estimates.items()
        },
        "distinct_solutions": sum(score.distinct for score in scores) / len(scores),
        "entropy": sum(score.entropy for score in scores) / len(scores),
        "response_tokens": sum(score.response_tokens for score in scores) / len(scores),
        "public_only_rate": sum(score.public_only for score in scores) / samples,
        "hard_coded_rate": sum(score.hard_coded for score in scores) / samples,
        "problems": len(scores),
        "samples": task.protocol.samples,
        "per_problem": [asdict(score) for score in scores],
    }


def upload_tests(judge: RpcClient, problems: Sequence[Problem]) -> None:
    """Give the judges these test sets; content-addressed, so doing it twice changes nothing.

    Raises PreconditionFailed when the judge knows them under other digests.
    """
    for start in range(0, len(problems), UPLOAD_CHUNK):
        chunk = problems[start : start + UPLOAD_CHUNK]
        reply = judge.call("UploadTests", UploadTestsRequest(test_sets=[problem.tests for problem in chunk]))
        if list(reply.digests) != [problem.tests_digest for problem in chunk]:
            raise PreconditionFailed("the judge digests tests differently", code="digest_mismatch")


def _group(task: EvaluationTask, problem: Problem) -> PromptGroup:
    protocol = task.protocol
    return PromptGroup(
        group_id=f"{task.run_id}-{task.name}-{problem.problem_id[:16]}",
        run_id=task.run_id,
        prompt=prompt_of(problem, task.spec),
        sampling=Sampling(
            samples=protocol.samples,
            temperature_min=protocol.temperature,
            temperature_max=protocol.temperature,
            top_p=protocol.top_p,
            max_tokens=task.spec.model.max_response_tokens,
            seed=seed_of(task.spec.seed, "evaluation", problem.problem_id),
        ),
        policy_version=task.version,
    )


def _passes_only_public_tests(verdict: Verdict) -> bool:
    passes_public = 0 < verdict.public_tests_total <= verdict.public_tests_passed
    return passes_public and verdict.outcome != OUTCOME_ACCEPTED


def _normalised(program: str) -> str:
    """Programs that differ only in blank lines or trailing spaces count as one."""
    return "\n".join(line.rstrip() for line in program.splitlines() if line.strip())
