"""One program, all tests: run in order, compare in the judge, stop at the first failure unless details are wanted."""

from __future__ import annotations

from collections.abc import Iterable

from services.sandbox_judge.backends.zygote import Executable, OpenProgram, Zygote
from services.sandbox_judge.compare import first_difference
from services.sandbox_judge.sandbox import CompileFailed, Ending, Run, limits_of
from spo.v1.verdict_pb2 import Outcome, TestCase, TestResult, TestSet, Verdict

DETAIL_CHARACTERS = 500

_OUTCOMES = {
    Ending.SIGNALLED: Outcome.OUTCOME_RUNTIME_ERROR,
    Ending.CPU_TIME_LIMIT: Outcome.OUTCOME_CPU_TIME_LIMIT,
    Ending.WALL_TIME_LIMIT: Outcome.OUTCOME_WALL_TIME_LIMIT,
    Ending.MEMORY_LIMIT: Outcome.OUTCOME_MEMORY_LIMIT,
    Ending.OUTPUT_LIMIT: Outcome.OUTCOME_OUTPUT_LIMIT,
    Ending.SECURITY_VIOLATION: Outcome.OUTCOME_SECURITY_VIOLATION,
}


def judge_program(
    zygote: Zygote, program: str, test_set: TestSet, max_source_bytes: int, want_details: bool
) -> Verdict:
    """The verdict on one program. Raises JudgeFault when the judge, not the program, failed."""
    source = program.encode()
    if len(source) > max_source_bytes:
        return _refused(test_set, f"the program has {len(source)} bytes; at most {max_source_bytes} are judged")
    try:
        with zygote.open(Executable(source=source), limits_of(test_set.limits)) as opened:
            return summary_of(_results(opened, test_set, want_details), len(test_set.tests), want_details)
    except CompileFailed as failure:
        return _refused(test_set, str(failure))


def _results(opened: OpenProgram, test_set: TestSet, want_details: bool) -> Iterable[TestResult]:
    for test in test_set.tests:
        result = result_of(opened.run(test.stdin), test_set, test)
        yield result
        if result.outcome != Outcome.OUTCOME_ACCEPTED and not want_details:
            return


def result_of(run: Run, test_set: TestSet, test: TestCase) -> TestResult:
    """What a run means for its test; only a clean exit is compared."""
    detail = ""
    if run.ending is Ending.EXITED and run.code == 0:
        difference = first_difference(test_set, test.stdout, run.stdout)
        outcome = Outcome.OUTCOME_ACCEPTED if difference is None else Outcome.OUTCOME_WRONG_ANSWER
        detail = difference or ""
    elif run.ending is Ending.EXITED:
        outcome = Outcome.OUTCOME_RUNTIME_ERROR
        detail = f"exit status {run.code}: {_tail(run.stderr)}"
    else:
        outcome = _OUTCOMES[run.ending]
        detail = f"{run.ending.value} ({run.code}): {_tail(run.stderr)}"
    return TestResult(
        outcome=outcome,
        cpu_seconds=run.cpu_seconds,
        wall_seconds=run.wall_seconds,
        memory_bytes=run.memory_bytes,
        detail=detail[:DETAIL_CHARACTERS],
    )


def summary_of(results: Iterable[TestResult], tests_total: int, want_details: bool) -> Verdict:
    """One verdict from the results of the tests that were run: the first failure decides."""
    verdict = Verdict(outcome=Outcome.OUTCOME_ACCEPTED, tests_total=tests_total)
    for position, result in enumerate(results):
        verdict.cpu_seconds += result.cpu_seconds
        verdict.wall_seconds += result.wall_seconds
        verdict.memory_bytes = max(verdict.memory_bytes, result.memory_bytes)
        if result.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.tests_passed += 1
        elif verdict.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.outcome = result.outcome
            verdict.detail = f"test {position + 1}: {result.detail}"[:DETAIL_CHARACTERS]
        if want_details:
            verdict.tests.append(result)
    return verdict


def _refused(test_set: TestSet, reason: str) -> Verdict:
    return Verdict(
        outcome=Outcome.OUTCOME_COMPILE_ERROR,
        tests_total=len(test_set.tests),
        detail=reason.encode(errors="replace").decode(errors="replace")[:DETAIL_CHARACTERS],
    )


def _tail(stderr: bytes) -> str:
    """The end of what a program said about its failure: that is where the exception is."""
    return stderr[-DETAIL_CHARACTERS * 4 :].decode(errors="replace").strip()[-(DETAIL_CHARACTERS - 50) :]
