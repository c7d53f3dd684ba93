"""Responses of each kind that are known to be right: where one is not decided rightly, the fault is the judge's.

The judge tries them where it has failed on another response, and `spo doctor` tries them all.
"""

from __future__ import annotations

import json

from services.sandbox_judge.executor import JudgeFault, language_of
from services.sandbox_judge.program_judge import JudgeOptions, ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.scoring import (
    MATH,
    REASONING_GYM,
    SCORING_ROLES,
    judge_code,
    missing_module,
    score_responses,
)
from spo.v1.verdict_pb2 import (
    AnswerExtraction,
    AnswerRule,
    CodeTests,
    CodeTestStyle,
    Outcome,
    ScoringFunction,
    TestCase,
    TestSet,
)

_MODULE_TESTS = "assert one() == 1"
_PYTEST_TESTS = "from solution import one\ndef test_one():\n    assert one() == 1\n"
_ENTRY = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
# A right response of each kind, with what decides on it.
_RIGHT: dict[Role, tuple[str, TestSet]] = {
    Role.PROGRAM: ("print(int(input()) + 1)", TestSet(tests=[TestCase(stdin=b"41\n", stdout=b"42\n")])),
    Role.TESTS: (
        "def one():\n    return 1\n",
        TestSet(code_tests=CodeTests(style=CodeTestStyle.CODE_TEST_STYLE_MODULE, code=_MODULE_TESTS)),
    ),
    Role.PYTEST: (
        "def one():\n    return 1\n",
        TestSet(
            code_tests=CodeTests(
                style=CodeTestStyle.CODE_TEST_STYLE_PYTEST,
                code=_PYTEST_TESTS,
            )
        ),
    ),
    Role.FUNCTION: (
        "1",
        TestSet(scoring_function=ScoringFunction(source="def score(response):\n    return 1.0\n", function="score")),
    ),
    Role.MATHEMATICS: (
        "0.5",
        TestSet(
            answer=AnswerRule(
                expected=["1/2"], comparison=MATH, extraction=AnswerExtraction.ANSWER_EXTRACTION_FIRST_LINE
            )
        ),
    ),
    Role.REASONING_GYM: (
        "<answer>2</answer>",
        TestSet(
            scoring_function=ScoringFunction(
                library=REASONING_GYM,
                arguments_json=json.dumps({"dataset": "chain_sum", "entry": _ENTRY, "tag": "answer"}),
            )
        ),
    ),
}
# A program that does nothing, in languages where that is not the empty one.
_IDLE = {
    "c": "int main(void) { return 0; }",
    "cpp": "int main() { return 0; }",
    "java": "public class Main { public static void main(String[] words) { } }",
}


def roles_here() -> list[Role]:
    """What this judge decides by: programs, and each kind whose package is installed."""
    return [role for role in _RIGHT if role is Role.PROGRAM or not missing_module(role)]


def role_fault(worker: SandboxWorker, role: Role) -> str | None:
    """Why a role does not decide rightly here, found out by a right response of its kind; None where it does."""
    response, test_set = _RIGHT[role]
    try:
        if role is Role.PROGRAM:
            verdict = ProgramJudge(len(response)).judge(worker, response, "python", test_set)
        elif role in SCORING_ROLES:
            (verdict,) = score_responses(worker, [response], test_set, JudgeOptions())
        else:
            verdict = judge_code(worker, response, test_set, len(response), want_details=False)
    except JudgeFault as fault:
        return str(fault) or "it broke"
    return None if verdict.outcome == Outcome.OUTCOME_ACCEPTED else verdict.detail or Outcome.Name(verdict.outcome)


def language_fault(worker: SandboxWorker, language: str) -> str | None:
    """Why programs of a language cannot be judged here, found out by one that does nothing; None where they can."""
    program = _IDLE.get(language_of(language).name, "")
    try:
        verdict = ProgramJudge(1 << 10).judge(worker, program, language, TestSet(tests=[TestCase()]))
    except JudgeFault as fault:
        return str(fault) or "it broke"
    return None if verdict.outcome == Outcome.OUTCOME_ACCEPTED else verdict.detail or Outcome.Name(verdict.outcome)
