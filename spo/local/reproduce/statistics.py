"""What a handful of seeds and a few dozen problems can tell: means, differences, and how sure we are of them.

The bootstrap draws seeds and problems anew, both with replacement, since both are samples of what they stand for.
Axes: S seed, P problem.
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
    draws = [_resampled_mean(scores, rng, _problems(scores, rng)) for _ in range(RESAMPLES)]
    return _estimate(float(scores.mean()), draws, len(scores))


def difference(left: Scores, right: Scores) -> Estimate:
    """mean(left) - mean(right); both were asked the same problems, which are drawn together."""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(RESAMPLES):
        problems = _problems(left, rng)
        draws.append(_resampled_mean(left, rng, problems) - _resampled_mean(right, rng, problems))
    return _estimate(float(left.mean() - right.mean()), draws, min(len(left), len(right)))


def ratio(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """mean(left) / mean(right) of one number per seed, such as a time."""
    rng = np.random.default_rng(0)
    a, b = np.array(left, dtype=np.float64), np.array(right, dtype=np.float64)
    draws = [float(rng.choice(a, len(a)).mean() / rng.choice(b, len(b)).mean()) for _ in range(RESAMPLES)]
    return _estimate(float(a.mean() / b.mean()), draws, min(len(a), len(b)))


def _problems(scores: Scores, rng: np.random.Generator) -> NDArray[np.int64]:
    drawn: NDArray[np.int64] = rng.integers(scores.shape[1], size=(scores.shape[1],))
    return drawn


def _resampled_mean(scores: Scores, rng: np.random.Generator, problems: NDArray[np.int64]) -> float:
    seeds = rng.integers(len(scores), size=len(scores))
    return float(scores[seeds][:, problems].mean())


def _estimate(mean: float, draws: Sequence[float], seeds: int) -> Estimate:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), seeds)
