"""Verdicts for rows of the store: each program once, several calls to the judge at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from services.orchestrator.evaluation.scorer import upload_tests
from spo.errors import NotReady
from spo.experience.columns import StoredTrajectory
from spo.experience.import_row import ProblemIndex
from spo.rpc.judge_pools import JudgePools
from spo.rpc.long_calls import judge
from spo.spec.reward import require_decided, reward_of
from spo.spec.tasks import RewardSpec
from spo.tasks.problem import Problem, program_of
from spo.tasks.verifier_pool import pool_of
from spo.v1.judge_service_pb2 import (
    PRIORITY_TRAINING,
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
)
from spo.v1.verdict_pb2 import OUTCOME_INTERNAL_ERROR, Verdict

PROGRAMS_PER_CALL = 64
# A judge must not run dry between the calls; its queue takes many more.
CALLS_AT_ONCE = 8
# Of programs, a few hundred bytes each: a model says the same in one file of a run and in the next.
KEPT_VERDICTS = 200_000
# A pool that was scaled to zero needs to be noticed, a pod, and an image that may not be there.
WAKING_SECONDS = 180.0
DESCRIBE_SECONDS = 30.0

Key = tuple[str, bytes]


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
