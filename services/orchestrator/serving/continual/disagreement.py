"""Which sources of feedback a round's job could not agree with: their rewards are far from what it learned from all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

PREFIX = "residual_abs/"
# In reward units, of which 1 lies between right and wrong. Seen so far: honest sources up to .035 beside the others,
# one that always says the opposite .075 and .114, with half of its feedback from when it was honest.
LEAST_EXCESS = 0.05
LEAST_ERRORS = 3.0
LEAST_STEPS = 5


@dataclass(frozen=True)
class SourceResidual:
    """A source's mean |Q_T - r| over the steps, reward units, and how much that is above the median of the others.

    excess_error: the standard error of the excess over steps; batches share trajectories, so it is a lower bound.
    suspect: the excess is above LEAST_EXCESS and LEAST_ERRORS standard errors.
    """

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


def source_residuals(columns: Mapping[str, Sequence[float | None]]) -> list[SourceResidual]:
    """From the curves of a job by name; worst first, [] where fewer than two sources were met."""
    curves = {name.removeprefix(PREFIX): values for name, values in columns.items() if name.startswith(PREFIX)}
    found = [_of(source, values, curves) for source, values in curves.items()] if len(curves) > 1 else []
    return sorted((each for each in found if each is not None), key=lambda each: (-each.excess, each.source))


def suspects_in_words(found: Sequence[SourceResidual]) -> str:
    """The suspects with their figures, "" where there is none."""
    bad = [each for each in found if each.suspect]
    told = (f"{each.source} (|Q - r| {each.residual:.2f}, {each.excess:+.2f} beside the others)" for each in bad)
    return f"feedback that disagrees with the rest: {', '.join(told)}" if bad else ""


def _of(
    source: str, values: Sequence[float | None], curves: Mapping[str, Sequence[float | None]]
) -> SourceResidual | None:
    others = [curve for name, curve in curves.items() if name != source]
    excesses, residuals = [], []
    for step, value in enumerate(values):
        beside = [known for curve in others if (known := curve[step]) is not None]
        if value is not None and beside:
            residuals.append(value)
            excesses.append(value - median(beside))
    if len(excesses) < LEAST_STEPS:
        return None
    excess, error = fmean(excesses), stdev(excesses) / math.sqrt(len(excesses))
    suspect = excess > max(LEAST_EXCESS, LEAST_ERRORS * error)
    return SourceResidual(source, fmean(residuals), excess, error, suspect)
