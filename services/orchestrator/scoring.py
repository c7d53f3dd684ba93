"""Responses judged for a number: how good a policy is on some problems, and verdicts of rows that are imported or
stored.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal

from blake3 import blake3

from services.orchestrator.datasets import prompt_of
from services.orchestrator.jobs import seed_of
from spo import api
from spo.algorithm.values import ProblemCounts, distinct_correct, mean_pass_at_k
from spo.api import ProblemScore
from spo.errors import FieldViolation, InternalError, InvalidInput, NotReady, PreconditionFailed, SpoError
from spo.experience.columns import StoredTrajectory
from spo.experience.imports import (
    ImportTerms,
    ProblemIndex,
    RowRefusal,
    UploadedRow,
    UploadFormat,
    check_mapping,
    mapped,
    stored_row,
    uploaded_rows,
)
from spo.experience.store import ExperienceStore, Origin
from spo.model.chat import trained_tokens
from spo.observability import get_logger
from spo.rpc.client import RpcClient, generate, judge, samples_per_message
from spo.rpc.pools import JudgePools
from spo.spec.job_spec import EvaluationSpec, JobSpec
from spo.spec.reward import require_decided, reward_of
from spo.spec.tasks import RewardSpec
from spo.tasks.problem import Problem, has_verdict, program_of
from spo.tasks.verifier import pool_of
from spo.v1.judge_service_pb2 import (
    PRIORITY_EVALUATION,
    PRIORITY_TRAINING,
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    UploadTestsRequest,
)
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, TestSet, Verdict

log = get_logger("scoring")

RETRY_SECONDS = 1.0
UPLOAD_CHUNK = 64
# A problem on which the judge or inference fails by itself so often, with doubled pauses, stays undecided.
MOST_FAULTS = 5
_FAULTS = frozenset({"judge_fault", "judge_incomplete"})

PROGRAMS_PER_CALL = 64
# A judge must not run dry between the calls; its queue takes many more.
CALLS_AT_ONCE = 8
# Of programs, a few hundred bytes each: a model says the same in one file of a run and in the next.
KEPT_VERDICTS = 200_000
# A pool that was scaled to zero needs to be noticed, a pod, and an image that may not be there.
WAKING_SECONDS = 180.0
DESCRIBE_SECONDS = 30.0

Key = tuple[str, bytes]

SHOWN_FAULTS = 100


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
class Undecided:
    """A problem without a score, and why: by code and in words."""

    prompt_id: str
    code: str
    reason: str


def is_passing(error: SpoError) -> bool:
    """Whether what failed may work later without anybody's help."""
    return error.retryable or error.code == "other_run"


class Stopped(Exception):
    """The process stops, or nobody wants the scores any more."""


@dataclass
class Patience:
    """When the services last gave a sign of life about any problem of an evaluation, and with what they failed."""

    seconds: float
    answered_at: float = field(default_factory=time.monotonic)
    failure: str = ""

    def answered(self) -> None:
        """A sign of life."""
        self.answered_at = time.monotonic()
        self.failure = ""

    def is_over(self) -> bool:
        """Whether the last one is too long ago."""
        return time.monotonic() - self.answered_at > self.seconds


def _is_fault(error: SpoError) -> bool:
    """Whether somebody answered, and failed by itself."""
    return error.code in _FAULTS or isinstance(error, InternalError)


def _is_of_the_problem(error: SpoError) -> bool:
    """Whether it says of the problem that it cannot be decided, and nothing of others."""
    return isinstance(error, InvalidInput)


def _error_of(undecided: Undecided) -> SpoError:
    kind = NotReady if undecided.code in _FAULTS else InvalidInput
    return kind(undecided.reason, code=undecided.code)


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


def summary(task: EvaluationTask, found: Sequence[ProblemScore | Undecided]) -> dict[str, object]:
    """The result document: pass@k with intervals over problems, diversity, hacks, and each problem's counts.

    All of it is of the `decided` problems of all `problems`; `undecided` names the others and why.
    pass@k for other k, up to the samples per problem, follows from the counts in `per_problem`.
    """
    scores = [each for each in found if isinstance(each, ProblemScore)]
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
        "problems": len(found),
        "decided": len(scores),
        "undecided": [asdict(each) for each in found if isinstance(each, Undecided)],
        "samples": task.protocol.samples,
        "per_problem": [score.model_dump() for score in scores],
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


class RowJudge:
    """Judges rows by the tests of their problems; what it has judged it need not ask again."""

    def __init__(self, judges: JudgePools, index: ProblemIndex, patience_seconds: float = WAKING_SECONDS) -> None:
        self._judges = judges
        self._index = index
        self._patience_seconds = patience_seconds
        self._awake: set[str] = set()
        self._uploaded: set[str] = set()
        self._known: dict[Key, Verdict] = {}

    def judge(self, rows: Iterable[StoredTrajectory]) -> int:
        """Set verdict and reward of each row by its problem's tests; returns how many rows that were.

        Raises NotReady when the judge could not decide on a program, Unreachable where none answers in
        `patience_seconds`, InvalidInput where a person's verifier has failed.
        """
        by_problem: dict[str, list[StoredTrajectory]] = defaultdict(list)
        for row in rows:
            by_problem[row.prompt.prompt_id].append(row)
        problems = [found for prompt_id in by_problem if (found := self._index.find(prompt_id, "")) is not None]
        programs = {
            problem.problem_id: [
                program_of(row.trajectory, problem.response_format, problem.language)
                for row in by_problem[problem.problem_id]
            ]
            for problem in problems
        }
        pools = pools_of(problems)
        with self._judges.needed_for(pools):
            judge_versions(self._judges, pools - self._awake, self._patience_seconds)
            self._awake |= pools
            self._learn(problems, programs)
        for problem in problems:
            for row, program in zip(by_problem[problem.problem_id], programs[problem.problem_id], strict=True):
                verdict = self._known[_key(problem, program)]
                row.trajectory.verdict.CopyFrom(verdict)
                row.trajectory.reward = reward_of(verdict, RewardSpec())
        return sum(map(len, by_problem.values()))

    def _learn(self, problems: Sequence[Problem], programs: Mapping[str, Sequence[str]]) -> None:
        if len(self._known) > KEPT_VERDICTS:
            self._known.clear()
        new = [problem for problem in problems if problem.problem_id not in self._uploaded]
        upload_tests(self._judges, new)
        self._uploaded.update(problem.problem_id for problem in new)
        calls = []
        for problem in problems:
            distinct = dict.fromkeys(programs[problem.problem_id])
            unknown = [program for program in distinct if _key(problem, program) not in self._known]
            starts = range(0, len(unknown), PROGRAMS_PER_CALL)
            calls += [(problem, unknown[start : start + PROGRAMS_PER_CALL]) for start in starts]
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="judging") as pool:
            try:
                for found in pool.map(lambda call: self._ask(*call), calls):
                    self._known |= found
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _is_wanted(self) -> bool:
        return not self._judges.closed.is_set()

    def _ask(self, problem: Problem, programs: Sequence[str]) -> dict[Key, Verdict]:
        request = JudgeRequest(
            programs=programs, language=problem.language, tests_digest=problem.tests_digest, priority=PRIORITY_TRAINING
        )
        reply = judge(self._judges.of(pool_of(problem.tests)), request, wanted=self._is_wanted)
        require_decided(reply.verdicts)
        if any(verdict.outcome == OUTCOME_INTERNAL_ERROR for verdict in reply.verdicts):
            raise NotReady("the judge could not decide on a program", code="judge_fault")
        return {_key(problem, program): verdict for program, verdict in zip(programs, reply.verdicts, strict=True)}


def judge_rows(
    judges: JudgePools,
    index: ProblemIndex,
    rows: Iterable[StoredTrajectory],
    patience_seconds: float = WAKING_SECONDS,
) -> int:
    """As `RowJudge.judge`, of rows that come once."""
    return RowJudge(judges, index, patience_seconds).judge(rows)


def pools_of(problems: Iterable[Problem]) -> set[str]:
    """The pools that decide by the problems' tests; of a composition the sandbox judge decides the other parts."""
    tests = [problem.tests for problem in problems]
    return {pool_of(each) for each in tests} | {"" for each in tests if each.HasField("composition")}


def judge_versions(judges: JudgePools, pools: Iterable[str], patience_seconds: float) -> dict[str, str]:
    """The version of each pool; waits so long for those that do not answer. Raises Unreachable, NotReady."""
    versions = {}
    for pool in sorted(pools):
        reply: DescribeJudgeResponse = judges.of(pool).call_patiently(
            "DescribeJudge",
            DescribeJudgeRequest(),
            DESCRIBE_SECONDS,
            patience_seconds=patience_seconds,
            stop=judges.closed,
        )
        versions[pool] = reply.judge_version
    return versions


def _key(problem: Problem, program: str) -> Key:
    # What comes from files may hold half a character; two such programs must not count as one.
    return problem.problem_id, blake3(program.encode("utf-8", "surrogatepass")).digest(16)


@dataclass(frozen=True)
class RequestedImport:
    """How to read an upload; `judging` says which rows are judged."""

    terms: ImportTerms
    upload_format: UploadFormat
    judging: Literal["missing", "all", "never"]
    keep_good: bool
    tenant: str
    # Of a file of another program's: our columns to paths into its rows.
    fields: tuple[tuple[str, str], ...] = ()


def import_rows(
    store: ExperienceStore, judges: JudgePools, problems: Sequence[Problem], body: bytes, requested: RequestedImport
) -> api.ImportReport:
    """Store a file's rows under the name of the terms; importing the same file again changes nothing.

    Raises InvalidInput (code "bad_rows", a violation per row) when rows are refused and the good ones are not to be
    kept, NotReady when the judge could not decide: nothing is stored then.
    """
    index = ProblemIndex(problems)
    fields = dict(requested.fields)
    check_mapping(fields)
    uploaded = (mapped(row, fields) for row in uploaded_rows(body, requested.upload_format))
    good, faults, rows = _sort_out(uploaded, index, requested.terms)
    if faults and not requested.keep_good:
        raise _refusal(faults, rows)
    unique = {row.trajectory.trajectory_id: row for row in good}
    judged = judge_rows(judges, index, [row for row in unique.values() if not row.trajectory.HasField("reward")])
    name = f"part-{blake3(body + repr(requested).encode()).hexdigest(16)}"
    by_reference: dict[str, list[StoredTrajectory]] = defaultdict(list)
    for row in unique.values():
        by_reference[row.trajectory.reference_hash].append(row)
    for reference_hash, chosen in by_reference.items():
        terms = requested.terms
        origin = Origin(
            terms.run, "import", terms.task_set, reference_hash, licence=terms.licence, tenant=requested.tenant
        )
        store.write(origin, name, chosen)
    return api.ImportReport(
        run=requested.terms.run,
        rows=rows,
        stored=len(unique),
        refused=len(faults),
        judged=judged,
        duplicates=len(good) - len(unique),
        faults=faults[:SHOWN_FAULTS],
        faults_by_code=dict(Counter(fault.code for fault in faults)),
    )


def _sort_out(
    uploaded: Iterable[UploadedRow], index: ProblemIndex, terms: ImportTerms
) -> tuple[list[StoredTrajectory], list[api.RowFault], int]:
    good: list[StoredTrajectory] = []
    faults: list[api.RowFault] = []
    rows = 0
    for row in uploaded:
        rows += 1
        try:
            good.append(stored_row(row, index, terms))
        except RowRefusal as refusal:
            fault = {"code": refusal.code, "pointer": refusal.pointer, "message": refusal.message}
            faults.append(api.RowFault(row=row.number, **fault))
    return good, faults, rows


def _refusal(faults: Sequence[api.RowFault], rows: int) -> InvalidInput:
    shown = tuple(
        FieldViolation(f"/rows/{fault.row}{fault.pointer}", f"{fault.code}: {fault.message}")
        for fault in faults[:SHOWN_FAULTS]
    )
    counts = ", ".join(f"{code} {count}" for code, count in Counter(fault.code for fault in faults).most_common())
    return InvalidInput(
        f"{len(faults)} of {rows} rows cannot be imported ({counts}); nothing is stored. keep_good stores the others",
        code="bad_rows",
        violations=shown,
    )


@dataclass
class ScoringProgress:
    """What is known of an evaluation under way; a second try goes on from it.

    scores: by the problem's place. turns: tries that ended without any answer. patience: of the try under way.
    """

    scores: dict[int, ProblemScore | Undecided] = field(default_factory=dict)
    problems: dict[int, ProblemProgress] = field(default_factory=lambda: defaultdict(ProblemProgress))
    turns: int = 0
    tries: int = 0
    total: int = 0
    patience: Patience = field(default_factory=lambda: Patience(0.0))


@dataclass
class ProblemProgress:
    """What is known of a problem: judged groups, and of the group in hand the finished samples by index."""

    groups_done: int = 0
    samples: list[JudgedSample] = field(default_factory=list)
    kept: dict[int, Trajectory] = field(default_factory=dict)
    faults: int = 0


@dataclass(frozen=True)
class Scorer:
    """Asks `width` problems at once, and gives up when none has been answered for patience_seconds.

    most_turns: after so many tries in vain what others of the evaluation have is reported without the rest.
    """

    inference: RpcClient
    judges: JudgePools
    width: int
    patience_seconds: float
    most_turns: int = 3
    under_way: dict[tuple[str, str], ScoringProgress] = field(default_factory=dict)

    def score(self, task: EvaluationTask, is_wanted: Callable[[], bool]) -> list[ProblemScore | Undecided]:
        """The scores in the order of the task's problems; of those that nobody can decide, why.

        Raises Stopped once `is_wanted` says no, and SpoErrors: those of the whole, and that of the first problem where
        none could be decided. What is known by then is kept for the next call.
        """
        key = (task.run_id, task.name)
        progress = self.under_way.setdefault(key, ScoringProgress())
        progress.tries += 1
        progress.total = len(task.problems)
        progress.patience = Patience(self.patience_seconds)
        try:
            self._score_all(task, is_wanted, progress)
        except SpoError as error:
            progress.turns += progress.patience.is_over()
            progress.patience.failure = error.message
            if not is_passing(error) or not progress.scores or progress.turns < self.most_turns:
                raise
            # The others have been answered: what is left waits for something of its own.
            for place, problem in enumerate(task.problems):
                progress.scores.setdefault(place, Undecided(problem.problem_id, error.code, error.message[:500]))
        except Stopped:
            self.under_way.pop(key, None)
            raise
        found = [progress.scores[place] for place in range(len(task.problems))]
        self.under_way.pop(key, None)
        if not any(isinstance(each, ProblemScore) for each in found) and isinstance(first := found[0], Undecided):
            raise _error_of(first)
        return found

    def _score_all(self, task: EvaluationTask, is_wanted: Callable[[], bool], progress: ScoringProgress) -> None:
        left = [place for place in range(len(task.problems)) if place not in progress.scores]
        with ThreadPoolExecutor(self.width, thread_name_prefix="scoring") as pool:
            futures = [pool.submit(self._patiently, task, place, is_wanted, progress) for place in left]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _patiently(
        self, task: EvaluationTask, place: int, is_wanted: Callable[[], bool], progress: ScoringProgress
    ) -> None:
        """Note the score of a problem, or why there is none. Raises Stopped, and SpoErrors that are not its own."""
        problem, mine, patience = task.problems[place], progress.problems[place], progress.patience
        while place not in progress.scores:
            if not is_wanted():
                raise Stopped
            try:
                progress.scores[place] = self._scored(task, problem, mine, is_wanted, patience)
            except SpoError as error:
                patience.failure = error.message
                mine.faults += _is_fault(error)
                if _is_of_the_problem(error) or mine.faults >= MOST_FAULTS:
                    log.warning(
                        "a problem is undecided", run=task.run_id, problem=problem.problem_id, reason=str(error)
                    )
                    progress.scores[place] = Undecided(problem.problem_id, error.code, error.message[:500])
                    continue
                # A replica still loads, is full or on its way to this run, or the judge restarts: the call is repeated.
                if not (is_passing(error) or _is_fault(error)) or patience.is_over():
                    raise
                log.debug("scoring waits", run=task.run_id, reason=error.message)
                time.sleep(RETRY_SECONDS * 2.0 ** min(3, max(0, mine.faults - 1)))
        progress.problems.pop(place, None)

    def _scored(
        self,
        task: EvaluationTask,
        problem: Problem,
        mine: ProblemProgress,
        is_wanted: Callable[[], bool],
        patience: Patience,
    ) -> ProblemScore:
        groups = list(_groups(task, problem))
        while mine.groups_done < len(groups):
            mine.samples += self._sampled(problem, groups[mine.groups_done], mine.kept, is_wanted, patience)
            mine.groups_done += 1
            mine.kept.clear()
            patience.answered()
        return _score(problem, mine.samples)

    def _sampled(
        self,
        problem: Problem,
        group: PromptGroup,
        kept: dict[int, Trajectory],
        is_wanted: Callable[[], bool],
        patience: Patience,
    ) -> list[JudgedSample]:
        trajectories = generate(self.inference, group, kept=kept, wanted=is_wanted, alive=patience.answered)
        programs = [program_of(each, problem.response_format, problem.language) for each in trajectories]
        undecided = [index for index, each in enumerate(trajectories) if not has_verdict(each)]
        verdicts = [each.verdict for each in trajectories]
        request = JudgeRequest(
            programs=[programs[index] for index in undecided],
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=PRIORITY_EVALUATION,
            run_id=group.run_id,
        )
        for index, verdict in zip(undecided, self._judged(problem, request, is_wanted, patience), strict=True):
            verdicts[index] = verdict
        return list(map(JudgedSample.of, trajectories, programs, verdicts))

    def _judged(
        self, problem: Problem, request: JudgeRequest, is_wanted: Callable[[], bool], patience: Patience
    ) -> list[Verdict]:
        if not request.programs:
            return []
        judges = self.judges.of(pool_of(problem.tests))
        verdicts = list(judge(judges, request, wanted=is_wanted, alive=patience.answered).verdicts)
        require_decided(verdicts)
        outcomes = [verdict.outcome for verdict in verdicts]
        if len(outcomes) != len(request.programs) or OUTCOME_INTERNAL_ERROR in outcomes:
            reason = next((verdict.detail for verdict in verdicts if verdict.outcome == OUTCOME_INTERNAL_ERROR), "")
            raise NotReady(f"the judge could not judge every sample: {reason}"[:500], code="judge_incomplete")
        return verdicts


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
