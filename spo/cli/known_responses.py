"""A right and a wrong response to a problem, as far as its task set says what is right."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spo.tasks.problem import Problem, write_response
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule

# A whole response or answer of these is no expected text but a description of it.
_DESCRIBED = (
    AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION,
    AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA,
)
_NO_PROGRAM = "print('this is not the answer')\n"


@dataclass(frozen=True)
class Known:
    """None: the task set does not say. invented: what is made up here, of `right` and `wrong`."""

    right: str | None
    wrong: str | None
    invented: frozenset[str] = frozenset()


def known_responses(problem: Problem) -> Known:
    """A solution that people wrote, or the expected answer where the rule looks for it; and one that is wrong."""
    right = next(iter(problem.human_solutions), None)
    wrong = next(iter(problem.wrong_solutions), None)
    invented = frozenset(name for name, known in (("right", right), ("wrong", wrong)) if known is None)
    kind = problem.tests
    if kind.HasField("answer"):
        if right is None and kind.answer.comparison not in _DESCRIBED:
            right = written_answer(kind.answer, kind.answer.expected[0])
        return Known(right, wrong or written_answer(kind.answer, _other(kind.answer.expected[0])), invented)
    if kind.HasField("scoring_function"):
        arguments = json.loads(kind.scoring_function.arguments_json or "{}")
        tag = arguments.get("tag", "")
        return Known(right, wrong or (f"<{tag}>not it</{tag}>" if tag else "not it"), invented)
    if kind.HasField("code_tests"):
        wrong = wrong or _other_function(kind.code_tests.entry_point)
    wrong = wrong or _NO_PROGRAM
    return Known(
        None if right is None else write_response(right, problem.response_format, problem.language),
        write_response(wrong, problem.response_format, problem.language),
        invented,
    )


def written_answer(rule: AnswerRule, answer: str) -> str:
    """The response in which the rule finds this answer."""
    match rule.extraction:
        case AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            return f"\\boxed{{{answer}}}"
        case AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            return f"{rule.marker} {answer}"
        case AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            return f"<{rule.marker}>{answer}</{rule.marker}>"
    return answer


def _other(expected: str) -> str:
    """An answer that is another number, or no such text."""
    try:
        return str(float(expected.replace(",", "")) * 2 + 1)
    except (ValueError, OverflowError):
        return f"not {expected[:80]}"


def _other_function(entry_point: str) -> str:
    return f"def {entry_point or 'f'}(*_, **__):\n    return 'this is not the answer'\n"
