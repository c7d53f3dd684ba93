"""A response that is a function or a module, and the tests that people wrote for it: one run decides."""

from __future__ import annotations

import marshal
import secrets

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.executor import ProgramRun, RunEnding, limits_of
from services.sandbox_judge.jail.tests_child import ENDED, NOT_A_PROGRAM, WRONG, proof_of
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS, encoded, result_of
from services.sandbox_judge.sandbox_worker import SandboxWorker
from services.sandbox_judge.scoring.packages import role_of
from spo.v1.verdict_pb2 import Outcome, TestResult, TestSet, Verdict

NONCE_BYTES = 24
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
    nonce = secrets.token_bytes(NONCE_BYTES)
    sent = {
        "style": int(tests.style),
        "before": tests.before,
        "response": source.decode("utf-8", "replace"),
        "code": tests.code,
        "entry_point": tests.entry_point,
        "nonce": nonce,
    }
    with worker.open(role, Executable(), limits_of(test_set)) as prepared:
        run = prepared.run(b"", (marshal.dumps(sent, 2),))
    return _verdict(run, proof_of(nonce), want_details=want_details)


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
