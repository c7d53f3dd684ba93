"""One program on its tests, in order: each output is compared, and the first failure ends it unless all are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.builds import Binaries, command_of, limits_in
from services.sandbox_judge.compare import first_difference
from services.sandbox_judge.executor import (
    CompileFailed,
    JudgeFault,
    ProgramRun,
    RunEnding,
    RunLimits,
    limits_of,
)
from services.sandbox_judge.hard_coding import suspects
from services.sandbox_judge.isolation.seccomp_filter import Freedom
from services.sandbox_judge.languages import Language, language_of
from services.sandbox_judge.sandbox_worker import PreparedProgram, Role, SandboxWorker
from spo.v1.verdict_pb2 import Checker, Outcome, TestCase, TestResult, TestSet, Verdict

DETAIL_CHARACTERS = 500
OUTPUT_BYTES = 200
CHECKER_LIMITS = RunLimits(cpu_seconds=10, wall_seconds=20)
# What testlib's checkers exit with.
_CHECKER_ACCEPTS, _CHECKER_REFUSES = 0, (1, 2)

_OUTCOMES = {
    RunEnding.SIGNALLED: Outcome.OUTCOME_RUNTIME_ERROR,
    RunEnding.CPU_TIME_LIMIT: Outcome.OUTCOME_CPU_TIME_LIMIT,
    RunEnding.WALL_TIME_LIMIT: Outcome.OUTCOME_WALL_TIME_LIMIT,
    RunEnding.MEMORY_LIMIT: Outcome.OUTCOME_MEMORY_LIMIT,
    RunEnding.OUTPUT_LIMIT: Outcome.OUTCOME_OUTPUT_LIMIT,
    RunEnding.SECURITY_VIOLATION: Outcome.OUTCOME_SECURITY_VIOLATION,
}

_TIME_LIMITS = (Outcome.OUTCOME_CPU_TIME_LIMIT, Outcome.OUTCOME_WALL_TIME_LIMIT)
# A program that has met its time limit so often will not be right any more; its remaining tests are skipped.
MOST_TIME_LIMITS = 20

# Where an output first goes wrong, None when it is right.
Check = Callable[[TestCase, bytes], str | None]


class Cancelled(Exception):
    """Nobody waits for this verdict any more."""


@dataclass(frozen=True)
class JudgeOptions:
    """Which tests to run and to report, and whether anybody still waits for the verdict.

    Without details nobody learns of the tests after a failure, so they are not run.
    """

    want_details: bool = False
    stop_early: bool = False
    # Of what each test printed, so much is reported.
    output_bytes: int = OUTPUT_BYTES
    wanted: Callable[[], bool] = lambda: True
    # Whose responses they are: groups of one run may share a process.
    run_id: str = ""

    @property
    def ends_at_failure(self) -> bool:
        return self.stop_early or not self.want_details


class ProgramJudge:
    """Judges programs on a sandbox worker; shared by all of them."""

    def __init__(self, max_source_bytes: int) -> None:
        self.max_source_bytes = max_source_bytes
        self.binaries = Binaries()

    def judge(
        self,
        worker: SandboxWorker,
        program: str,
        language: str,
        test_set: TestSet,
        options: JudgeOptions = JudgeOptions(),
    ) -> Verdict:
        """The verdict on one program. Raises JudgeFault when the judge, not the program, failed, and Cancelled."""
        source = encoded(program)
        if len(source) > self.max_source_bytes:
            reason = f"the program has {len(source)} bytes; at most {self.max_source_bytes} are judged"
            return _refused(test_set, reason, options)
        try:
            with contextlib.ExitStack() as stack:
                check = self._checker(worker, test_set, stack)
                prepared = stack.enter_context(self._prepared(worker, source, language, limits_of(test_set)))
                results = list(_results(prepared.run, check, test_set, options))
                verdict = summary_of(results, test_set, want_details=options.want_details)
                verdict.suspected_hard_coded = suspects(program, language, test_set, results, prepared.run, check)
                return verdict
        except CompileFailed as failure:
            return _refused(test_set, str(failure), options)

    def checker_fault(self, worker: SandboxWorker, test_set: TestSet) -> str | None:
        """Why the comparison fails on what is right, None where it decides on that: the fault was the output's."""
        try:
            with contextlib.ExitStack() as stack:
                check = self._checker(worker, test_set, stack)
                for test in test_set.tests[:1]:
                    check(test, test.stdout)
        except JudgeFault as fault:
            return str(fault)
        return None

    def _prepared(
        self, worker: SandboxWorker, source: bytes, language: str, limits: RunLimits
    ) -> contextlib.AbstractContextManager[PreparedProgram]:
        """The program in its jail, built before where its language says so."""
        known = language_of(language)
        if not known.run:
            return worker.open(Role.PROGRAM, self._executable(worker, source, known), limits)
        built = self.binaries.built(known, source, worker)
        return worker.open(Role.PROGRAM, command_of(known, limits), limits_in(known, limits), (built,))

    def _executable(self, worker: SandboxWorker, source: bytes, language: Language) -> Executable:
        if not language.build:
            return Executable(source=source)
        binary = self.binaries.built(language, source, worker)
        return Executable(binary=binary, command=("program",), freedom=Freedom.COMMAND)

    def _checker(self, worker: SandboxWorker, test_set: TestSet, stack: contextlib.ExitStack) -> Check:
        """The comparison of a test set; a special judge runs in a jail of its own and gets the three files by path."""
        if test_set.checker != Checker.CHECKER_SPECIAL:
            return lambda test, output: first_difference(test_set, test.stdout, output)
        paths = ("checker", "/dev/fd/3", "/dev/fd/4", "/dev/fd/5")
        try:
            language = language_of(test_set.checker_language or "python")
            executable = self._executable(worker, test_set.checker_program, language)
            named = Executable(executable.source, executable.binary, paths, freedom=executable.freedom)
            prepared = stack.enter_context(worker.open(Role.CHECKER, named, CHECKER_LIMITS))
        except CompileFailed as failure:
            raise JudgeFault(f"the special judge does not compile: {failure}") from failure

        def check(test: TestCase, output: bytes) -> str | None:
            run = prepared.run(b"", (test.stdin, output, test.stdout))
            if run.ending is RunEnding.EXITED and run.code == _CHECKER_ACCEPTS:
                return None
            if run.ending is RunEnding.EXITED and run.code in _CHECKER_REFUSES:
                return f"special judge: {_tail(run.stderr + run.stdout)}"
            raise JudgeFault(f"the special judge failed: {run.ending.value} ({run.code}) {_tail(run.stderr)}")

        return check


def encoded(program: str) -> bytes:
    """The program's bytes; those that are not UTF-8 have come as surrogates."""
    return program.encode("utf-8", "surrogateescape")


def _results(
    run: Callable[[bytes], ProgramRun], check: Check, test_set: TestSet, options: JudgeOptions
) -> Iterator[TestResult]:
    """The results of the tests in order; skipped tests appear only where details are wanted."""
    time_limits, skipped = 0, ""
    for position, test in enumerate(test_set.tests):
        if skipped:
            yield TestResult(outcome=Outcome.OUTCOME_SKIPPED, detail=skipped)
            continue
        if not options.wanted():
            raise Cancelled
        result = result_of(run(test.stdin), lambda output, test=test: check(test, output), options.output_bytes)  # type: ignore[misc]
        yield result
        time_limits += result.outcome in _TIME_LIMITS
        if result.outcome != Outcome.OUTCOME_ACCEPTED and options.ends_at_failure:
            skipped = f"not run: test {position + 1} had already failed"
        elif time_limits >= MOST_TIME_LIMITS:
            skipped = f"not run: the program had already met its time limit {time_limits} times"
        if skipped and not options.want_details:
            return


def result_of(
    run: ProgramRun, difference_in: Callable[[bytes], str | None], output_bytes: int = OUTPUT_BYTES
) -> TestResult:
    """What a run means for its test; only the output of a clean exit is looked at."""
    detail = ""
    if run.ending is RunEnding.EXITED and run.code == 0:
        difference = difference_in(run.stdout)
        outcome = Outcome.OUTCOME_ACCEPTED if difference is None else Outcome.OUTCOME_WRONG_ANSWER
        detail = difference or ""
    elif run.ending is RunEnding.EXITED:
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
        detail=detail.removesuffix(": ")[:DETAIL_CHARACTERS],
        output=run.stdout[:output_bytes].decode(errors="replace"),
    )


def summary_of(results: Sequence[TestResult], test_set: TestSet, *, want_details: bool) -> Verdict:
    """One verdict from the results of the tests that were run: the first failure decides."""
    verdict = Verdict(outcome=Outcome.OUTCOME_ACCEPTED, tests_total=len(test_set.tests), runs=1)
    verdict.public_tests_total = sum(test.public for test in test_set.tests)
    for position, result in enumerate(results):
        verdict.cpu_seconds += result.cpu_seconds
        verdict.wall_seconds += result.wall_seconds
        verdict.memory_bytes = max(verdict.memory_bytes, result.memory_bytes)
        if result.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.tests_passed += 1
            verdict.public_tests_passed += test_set.tests[position].public
        elif verdict.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.outcome = result.outcome
            verdict.detail = f"test {position + 1}: {result.detail}"[:DETAIL_CHARACTERS]
    if want_details:
        verdict.tests.extend(results)
    return verdict


def _refused(test_set: TestSet, reason: str, options: JudgeOptions) -> Verdict:
    """The verdict on a source that does not compile; none of its tests was run."""
    verdict = summary_of((), test_set, want_details=False)
    verdict.outcome = Outcome.OUTCOME_COMPILE_ERROR
    verdict.detail = reason.encode(errors="replace").decode(errors="replace")[:DETAIL_CHARACTERS]
    if options.want_details:
        skipped = TestResult(outcome=Outcome.OUTCOME_SKIPPED, detail="not run: the program does not compile")
        verdict.tests.extend([skipped] * len(test_set.tests))
    return verdict


def _tail(stderr: bytes) -> str:
    """The end of what a program said about its failure: that is where the exception is."""
    return stderr[-DETAIL_CHARACTERS * 4 :].decode(errors="replace").strip()[-(DETAIL_CHARACTERS - 50) :]
