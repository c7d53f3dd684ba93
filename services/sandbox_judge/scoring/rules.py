"""What must hold of test sets that are scored in the sandbox, by JSON pointer."""

from __future__ import annotations

import json

from services.sandbox_judge.scoring.packages import MATH, REASONING_GYM, missing_module, role_of
from spo.tasks.scoring.separate_tests import reasons_to_share
from spo.v1.verdict_pb2 import AnswerRule, CodeTestStyle, Limits, TestIsolation, TestSet

MOST_SOURCE_BYTES = 256 << 10
MOST_ARGUMENT_BYTES = 1 << 20
MOST_SECONDS = 600.0
MOST_MEMORY_BYTES = 16 << 30

# By JSON pointer: whether a rule holds, and what must be.
Rules = dict[str, tuple[bool, str]]


def rules_of_scoring(test_set: TestSet) -> Rules:
    """The rules of a test set with code tests or a scoring function."""
    kind = "code_tests" if test_set.HasField("code_tests") else "scoring_function"
    rules = _rules_of_code_tests(test_set) if kind == "code_tests" else _rules_of_function(test_set)
    rules["/tests"] = (not test_set.tests, f"left out where there is {kind}")
    rules["/pass_score"] = (0 <= test_set.pass_score <= 1, "between 0 and 1")
    return rules | _rules_of_limits(test_set.limits) | _rules_of_packages(test_set, f"/{kind}")


def rules_of_mathematics(test_set: TestSet) -> Rules:
    """What must hold beside the rules of every answer where mathematics is compared."""
    if not is_mathematics(test_set.answer):
        return {}
    return _rules_of_limits(test_set.limits) | _rules_of_packages(test_set, "/answer/comparison")


def is_mathematics(rule: AnswerRule) -> bool:
    """Whether an answer is compared in the sandbox."""
    return rule.comparison == MATH


def _rules_of_code_tests(test_set: TestSet) -> Rules:
    tests = test_set.code_tests
    completion = tests.style == CodeTestStyle.CODE_TEST_STYLE_COMPLETION
    demanded = tests.isolation == TestIsolation.TEST_ISOLATION_SEPARATE
    reasons = reasons_to_share(tests) if demanded else ()
    wanted = f"shared: {'; '.join(reasons)}" if reasons else "one that this judge knows"
    return {
        "/code_tests/style": (0 < tests.style < len(CodeTestStyle.values()), "a style that this judge knows"),
        "/code_tests/code": (bool(tests.code.strip()) and _fits(tests.code), _bytes(MOST_SOURCE_BYTES)),
        "/code_tests/before": (
            _fits(tests.before) and (not completion or bool(tests.before.strip())),
            f"at most {MOST_SOURCE_BYTES} bytes, and there for a completion",
        ),
        "/code_tests/entry_point": (
            tests.entry_point.isidentifier() if tests.entry_point else not completion,
            "the name of a function, which a completion needs",
        ),
        "/code_tests/isolation": (tests.isolation in TestIsolation.values() and not reasons, wanted),
    }


def _rules_of_function(test_set: TestSet) -> Rules:
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


def _rules_of_limits(limits: Limits) -> Rules:
    return {
        "/limits/cpu_seconds": (0 <= limits.cpu_seconds <= MOST_SECONDS, "not negative, at most 600"),
        "/limits/wall_seconds": (0 <= limits.wall_seconds <= 2 * MOST_SECONDS, "not negative, at most 1200"),
        "/limits/memory_bytes": (0 <= limits.memory_bytes <= MOST_MEMORY_BYTES, "not negative, at most 16 GiB"),
        "/limits/output_bytes": (0 <= limits.output_bytes <= 1 << 30, "not negative, at most 1 GiB"),
        "/limits/processes": (0 <= limits.processes <= 256, "not negative, at most 256"),
    }


def _rules_of_packages(test_set: TestSet, pointer: str) -> Rules:
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
