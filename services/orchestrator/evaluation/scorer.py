"""How good a policy is on some problems: samples by inference, verdicts by the judge, counts per problem, pass@k."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.jobs.seeds import seed_of
from spo.algorithm.pass_at_k import ProblemCounts, distinct_correct, mean_pass_at_k
from spo.errors import NotReady, PreconditionFailed, SpoError
from spo.model.segments import trained_tokens
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient
from spo.rpc.judge_pools import JudgePools
from spo.rpc.message_sizes import samples_per_message
from spo.spec.job_spec import EvaluationSpec, JobSpec
from spo.spec.reward import require_decided
from spo.tasks.problem import Problem, has_verdict, program_of
from spo.tasks.verifier_pool import pool_of
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, TestSet, Verdict

log = get_logger("scoring")

RETRY_SECONDS = 1.0
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
    print remembered answers. scores: of a verifier that knows more than right and wrong the mean, `score`, and by name
    those of its parts; empty of others.
    """

    prompt_id: str
    samples: int
    correct: int
    distinct: int
    public_only: int
    hard_coded: int
    entropy: float
    response_tokens: float
    scores: Mapping[str, float] = field(default_factory=dict)


def is_passing(error: SpoError) -> bool:
    """Whether what failed may work later without anybody's help."""
    return error.retryable or error.code == "other_run"


class Stopped(Exception):
    """The process stops, or nobody wants the scores any more."""


@dataclass
class Patience:
    """When the services have last answered any problem of an evaluation."""

    seconds: float
    answered_at: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Whether the last answer is too long ago."""
        return time.monotonic() - self.answered_at > self.seconds


@dataclass(frozen=True)
class Scorer:
    """Asks `width` problems at once, and gives up when none has been answered for patience_seconds."""

    inference: RpcClient
    judges: JudgePools
    width: int
    patience_seconds: float

    def score(self, task: EvaluationTask, is_wanted: Callable[[], bool]) -> list[ProblemScore]:
        """The scores in the order of the task's problems. Raises Stopped once `is_wanted` says no, and SpoErrors."""
        patience = Patience(self.patience_seconds)
        with ThreadPoolExecutor(self.width, thread_name_prefix="scoring") as pool:
            futures = [pool.submit(self._patiently, task, problem, is_wanted, patience) for problem in task.problems]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _patiently(
        self, task: EvaluationTask, problem: Problem, is_wanted: Callable[[], bool], patience: Patience
    ) -> ProblemScore:
        groups = list(_groups(task, problem))
        samples: list[JudgedSample] = []
        while True:
            if not is_wanted():
                raise Stopped
            try:
                while groups:
                    samples += self._sampled(problem, groups[0])
                    del groups[0]
                    patience.answered_at = time.monotonic()
                return _score(problem, samples)
            except SpoError as error:
                # A replica still loads, is full or on its way to this run, or the judge restarts: the call is repeated.
                if not is_passing(error) or patience.is_over():
                    raise
                log.debug("scoring waits", run=task.run_id, reason=error.message)
                time.sleep(RETRY_SECONDS)

    def _sampled(self, problem: Problem, group: PromptGroup) -> list[JudgedSample]:
        generated: GenerateResponse = self.inference.call("Generate", GenerateRequest(group=group), CALL_SECONDS)
        trajectories = generated.group.trajectories
        if len(trajectories) != group.sampling.samples:
            raise NotReady("inference did not answer with every sample", code="judge_incomplete")
        programs = [program_of(each, problem.response_format, problem.language) for each in trajectories]
        undecided = [index for index, each in enumerate(trajectories) if not has_verdict(each)]
        verdicts = [each.verdict for each in trajectories]
        judged = self._judged(problem, [programs[index] for index in undecided], group.run_id)
        for index, verdict in zip(undecided, judged, strict=True):
            verdicts[index] = verdict
        return list(map(JudgedSample.of, trajectories, programs, verdicts))

    def _judged(self, problem: Problem, programs: Sequence[str], run_id: str) -> list[Verdict]:
        if not programs:
            return []
        judged: JudgeResponse = self.judges.of(pool_of(problem.tests)).call(
            "Judge",
            JudgeRequest(
                programs=programs,
                language=problem.language,
                tests_digest=problem.tests_digest,
                priority=PRIORITY_EVALUATION,
                run_id=run_id,
            ),
            CALL_SECONDS,
        )
        require_decided(judged.verdicts)
        outcomes = [verdict.outcome for verdict in judged.verdicts]
        if len(outcomes) != len(programs) or OUTCOME_INTERNAL_ERROR in outcomes:
            raise NotReady("the judge could not judge every sample", code="judge_incomplete")
        return list(judged.verdicts)


@dataclass(frozen=True)
class JudgedSample:
    """What a score needs of one judged sample; tokens are the policy's, the log-probs, nats, are summed over them."""

    program: str
    verdict: Verdict
    tokens: int
    logprobs: int
    logprob_sum: float

    @classmethod
    def of(cls, trajectory: Trajectory, program: str, verdict: Verdict) -> JudgedSample:
        """What is kept of a trajectory."""
        tokens, logprobs = trained_tokens(trajectory), trajectory.sampling_logprobs
        return cls(_normalised(program), verdict, tokens, tokens if logprobs else 0, sum(logprobs))


def _score(problem: Problem, samples: Sequence[JudgedSample]) -> ProblemScore:
    correct = [sample.verdict.outcome == OUTCOME_ACCEPTED for sample in samples]
    return ProblemScore(
        prompt_id=problem.problem_id,
        samples=len(samples),
        correct=sum(correct),
        distinct=distinct_correct([sample.program for sample in samples], correct),
        public_only=sum(_passes_only_public_tests(sample.verdict) for sample in samples),
        hard_coded=sum(sample.verdict.suspected_hard_coded for sample in samples),
        entropy=-sum(sample.logprob_sum for sample in samples) / max(1, sum(sample.logprobs for sample in samples)),
        response_tokens=sum(sample.tokens for sample in samples) / max(1, len(samples)),
        scores=_means(map(_scores_of, (sample.verdict for sample in samples))),
    )


def _scores_of(verdict: Verdict) -> Mapping[str, float]:
    own = {"score": verdict.score} if verdict.HasField("score") else {}
    return {**{part.name: part.score for part in verdict.parts}, **own}


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


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
        "scores": _means(score.scores for score in scores),
        "problems": len(scores),
        "samples": task.protocol.samples,
        "per_problem": [asdict(score) for score in scores],
    }


def upload_tests(judges: JudgePools, problems: Sequence[Problem]) -> None:
    """Give the judges these test sets; content-addressed, so doing it twice changes nothing.

    Where an environment may show the outcome of the public tests, those too, as a set of their own.

    Raises PreconditionFailed when the judge knows them under other digests.
    """
    by_pool: dict[str, list[tuple[TestSet, str]]] = defaultdict(list)
    for problem in problems:
        by_pool[pool_of(problem.tests)].append((problem.tests, problem.tests_digest))
        if problem.environment and problem.shows_public_tests:
            by_pool[pool_of(problem.public_tests)].append((problem.public_tests, problem.public_tests_digest))
    for pool, theirs in by_pool.items():
        for start in range(0, len(theirs), UPLOAD_CHUNK):
            chunk = theirs[start : start + UPLOAD_CHUNK]
            request = UploadTestsRequest(test_sets=[tests for tests, _ in chunk])
            reply = judges.of(pool).call("UploadTests", request)
            if list(reply.digests) != [digest for _, digest in chunk]:
                raise PreconditionFailed("the judge digests tests differently", code="digest_mismatch")


def _groups(task: EvaluationTask, problem: Problem) -> Iterator[PromptGroup]:
    """The samples of a problem, as many at a time as fit into a message."""
    protocol, model = task.protocol, task.spec.model
    most = samples_per_message(model.max_prompt_tokens + model.max_response_tokens)
    for start in range(0, protocol.samples, most):
        part = [str(start)] if start else []
        yield PromptGroup(
            group_id="-".join((task.run_id, task.name, problem.problem_id[:16], *part)),
            run_id=task.run_id,
            prompt=prompt_of(problem, task.spec),
            sampling=Sampling(
                samples=min(most, protocol.samples - start),
                temperature_min=protocol.temperature,
                temperature_max=protocol.temperature,
                top_p=protocol.top_p,
                max_tokens=model.max_response_tokens,
                seed=seed_of(task.spec.seed, "evaluation", problem.problem_id, *part),
            ),
            policy_version=task.version,
        )


def _passes_only_public_tests(verdict: Verdict) -> bool:
    passes_public = 0 < verdict.public_tests_total <= verdict.public_tests_passed
    return passes_public and verdict.outcome != OUTCOME_ACCEPTED


def _normalised(program: str) -> str:
    """Programs that differ only in blank lines or trailing spaces count as one."""
    return "\n".join(line.rstrip() for line in program.splitlines() if line.strip())
