"""pass@k and how sure we are of it (Soft Policy Optimization, Cohen et al. 2025, section 5; Li et al. 2022).

No torch here: the orchestrator evaluates without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spo.errors import InvalidInput


@dataclass(frozen=True)
class ProblemCounts:
    """Of `samples` responses to one problem, `correct` passed every test."""

    samples: int
    correct: int


@dataclass(frozen=True)
class PassAtK:
    """Mean over problems with a bootstrap interval [low, high]."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without replacement, hold a correct one.

    Raises InvalidInput unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise InvalidInput(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(
    problems: Sequence[ProblemCounts], k: int, *, seed: int, level: float = 0.95, resamples: int = 2000
) -> PassAtK:
    """pass@k averaged over problems, with a percentile bootstrap over problems (the problems are the sample).

    Equal inputs and seed give equal intervals. Raises InvalidInput without problems, or as `pass_at_k`.
    """
    if not problems:
        raise InvalidInput("pass@k needs at least one problem")
    score_P = np.array([pass_at_k(problem.samples, problem.correct, k) for problem in problems])
    rng = np.random.default_rng(seed)
    # One resample at a time: thousands of problems by thousands of resamples need not lie in memory together.
    means = [score_P[rng.integers(len(score_P), size=len(score_P))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return PassAtK(mean=float(score_P.mean()), low=float(low), high=float(high))


def distinct_correct(programs: Sequence[str], correct: Sequence[bool]) -> int:
    """How many different programs among the correct ones; the caller normalises their text."""
    return len({program for program, right in zip(programs, correct, strict=True) if right})
