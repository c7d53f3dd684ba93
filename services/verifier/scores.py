"""From what a service says of a response to a verdict: a number between 0 and 1, or numbers by name, or an error."""

from __future__ import annotations

import re
from statistics import fmean

from services.verifier.guarded_post import BadAnswer
from spo.spec.reward import reaches, score_in_range
from spo.v1.verdict_pb2 import Outcome, PartScore, Verdict

DETAIL_CHARACTERS = 500
MOST_NAMES = 16
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def number_in(value: object, what: str) -> float:
    """A score as it came. Raises BadAnswer unless it is a finite number between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadAnswer(f"{what} is {type(value).__name__}, not a number")
    if (score := score_in_range(value)) is None:
        raise BadAnswer(f"{what} is {str(value)[:40]}, not between 0 and 1")
    return score


def scored(value: object, what: str, pass_score: float, detail: str = "") -> Verdict:
    """The verdict of a number, or of numbers by name, whose mean is the score. Raises BadAnswer."""
    parts: list[PartScore] = []
    if isinstance(value, dict):
        if not 0 < len(value) <= MOST_NAMES or not all(NAME.fullmatch(name) for name in value):
            raise BadAnswer(f"{what} must hold between 1 and {MOST_NAMES} names of letters, digits, '_', '.' and '-'")
        parts = [PartScore(name=name, score=number_in(each, f"{what}.{name}")) for name, each in value.items()]
        score = fmean(part.score for part in parts)
    else:
        score = number_in(value, what)
    right = reaches(score, pass_score)
    outcome = Outcome.OUTCOME_ACCEPTED if right else Outcome.OUTCOME_WRONG_ANSWER
    told = detail or ("" if right else f"score {score:g}; {pass_score or 1.0:g} passes")
    return Verdict(
        outcome=outcome,
        score=score,
        parts=parts,
        detail=told.encode(errors="replace").decode()[:DETAIL_CHARACTERS],
        tests_total=1,
        tests_passed=int(right),
        runs=1,
    )
