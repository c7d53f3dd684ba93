"""Test sets that this judge can judge by, kept by their digests."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

from services.sandbox_judge import redis_keys as own_keys
from services.sandbox_judge.languages import languages
from services.sandbox_judge.scoring.rules import Rules, is_mathematics, rules_of_mathematics, rules_of_scoring
from spo.errors import FieldViolation, InvalidInput
from spo.service.stored_test_sets import StoredTestSets
from spo.tasks.answer import MAX_MARKER, XML_TAG
from spo.tasks.scoring.comparisons import CHOICE, JSON_SCHEMA, REGULAR_EXPRESSION, expectation_fault
from spo.tasks.scoring.numbers import LONGEST_ANSWER, number_of
from spo.tasks.scoring.rules import require_composable
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, Checker, TestSet

MAX_TESTS = 10_000
MAX_MEMORY_BYTES = 16 << 30
MAX_SECONDS = 600.0
MAX_EXPECTED = 1000
EXACT = AnswerComparison.ANSWER_COMPARISON_EXACT
NUMERIC = AnswerComparison.ANSWER_COMPARISON_NUMERIC

COMPARISONS = frozenset({EXACT, NUMERIC, CHOICE, REGULAR_EXPRESSION, JSON_SCHEMA})


class Store(Protocol):
    """Where test sets and verdicts are kept by key: Redis, or memory in a judge that serves one command."""

    def get(self, name: str, /) -> Any: ...

    def mget(self, keys: list[str], /) -> Any: ...

    def set(self, name: str, value: bytes, /) -> Any: ...

    def eval(self, script: str, numkeys: int, /, *keys_and_args: str | bytes | int) -> object: ...


class TestSets(StoredTestSets):
    """The test sets that were uploaded to this judge."""

    __test__ = False  # not a pytest class

    def __init__(self, store: Store) -> None:
        super().__init__(store, own_keys.tests, require_usable)


def require_usable(test_set: TestSet) -> None:
    """Raises InvalidInput naming each field that cannot be judged by."""
    _require_known_kind(test_set)
    _require_rules({"/pass_score": (_within(test_set.pass_score, 1.0), "between 0 and 1")})
    if test_set.HasField("composition"):
        require_composable(test_set, require_usable)
        return
    if test_set.HasField("answer"):
        _require_rules(_rules_of_answer(test_set) | rules_of_mathematics(test_set))
        return
    if test_set.HasField("code_tests") or test_set.HasField("scoring_function"):
        _require_rules(rules_of_scoring(test_set))
        return
    limits = test_set.limits
    special = test_set.checker == Checker.CHECKER_SPECIAL
    rules: Rules = {
        "/tests": (0 < len(test_set.tests) <= MAX_TESTS, f"between 1 and {MAX_TESTS} tests"),
        "/checker": (test_set.checker in Checker.values(), "a checker that this judge knows"),
        "/limits/cpu_seconds": (_within(limits.cpu_seconds, MAX_SECONDS), "not negative, at most 600"),
        "/limits/wall_seconds": (_within(limits.wall_seconds, 2 * MAX_SECONDS), "not negative, at most 1200"),
        "/limits/memory_bytes": (_within(limits.memory_bytes, MAX_MEMORY_BYTES), "not negative, at most 16 GiB"),
        "/limits/output_bytes": (_within(limits.output_bytes, 1 << 30), "not negative, at most 1 GiB"),
        "/limits/processes": (_within(limits.processes, 256), "not negative, at most 256"),
        "/absolute_tolerance": (_within(test_set.absolute_tolerance, math.inf), "finite and not negative"),
        "/relative_tolerance": (_within(test_set.relative_tolerance, math.inf), "finite and not negative"),
        "/checker_program": (special == bool(test_set.checker_program), "there exactly for CHECKER_SPECIAL"),
        "/checker_language": (
            (checker := languages().get(test_set.checker_language or "python")) is not None and not checker.run,
            "a language of this judge without a runtime of its own",
        ),
    }
    _require_rules(rules)


def tests_in(test_set: TestSet) -> int:
    """How many results one response has; whatever is no program's tests counts as one."""
    parts = [part.verifier for part in test_set.composition.parts if part.HasField("verifier")]
    return sum(tests_in(part) for part in parts) or max(1, len(test_set.tests))


def _require_known_kind(test_set: TestSet) -> None:
    """Refuse what this judge does not decide by."""
    others = ("http", "model")
    unknown = [name for name in others if test_set.HasField(name)]  # type: ignore[arg-type]
    _require_rules({f"/{name}": (False, "left out: this judge does not decide by it") for name in unknown})


def _rules_of_answer(test_set: TestSet) -> Rules:
    rule = test_set.answer
    numeric = rule.comparison == NUMERIC
    of_marker = {
        AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER: 0 < len(rule.marker) <= MAX_MARKER,
        AnswerExtraction.ANSWER_EXTRACTION_XML_TAG: re.fullmatch(XML_TAG, rule.marker) is not None,
    }
    readable = all(0 < len(text.strip()) <= LONGEST_ANSWER for text in rule.expected)
    numbers = not numeric or all(number_of(text) is not None for text in rule.expected)
    faults = [fault for text in rule.expected[:MAX_EXPECTED] if (fault := expectation_fault(rule.comparison, text))]
    expected = faults[0] if faults else f"not blank, at most {LONGEST_ANSWER} long, numbers for numeric"
    return {
        "/tests": (not test_set.tests, "left out where there is an answer"),
        "/answer/expected": (0 < len(rule.expected) <= MAX_EXPECTED, f"between 1 and {MAX_EXPECTED} answers"),
        "/answer/expected/*": (readable and numbers and not faults, expected),
        "/answer/comparison": (
            rule.comparison in COMPARISONS or is_mathematics(rule),
            "a comparison that this judge knows",
        ),
        "/answer/extraction": (0 < rule.extraction < len(AnswerExtraction.values()), "one that this judge knows"),
        "/answer/marker": (of_marker.get(rule.extraction, not rule.marker), "there exactly where extraction needs it"),
        "/answer/absolute_tolerance": (_within(rule.absolute_tolerance, math.inf), "finite and not negative"),
        "/answer/relative_tolerance": (_within(rule.relative_tolerance, math.inf), "finite and not negative"),
    }


def _require_rules(rules: Rules) -> None:
    violations = tuple(
        FieldViolation(pointer, f"must be {rule}") for pointer, (holds, rule) in rules.items() if not holds
    )
    if violations:
        raise InvalidInput("this test set cannot be judged by", violations=violations)


def _within(value: float, most: float) -> bool:
    return math.isfinite(value) and 0 <= value <= most
