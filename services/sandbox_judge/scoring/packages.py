"""The packages that scoring needs: which are installed, and what decides how they behave."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from functools import cache

from services.sandbox_judge.sandbox_worker import Role
from spo.redis_keys import digest
from spo.v1.verdict_pb2 import AnswerComparison, CodeTestStyle, TestSet

MATH = AnswerComparison.ANSWER_COMPARISON_MATH
REASONING_GYM = "reasoning_gym"
# Raise it when a change of `jail/scores_child.py` or `scores.py` could change a verdict by this role.
_REVISIONS: Mapping[Role, str] = {Role.FUNCTION: "2", Role.MATHEMATICS: "3", Role.REASONING_GYM: "2"}
# Those whose responses are scored several at a time.
SCORING_ROLES = (Role.FUNCTION, Role.MATHEMATICS, Role.REASONING_GYM)
# By role: the module without which it cannot serve, and the distributions whose versions decide; empty: all that are
# installed, since people's functions may import any.
_NEEDED: Mapping[Role, tuple[str, tuple[str, ...]]] = {
    Role.TESTS: ("", ()),
    Role.RESPONSE: ("", ()),
    Role.PYTEST: ("pytest", ()),
    Role.FUNCTION: ("numpy", ()),
    Role.MATHEMATICS: (
        "math_verify",
        ("math-verify", "latex2sympy2-extended", "sympy", "mpmath", "antlr4-python3-runtime"),
    ),
    Role.REASONING_GYM: (REASONING_GYM, ("reasoning-gym", "sympy")),
}


def role_of(test_set: TestSet) -> Role | None:
    """Which zygotes decide by this test set; None for what is not scored in the sandbox, or is a program's."""
    if test_set.HasField("answer"):
        return Role.MATHEMATICS if test_set.answer.comparison == MATH else None
    if test_set.HasField("code_tests"):
        return Role.PYTEST if test_set.code_tests.style == CodeTestStyle.CODE_TEST_STYLE_PYTEST else Role.TESTS
    if test_set.HasField("scoring_function"):
        return Role.REASONING_GYM if test_set.scoring_function.library == REASONING_GYM else Role.FUNCTION
    return None


def missing_module(role: Role) -> str:
    """The module that this environment lacks for a role, '' when it has it."""
    name = _NEEDED[role][0]
    return name if name and importlib.util.find_spec(name) is None else ""


@cache
def behaviour_of_packages(role: Role) -> str:
    """What of this environment decides about a role's verdicts: part of the key of a cached one."""
    wanted = _NEEDED[role][1]
    versions = {
        _normalised(found.metadata["Name"] or ""): found.version for found in importlib.metadata.distributions()
    }
    names = tuple(map(_normalised, wanted)) or tuple(sorted(versions))
    revision = [_REVISIONS[role]] if role in _REVISIONS else []
    return digest(role.value, *revision, *(f"{name}=={versions.get(name, '')}" for name in names))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
