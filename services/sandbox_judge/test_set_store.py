"""Test sets that this judge can judge by, kept by their digests, and what must hold of them."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Protocol

from services.sandbox_judge.executor import languages
from services.sandbox_judge.scoring import MATH, REASONING_GYM, missing_module, role_of
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput
from spo.service.judge_stage import StoredTestSets
from spo.tasks.answer import (
    CHOICE,
    JSON_SCHEMA,
    LONGEST_ANSWER,
    MAX_MARKER,
    REGULAR_EXPRESSION,
    XML_TAG,
    expectation_fault,
    number_of,
)
from spo.tasks.separate_tests import reasons_to_share, runs_nothing
from spo.tasks.verifier import require_composable
from spo.v1 import verdict_pb2 as wire

MOST_SOURCE_BYTES = 256 << 10
MOST_ARGUMENT_BYTES = 1 << 20
MOST_SECONDS = 600.0
MOST_MEMORY_BYTES = 16 << 30

# By JSON pointer: whether a rule holds, and what must be.
Rules = dict[str, tuple[bool, str]]

MAX_TESTS = 10_000
MAX_MEMORY_BYTES = 16 << 30
MAX_SECONDS = 600.0
MAX_EXPECTED = 1000
EXACT = wire.AnswerComparison.ANSWER_COMPARISON_EXACT
NUMERIC = wire.AnswerComparison.ANSWER_COMPARISON_NUMERIC

COMPARISONS = frozenset({EXACT, NUMERIC, CHOICE, REGULAR_EXPRESSION, JSON_SCHEMA})


def rules_of_scoring(test_set: wire.TestSet) -> Rules:
    """The rules of a test set with code tests or a scoring function."""
    kind = "code_tests" if test_set.HasField("code_tests") else "scoring_function"
    rules = _rules_of_code_tests(test_set) if kind == "code_tests" else _rules_of_function(test_set)
    rules["/tests"] = (not test_set.tests, f"left out where there is {kind}")
    rules["/pass_score"] = (0 <= test_set.pass_score <= 1, "between 0 and 1")
    return rules | _rules_of_limits(test_set.limits) | _rules_of_packages(test_set, f"/{kind}")


def rules_of_mathematics(test_set: wire.TestSet) -> Rules:
    """What must hold beside the rules of every answer where mathematics is compared."""
    if not is_mathematics(test_set.answer):
        return {}
    return _rules_of_limits(test_set.limits) | _rules_of_packages(test_set, "/answer/comparison")


def is_mathematics(rule: wire.AnswerRule) -> bool:
    """Whether an answer is compared in the sandbox."""
    return rule.comparison == MATH


def _rules_of_code_tests(test_set: wire.TestSet) -> Rules:
    tests = test_set.code_tests
    completion = tests.style == wire.CodeTestStyle.CODE_TEST_STYLE_COMPLETION
    demanded = tests.isolation == wire.TestIsolation.TEST_ISOLATION_SEPARATE
    reasons = reasons_to_share(tests) if demanded else ()
    wanted = f"shared: {'; '.join(reasons)}" if reasons else "one that this judge knows"
    return {
        "/code_tests/style": (0 < tests.style < len(wire.CodeTestStyle.values()), "a style that this judge knows"),
        "/code_tests/code": (
            bool(tests.code.strip()) and _fits(tests.code) and not runs_nothing(tests),
            f"{_bytes(MOST_SOURCE_BYTES)}, and tests that are run and not only defined",
        ),
        "/code_tests/before": (
            _fits(tests.before) and (not completion or bool(tests.before.strip())),
            f"at most {MOST_SOURCE_BYTES} bytes, and there for a completion",
        ),
        "/code_tests/entry_point": (
            tests.entry_point.isidentifier() if tests.entry_point else not completion,
            "the name of a function, which a completion needs",
        ),
        "/code_tests/isolation": (tests.isolation in wire.TestIsolation.values() and not reasons, wanted),
    }


def _rules_of_function(test_set: wire.TestSet) -> Rules:
    function = test_set.scoring_function
    arguments = _object_in(function.arguments_json)
    gym = function.library == REASONING_GYM
    complete = not gym or (
        arguments is not None
        and isinstance(arguments.get("dataset"), str)
        and isinstance(entry := arguments.get("entry"), dict)
        and "metadata" in entry
        and isinstance(arguments.get("tag", ""), str)
    )
    return {
        "/scoring_function/library": (
            function.library in ("", REASONING_GYM) and bool(function.library) != bool(function.source),
            f"{REASONING_GYM}, exactly where there is no source",
        ),
        "/scoring_function/source": (_fits(function.source), f"at most {MOST_SOURCE_BYTES} bytes"),
        "/scoring_function/function": (
            function.function.isidentifier() if function.source else not function.function,
            "the name of a function, exactly where there is a source",
        ),
        "/scoring_function/arguments_json": (
            arguments is not None and complete,
            "a JSON object" + (" with dataset, entry (answer, metadata) and optionally tag" if gym else ""),
        ),
    }


def _rules_of_limits(limits: wire.Limits) -> Rules:
    return {
        "/limits/cpu_seconds": (0 <= limits.cpu_seconds <= MOST_SECONDS, "not negative, at most 600"),
        "/limits/wall_seconds": (0 <= limits.wall_seconds <= 2 * MOST_SECONDS, "not negative, at most 1200"),
        "/limits/memory_bytes": (0 <= limits.memory_bytes <= MOST_MEMORY_BYTES, "not negative, at most 16 GiB"),
        "/limits/output_bytes": (0 <= limits.output_bytes <= 1 << 30, "not negative, at most 1 GiB"),
        "/limits/processes": (0 <= limits.processes <= 256, "not negative, at most 256"),
    }


def _rules_of_packages(test_set: wire.TestSet, pointer: str) -> Rules:
    role = role_of(test_set)
    missing = missing_module(role) if role else ""
    return {pointer: (not missing, f"one that this judge can score: it lacks {missing} (extra `tasks`)")}


def _fits(text: str) -> bool:
    return len(text.encode(errors="replace")) <= MOST_SOURCE_BYTES


def _bytes(most: int) -> str:
    return f"not blank, at most {most} bytes"


def _object_in(text: str) -> dict[str, object] | None:
    """The JSON object that a text is, {} where there is none; None where it is something else or too much."""
    if len(text) > MOST_ARGUMENT_BYTES:
        return None
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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
        super().__init__(store, redis_keys.judge_tests, require_usable)


def require_usable(test_set: wire.TestSet) -> None:
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
    special = test_set.checker == wire.Checker.CHECKER_SPECIAL
    rules: Rules = {
        "/tests": (0 < len(test_set.tests) <= MAX_TESTS, f"between 1 and {MAX_TESTS} tests"),
        "/checker": (test_set.checker in wire.Checker.values(), "a checker that this judge knows"),
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


def tests_in(test_set: wire.TestSet) -> int:
    """How many results one response has; whatever is no program's tests counts as one."""
    parts = [part.verifier for part in test_set.composition.parts if part.HasField("verifier")]
    return sum(tests_in(part) for part in parts) or max(1, len(test_set.tests))


def _require_known_kind(test_set: wire.TestSet) -> None:
    """Refuse what this judge does not decide by."""
    others = ("http", "model")
    unknown = [name for name in others if test_set.HasField(name)]  # type: ignore[arg-type]
    _require_rules({f"/{name}": (False, "left out: this judge does not decide by it") for name in unknown})


def _rules_of_answer(test_set: wire.TestSet) -> Rules:
    rule = test_set.answer
    numeric = rule.comparison == NUMERIC
    of_marker = {
        wire.AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER: 0 < len(rule.marker) <= MAX_MARKER,
        wire.AnswerExtraction.ANSWER_EXTRACTION_XML_TAG: re.fullmatch(XML_TAG, rule.marker) is not None,
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
        "/answer/extraction": (0 < rule.extraction < len(wire.AnswerExtraction.values()), "one that this judge knows"),
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
