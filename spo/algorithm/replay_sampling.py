"""Drawing batches from windows of experience: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def exact_counts(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to shares that sum to exactly `total` (largest remainders; ties to the first)."""
    wanted = [share * total for share in shares]
    counts = [math.floor(each + 1e-9) for each in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - wanted[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def draw_ranks(rng: np.random.Generator, window: int, count: int) -> list[int]:
    """Uniform ranks in [0, window): each at most ceil(count / window) times, so none repeats while the window lasts."""
    if window < 1:
        raise ValueError("there is nothing to draw from")
    ranks: list[int] = []
    while len(ranks) < count:
        ranks += rng.permutation(window)[: count - len(ranks)].tolist()
    return ranks
