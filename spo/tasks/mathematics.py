"""Which expected answers math-verify can read, found out at submit: `python -m spo.tasks.mathematics`.

A process of its own, confined in memory and time: the package evaluates what it reads, and there are texts on which it
does not end. A JSON list of texts on standard input; on standard output that of the places of those it cannot read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.answer import number_of
from spo.tasks.problem import Problem
from spo.v1.verdict_pb2 import AnswerComparison, AnswerRule, TestSet

LIBRARY = "math_verify"
MEMORY_BYTES = 2 << 30
TEXT_SECONDS = 2.0
READING_SECONDS = 120
SHOWN_FAULTS = 20
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")


def require_readable(problems: Iterable[Problem]) -> str:
    """Raises InvalidInput (code "malformed_task") naming the rows whose expected answers the package cannot read.

    Returns why nothing was looked at, "" where all was: nothing is refused then, and the judge says it.
    """
    faults, note = unreadable(problems)
    if faults:
        violations = tuple(FieldViolation("/tasks/path", fault) for fault in faults[:SHOWN_FAULTS])
        summary = f"{len(faults)} expected answers cannot be compared; the first: {violations[0].message}"
        raise InvalidInput(summary, code="malformed_task", violations=violations)
    return note


def unreadable(problems: Iterable[Problem]) -> tuple[list[str], str]:
    """What is wrong with which rows' expected answers, and why none was looked at ("" where all were)."""
    wanted = [(problem.place, text) for problem in problems for text in _expected(problem.tests)]
    texts = list(dict.fromkeys(text for _, text in wanted))
    if not texts:
        return [], ""
    places = _unread(texts) if importlib.util.find_spec(LIBRARY) else "math-verify is not installed here"
    if isinstance(places, str):
        return [], f"{len(texts)} expected answers of the comparison math were not looked at: {places}"
    unread = {texts[place] for place in places}
    message = "is nothing that math-verify can read, which the comparison math needs"
    faults = [f"{at or 'a problem'}: answer/expected: {text[:80]!r} {message}" for at, text in wanted if text in unread]
    return faults, ""


def _expected(test_set: TestSet) -> list[str]:
    """The expected answers of a rule for mathematics, also within a composition; plain numbers are always read."""
    rules = [test_set.answer, *(part.verifier.answer for part in test_set.composition.parts)]
    return [text for rule in rules if _is_mathematics(rule) for text in rule.expected if number_of(text) is None]


def _is_mathematics(rule: AnswerRule) -> bool:
    return rule.comparison == AnswerComparison.ANSWER_COMPARISON_MATH


def _unread(texts: Sequence[str]) -> list[int] | str:
    """The places of texts that cannot be read, or why that was not found out."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "spo.tasks.mathematics"],
            input=json.dumps(texts).encode(),
            capture_output=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
            timeout=READING_SECONDS,
            check=False,
        )
        found: list[int] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return f"reading them took more than {READING_SECONDS} s"
    except ValueError:
        return "their reader broke"
    return found


class _TooLong(BaseException):
    """The time of a text is spent; no library catches it on its way."""


def main() -> int:
    """Answer the request on standard input; returns the exit status."""
    import logging

    from math_verify import parse

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _end)
    unread = []
    for place, text in enumerate(json.load(sys.stdin)):
        try:
            signal.setitimer(signal.ITIMER_PROF, TEXT_SECONDS)
            # With and without marks of its own; the judge reads it by either.
            found = parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)
        except (_TooLong, Exception):
            found = []
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if not found:
            unread.append(place)
    print(json.dumps(unread))
    return 0


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


if __name__ == "__main__":
    sys.exit(main())
