"""Whether a new version may be served: a paired comparison with the served one on the same problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spo.errors import PreconditionFailed

RESAMPLES = 4000


@dataclass(frozen=True)
class GateComparison:
    """Mean pass@1 of both over `problems`, their difference and its bootstrap interval [low, high]."""

    served: float
    candidate: float
    gain: float
    low: float
    high: float
    problems: int


def compare(
    served: Sequence[Mapping[str, object]], candidate: Sequence[Mapping[str, object]], *, level: float, seed: int
) -> GateComparison:
    """Compare two evaluations' `per_problem` tables; equal inputs and seed give equal intervals.

    Raises PreconditionFailed (code "not_comparable") where they are of different problems.
    """
    rates = [_rates(table) for table in (served, candidate)]
    if not rates[0] or rates[0].keys() != rates[1].keys():
        raise PreconditionFailed("the two evaluations are of different problems", code="not_comparable")
    names = sorted(rates[0])
    before_P, after_P = (np.array([of[name] for name in names]) for of in rates)
    gain_P = after_P - before_P
    rng = np.random.default_rng(seed)
    means = [gain_P[rng.integers(len(gain_P), size=len(gain_P))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return GateComparison(
        served=float(before_P.mean()),
        candidate=float(after_P.mean()),
        gain=float(gain_P.mean()),
        low=float(low),
        high=float(high),
        problems=len(names),
    )


def _rates(table: Sequence[Mapping[str, object]]) -> dict[str, float]:
    return {str(row["prompt_id"]): int(str(row["correct"])) / max(1, int(str(row["samples"]))) for row in table}
