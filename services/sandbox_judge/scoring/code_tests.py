"""A response that is a function or a module, and the tests that people wrote for it: one run decides."""

from __future__ import annotations

import dataclasses
import marshal
import secrets
import socket

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.executor import JudgeFault, ProgramRun, RunEnding, RunLimits, limits_of
from services.sandbox_judge.jail.proxies import LOST
from services.sandbox_judge.jail.running import ENDED, NOT_A_PROGRAM, WRONG, proof_of
from services.sandbox_judge.jail.supervisor import STARVATION
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS, encoded, result_of
from services.sandbox_judge.sandbox_worker import PreparedProgram, Role, SandboxWorker
from services.sandbox_judge.scoring.packages import role_of
from spo.tasks.scoring.separate_tests import is_shared
from spo.v1.verdict_pb2 import Outcome, TestIsolation, TestResult, TestSet, Verdict

NONCE_BYTES = 24
# One of the two processes, and what it is sent.
Side = tuple[PreparedProgram, dict[str, object]]
_OUTCOMES = {
    NOT_A_PROGRAM: Outcome.OUTCOME_COMPILE_ERROR,
    WRONG: Outcome.OUTCOME_WRONG_ANSWER,
    ENDED: Outcome.OUTCOME_WRONG_ANSWER,
}


def judge_code(
    worker: SandboxWorker, response: str, test_set: TestSet, max_source_bytes: int, *, want_details: bool
) -> Verdict:
    """The verdict on one response. Raises JudgeFault when the judge, not the response, failed.

    Tests that are no program are their writer's fault: OUTCOME_INTERNAL_ERROR.
    """
    source = encoded(response)
    if len(source) > max_source_bytes:
        reason = f"the response has {len(source)} bytes; at most {max_source_bytes} are judged"
        return Verdict(outcome=Outcome.OUTCOME_COMPILE_ERROR, tests_total=1, runs=1, detail=reason)
    tests, role = test_set.code_tests, role_of(test_set)
    assert role is not None
    nonce, limits, shared = secrets.token_bytes(NONCE_BYTES), limits_of(test_set), is_shared(tests)
    module = {"style": int(tests.style), "before": tests.before, "entry_point": tests.entry_point}
    response_part = module | {"response": source.decode("utf-8", "replace")}
    tests_part = module | {"code": tests.code, "nonce": nonce, "shared": shared}
    with worker.open(role, Executable(), limits if shared else _limits_of_waiting(limits)) as testing:
        if shared:
            run = testing.run(b"", (_packed(tests_part | response_part),))
        else:
            with worker.open(Role.RESPONSE, Executable(), limits) as responding:
                run = _run_apart((testing, tests_part), (responding, response_part), limits.wall_seconds)
    verdict = _verdict(run, proof_of(nonce), want_details=want_details)
    verdict.test_isolation = TestIsolation.TEST_ISOLATION_SHARED if shared else TestIsolation.TEST_ISOLATION_SEPARATE
    return verdict


def _packed(part: dict[str, object]) -> bytes:
    return marshal.dumps(part, 2)


def _limits_of_waiting(limits: RunLimits) -> RunLimits:
    """Limits of tests that sleep while the response computes: its own limits bound that."""
    longest = limits.wall_seconds + STARVATION * limits.cpu_seconds
    return dataclasses.replace(limits, wall_seconds=2 * longest)


def _run_apart(tests_side: Side, response_side: Side, outlives_seconds: float) -> ProgramRun:
    """One run of the tests, and beside it the response that they call; what came of both. Raises JudgeFault."""
    (testing, tests_part), (responding, response_part) = tests_side, response_side
    ours, theirs = socket.socketpair()
    with ours, theirs:
        response = responding.start((_packed(response_part),), theirs)
        try:
            tests = testing.start((_packed(tests_part),), ours)
        except JudgeFault:
            response.stop()
            responding.ended(response)
            raise
    # Each is gone for the other as soon as it has ended.
    tests.need(response, outlives_seconds)
    tests_run = testing.ended(tests)
    if tests_run.code != LOST:
        response.stop()
    return _together(tests_run, responding.ended(response))


def _together(tests: ProgramRun, response: ProgramRun) -> ProgramRun:
    """The tests' run, or the response's where that ended first and took the tests' answers along."""
    lost = tests.ending is RunEnding.EXITED and tests.code == LOST
    stopped = tests.ending is RunEnding.SIGNALLED and response.ending is not RunEnding.SIGNALLED
    deciding = response if lost or stopped else tests
    return dataclasses.replace(
        deciding,
        cpu_seconds=tests.cpu_seconds + response.cpu_seconds,
        wall_seconds=max(tests.wall_seconds, response.wall_seconds),
        memory_bytes=max(tests.memory_bytes, response.memory_bytes) if deciding is tests else response.memory_bytes,
        stdout=tests.stdout,
        stderr=tests.stderr or response.stderr,
    )


def _verdict(run: ProgramRun, proof: bytes, *, want_details: bool) -> Verdict:
    printed, found, report = run.stdout.rpartition(b"\n" + proof)
    words = report.decode(errors="replace").split(maxsplit=1) if found else []
    passed, total = 0, 1
    if words[:1] == ["broken"]:
        return Verdict(outcome=Outcome.OUTCOME_INTERNAL_ERROR, runs=1, detail=f"the tests are no program: {words[1]}")
    if words[:1] == ["passed"] and run.ending is RunEnding.EXITED:
        passed, total = map(int, words[1].split())
    result = result_of(run, lambda _: None)
    if passed == total:
        result.outcome, result.detail = Outcome.OUTCOME_ACCEPTED, ""
    elif run.ending is RunEnding.EXITED:
        said = run.stderr.decode(errors="replace").strip()[-DETAIL_CHARACTERS:]
        result.outcome = Outcome.OUTCOME_WRONG_ANSWER if found else _OUTCOMES.get(run.code, result.outcome)
        result.detail = said or "the response ended the process before its tests were through"
    result.output = printed[:200].decode(errors="replace") if found else result.output
    return _of_result(result, passed, total, want_details=want_details)


def _of_result(result: TestResult, passed: int, total: int, *, want_details: bool) -> Verdict:
    verdict = Verdict(
        outcome=result.outcome,
        tests_passed=passed,
        tests_total=total,
        cpu_seconds=result.cpu_seconds,
        wall_seconds=result.wall_seconds,
        memory_bytes=result.memory_bytes,
        detail=result.detail,
        runs=1,
    )
    if want_details:
        verdict.tests.append(result)
    return verdict
