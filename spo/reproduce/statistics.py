"""What a handful of seeds and a few dozen problems can tell: means, differences, and how sure we are of them.

The bootstrap draws seeds and problems anew, both with replacement, since both are samples of what they stand for.
Axes: R resample, S seed, P problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spo.algorithm.pass_at_k import pass_at_k

RESAMPLES = 2000
LEVEL = 0.95
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean or a difference of means with its interval; `seeds` is the smaller number of seeds behind it."""

    mean: float
    low: float
    high: float
    seeds: int


def score_table(correct: Sequence[Sequence[int]], samples: Sequence[Sequence[int]], k: int) -> Scores:
    """pass@k of each problem under each seed's policy; (S, P)."""
    return np.array(
        [
            [pass_at_k(n, c, k) for c, n in zip(row, many, strict=True)]
            for row, many in zip(correct, samples, strict=True)
        ]
    )


def mean_score(scores: Scores) -> Estimate:
    """The mean over seeds and problems."""
    rng = np.random.default_rng(0)
    return _estimate(float(scores.mean()), _means(scores, rng, _weights(rng, scores.shape[1])), len(scores))


def difference(left: Scores, right: Scores) -> Estimate:
    """mean(left) - mean(right); both were asked the same problems, which are drawn together."""
    rng = np.random.default_rng(0)
    problems_RP = _weights(rng, left.shape[1])
    draws_R = _means(left, rng, problems_RP) - _means(right, rng, problems_RP)
    return _estimate(float(left.mean() - right.mean()), draws_R, min(len(left), len(right)))


def ratio(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """mean(left) / mean(right) of one number per seed, such as a time."""
    rng = np.random.default_rng(0)
    a, b = np.array(left, dtype=np.float64), np.array(right, dtype=np.float64)
    draws = (_weights(rng, len(a)) @ a) / (_weights(rng, len(b)) @ b)
    return _estimate(float(a.mean() / b.mean()), draws, min(len(a), len(b)))


def _weights(rng: np.random.Generator, count: int) -> Scores:
    """How much each of `count` members weighs in each resample; (R, count)."""
    drawn: Scores = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    return drawn


def _means(scores: Scores, rng: np.random.Generator, problems_RP: Scores) -> Scores:
    means: Scores = np.einsum("rs,sp,rp->r", _weights(rng, len(scores)), scores, problems_RP, optimize=True)
    return means


def _estimate(mean: float, draws: Scores, seeds: int) -> Estimate:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), seeds)
