"""How well a verifier's scores agree with people's labels: agreement, confusion, order, what a score stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

BINS = 10
# A label from which people call a response right.
RIGHT = 0.5


@dataclass(frozen=True)
class ScoreBin:
    """The examples whose score lies from `low` up to the next bin, and the mean of their labels."""

    low: float
    examples: int
    mean_score: float
    mean_label: float


@dataclass(frozen=True)
class JudgeCalibration:
    """All shares are between 0 and 1; spearman and auc are None where all labels, or all scores, are alike."""

    examples: int
    agreement: float
    right_and_passed: int
    right_and_failed: int
    wrong_and_passed: int
    wrong_and_failed: int
    spearman: float | None
    auc: float | None
    mean_error: float
    bins: tuple[ScoreBin, ...]


def calibration_of(scores: Sequence[float], labels: Sequence[float], pass_score: float) -> JudgeCalibration:
    """Compare scores with labels, both between 0 and 1 and as many; at least one."""
    passed = [score >= pass_score for score in scores]
    right = [label >= RIGHT for label in labels]
    pairs = list(zip(right, passed, strict=True))
    return JudgeCalibration(
        examples=len(pairs),
        agreement=sum(one == other for one, other in pairs) / len(pairs),
        right_and_passed=pairs.count((True, True)),
        right_and_failed=pairs.count((True, False)),
        wrong_and_passed=pairs.count((False, True)),
        wrong_and_failed=pairs.count((False, False)),
        spearman=_correlation(_ranks(scores), _ranks(labels)),
        auc=_auc(scores, right),
        mean_error=sum(abs(score - label) for score, label in zip(scores, labels, strict=True)) / len(pairs),
        bins=tuple(_bins(scores, labels)),
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    before = 0
    for _, places in groupby(order, key=values.__getitem__):
        same = list(places)
        for place in same:
            ranks[place] = before + (len(same) + 1) / 2
        before += len(same)
    return ranks


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    middle_first, middle_second = sum(first) / len(first), sum(second) / len(second)
    moments = [(one - middle_first, other - middle_second) for one, other in zip(first, second, strict=True)]
    spread = math.sqrt(sum(one**2 for one, _ in moments) * sum(other**2 for _, other in moments))
    return sum(one * other for one, other in moments) / spread if spread else None


def _auc(scores: Sequence[float], right: Sequence[bool]) -> float | None:
    """How often a right response scores above a wrong one, ties by half."""
    positives = sum(right)
    negatives = len(right) - positives
    if not positives or not negatives:
        return None
    above = sum(rank for rank, one in zip(_ranks(scores), right, strict=True) if one) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _bins(scores: Sequence[float], labels: Sequence[float]) -> list[ScoreBin]:
    found = []
    for number in range(BINS):
        inside = [
            pair for pair in zip(scores, labels, strict=True) if min(BINS - 1, int(pair[0] * BINS + 1e-9)) == number
        ]
        if inside:
            count = len(inside)
            means = sum(score for score, _ in inside) / count, sum(label for _, label in inside) / count
            found.append(ScoreBin(number / BINS, count, *means))
    return found
