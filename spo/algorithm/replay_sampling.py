"""Drawing batches from windows of experience: numbers in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def exact_counts(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to shares that sum to exactly `total` (largest remainders; ties to the first)."""
    wanted = [share * total for share in shares]
    counts = [math.floor(share + 1e-9) for share in wanted]
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
        ranks += rng.choice(window, size=min(window, count - len(ranks)), replace=False).tolist()
    return ranks


def draw_weighted(rng: np.random.Generator, weights: Sequence[float], count: int) -> list[int]:
    """Ranks drawn in proportion to the weights (>= 0) of those that are left; none repeats while any is left.

    A weight of 0 counts as a millionth of the largest, so that such a rank comes last and not never. Gumbel-top-k: the
    order of log w + Gumbel noise is that of draws without replacement (Efraimidis & Spirakis 2006; Vieira 2014).
    """
    if not weights:
        raise ValueError("there is nothing to draw from")
    weight_N = np.asarray(weights, dtype=np.float64)
    largest = float(weight_N.max())
    log_weight_N = np.log(np.maximum(weight_N, 1e-6 * largest)) if largest > 0 else np.zeros(len(weights))
    ranks: list[int] = []
    while len(ranks) < count:
        order_N = np.argsort(-(log_weight_N + rng.gumbel(size=len(weights))), kind="stable")
        ranks += order_N[: count - len(ranks)].tolist()
    return ranks


def draw_balanced(rng: np.random.Generator, keys: Sequence[Hashable], count: int) -> list[int]:
    """Ranks such that every key is drawn equally often while it has ranks left; none repeats while any is left.

    In every round each key gives one of its ranks at random; the order of keys is drawn anew for the round.
    """
    if not keys:
        raise ValueError("there is nothing to draw from")
    ranks: list[int] = []
    while len(ranks) < count:
        given: Counter[Hashable] = Counter()
        turns: list[tuple[int, float, int]] = []
        luck_N = rng.random(len(keys))
        for rank in rng.permutation(len(keys)).tolist():
            turns.append((given[keys[rank]], float(luck_N[rank]), rank))
            given[keys[rank]] += 1
        ranks += [rank for _, _, rank in sorted(turns)[: count - len(ranks)]]
    return ranks


def value_spread(success_rate: float) -> float:
    """sqrt(p (1 - p)), the standard deviation of a prompt's outcome: 0 where every sample ends alike, at most 1/2."""
    return math.sqrt(max(0.0, success_rate * (1 - success_rate)))


def aged_priority(advantages: Sequence[float], age: int, half_life: float) -> float:
    """Mean |advantage| of what is drawn together, halved with every half_life weight versions of age.

    Without the decay old surprises crowd out what the present policy does (prioritised replay alone is known to hurt).
    """
    return math.fsum(map(abs, advantages)) / len(advantages) * math.pow(0.5, max(0, age) / half_life)


def age_weights(ages: Sequence[int], half_life: float) -> list[float]:
    """Weights of what is sampled, halved with every half_life weight versions of age."""
    return [math.pow(0.5, max(0, age) / half_life) for age in ages]


def draw_pairs(rng: np.random.Generator, keys: Sequence[Hashable], correct: Sequence[bool], count: int) -> list[int]:
    """Ranks of `count` pairs, the correct one first, both of one key; no rank repeats while any of its side is left.

    Keys take turns in an order drawn for each round; within a key the pairs of a round are drawn at random.
    """
    sides: dict[Hashable, tuple[list[int], list[int]]] = {}
    for rank, (key, right) in enumerate(zip(keys, correct, strict=True)):
        sides.setdefault(key, ([], []))[0 if right else 1].append(rank)
    paired = [found for found in sides.values() if all(found)]
    if not paired:
        raise ValueError("there is nothing to draw from")
    ranks: list[int] = []
    rounds: list[list[list[int]]] = [[[], []] for _ in paired]
    while len(ranks) < 2 * count:
        for index in rng.permutation(len(paired)).tolist():
            for side, left in zip(paired[index], rounds[index], strict=True):
                if not left:
                    left.extend(side[place] for place in rng.permutation(len(side)).tolist())
                ranks.append(left.pop())
    return ranks[: 2 * count]
