"""Pivotal Token Search: where does the chance of success change? (Abdin et al. 2024; Cohen et al. 2025, 3.1.3).

No torch here. The search holds no state: it is a function of the success rates known so far, so it resumes from
whatever was stored. Ask `next_positions`, roll out pi0 from those prefixes, add the rates, until the answer is empty.
Position t is the prefix of the first t response tokens; S_t is the success rate of pi0 from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from spo.errors import InvalidInput


@dataclass(frozen=True)
class PivotalToken:
    """The response token at `index` (from 0) took the success rate from `before` to `after`."""

    index: int
    before: float
    after: float


def next_positions(length: int, rates: Mapping[int, float], *, threshold: float, limit: int) -> tuple[int, ...]:
    """The prefixes to roll out next, most telling first, at most `limit`; empty when the search is over.

    First the ends 0 and `length`; then the midpoint of every interval of neighbouring known positions whose rates
    differ by more than `threshold`, the widest difference first. Raises InvalidInput on rates that cannot be.
    """
    _check(length, rates, threshold)
    ends = tuple(end for end in (0, length) if end not in rates)
    if ends:
        return ends[:limit]
    differing = [
        (abs(rates[right] - rates[left]), left, right)
        for left, right in pairwise(sorted(rates))
        if right - left > 1 and abs(rates[right] - rates[left]) > threshold
    ]
    differing.sort(key=lambda interval: (-interval[0], interval[1]))
    return tuple((left + right) // 2 for _, left, right in differing[:limit])


def pivotal_tokens(rates: Mapping[int, float], *, threshold: float) -> tuple[PivotalToken, ...]:
    """The single tokens between neighbouring known positions that moved the rate by more than `threshold`, in order."""
    return tuple(
        PivotalToken(left, rates[left], rates[right])
        for left, right in pairwise(sorted(rates))
        if right - left == 1 and abs(rates[right] - rates[left]) > threshold
    )


def _check(length: int, rates: Mapping[int, float], threshold: float) -> None:
    if length < 1:
        raise InvalidInput(f"a response of {length} tokens holds no pivotal token")
    if not 0 <= threshold <= 1:
        raise InvalidInput(f"a threshold on success rates must be in [0, 1], not {threshold}")
    for position, rate in rates.items():
        if not 0 <= position <= length or not 0 <= rate <= 1:
            raise InvalidInput(f"success rate {rate} at position {position} of {length} is impossible")
