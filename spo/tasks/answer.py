"""Answers: cut out of a response by a stated rule and compared with the expected ones; nothing is guessed.

A response comes from a model and may hold anything: no function here raises on one, and all take time linear in it,
comparisons by regular expressions and schemas apart (spo.tasks.scoring.comparisons).
"""

from __future__ import annotations

import re

from spo.tasks.scoring.comparisons import UNBOUNDED, is_match, label_of, schema_fault
from spo.tasks.scoring.numbers import LONGEST_ANSWER, is_close, last_number, number_of
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule

# In the place of a programming language, where responses are answers.
ANSWER_LANGUAGE = "text"
# Where a process that can be ended compares.
LONGEST_TEXT = 200_000
MAX_MARKER = 200
XML_TAG = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"
_SHOWN_CHARACTERS = 80
# `\boxed{57}`, or as TeX reads it without braces: `\boxed 5`.
_BOXED = re.compile(r"\\(?:boxed|fbox)[ \t]{0,3}(?:\{|(?<=[ \t])([^\s{}$\\.,;]+))")


def fault_of(rule: AnswerRule, response: str) -> str | None:
    """None when the response holds a right answer under the rule, otherwise what is wrong with it.

    Raises BrokenSchema where a schema cannot decide.
    """
    answer = answer_in(rule, response)
    longest = LONGEST_TEXT if rule.comparison in UNBOUNDED else LONGEST_ANSWER
    if not answer:
        return f"no answer found: {_places(rule)}"
    if len(answer) > longest:
        return f"the answer has {len(answer)} characters; at most {longest} are compared"
    match rule.comparison:
        case AnswerComparison.ANSWER_COMPARISON_NUMERIC:
            return _numeric_fault(rule, answer)
        case AnswerComparison.ANSWER_COMPARISON_CHOICE:
            return _choice_fault(rule, answer)
        case AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION:
            right = any(is_match(expression, answer) for expression in rule.expected)
        case AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA:
            faults = [schema_fault(schema, answer) for schema in rule.expected]
            return None if None in faults else faults[0]
        case _:
            right = any(answer == expected.strip() for expected in rule.expected)
    return None if right else _difference(rule, answer)


def answer_in(rule: AnswerRule, response: str) -> str:
    """The answer in a response without white space around it, '' where there is none."""
    match rule.extraction:
        case AnswerExtraction.ANSWER_EXTRACTION_FIRST_LINE:
            found = response.lstrip().partition("\n")[0]
        case AnswerExtraction.ANSWER_EXTRACTION_LAST_NUMBER:
            found = last_number(response)
        case AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            found = response.rpartition(rule.marker)[2].partition("\n")[0] if rule.marker in response else ""
        case AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            found = _last_boxed(response)
        case AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            inside, closed, _ = response.rpartition(f"</{rule.marker}>")
            _, opened, content = inside.rpartition(f"<{rule.marker}>")
            found = content if closed and opened else ""
        case _:
            found = response
    return found.strip()


def _numeric_fault(rule: AnswerRule, answer: str) -> str | None:
    if (found := number_of(answer)) is None:
        return f"{_shown(answer)} is no number, or more than one"
    wanted = (number_of(expected) for expected in rule.expected)
    tolerances = rule.absolute_tolerance, rule.relative_tolerance
    right = any(is_close(number, found, *tolerances) for number in wanted if number is not None)
    return None if right else _difference(rule, answer)


def _choice_fault(rule: AnswerRule, answer: str) -> str | None:
    if not (label := label_of(answer)):
        return f"{_shown(answer)} begins with no single label of a choice"
    right = any(label == label_of(expected) for expected in rule.expected)
    return None if right else _difference(rule, answer)


def _difference(rule: AnswerRule, answer: str) -> str:
    return f"expected {_shown(rule.expected[0])}, found {_shown(answer)}"


def _last_boxed(response: str) -> str:
    last = max(_BOXED.finditer(response), key=re.Match.start, default=None)
    if last is None:
        return ""
    if last[1]:
        return last[1]
    start, depth = last.end(), 1
    for brace in re.finditer(r"\\.|[{}]", response[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[start : start + brace.start()]
    return ""


def _places(rule: AnswerRule) -> str:
    match rule.extraction:
        case AnswerExtraction.ANSWER_EXTRACTION_LAST_NUMBER:
            return "the response holds no number"
        case AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            return f"the response holds nothing after {_shown(rule.marker)}"
        case AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            return "the response holds no whole \\boxed{...}"
        case AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            return f"the response holds no whole <{rule.marker}>...</{rule.marker}>"
    return "the response is empty"


def _shown(text: str) -> str:
    shown = ascii(text[:_SHOWN_CHARACTERS])
    return shown if len(text) <= _SHOWN_CHARACTERS else f"{shown}... ({len(text)} characters)"
