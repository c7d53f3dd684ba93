"""Does Q_t predict what it stands for, the success of pi0 going on from a prefix? Reliability by bin, ECE, Brier score.

No torch here. A prediction is of a prefix, an outcome of one continuation by pi0: Q_t is about pi0, so continuations of
the trained policy would measure something else. Axes: N outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spo.algorithm.monte_carlo import success_rate_interval
from spo.errors import InvalidInput


@dataclass(frozen=True)
class Bin:
    """Outcomes with similar predictions: the mean prediction, and the share that succeeded with its 95 % interval."""

    predicted: float
    observed: float
    outcomes: int
    low: float
    high: float


@dataclass(frozen=True)
class CalibrationCurve:
    """`expected_error`: mean over outcomes of |predicted - observed| by bin; `brier`: of (prediction - outcome)^2."""

    bins: tuple[Bin, ...]
    expected_error: float
    brier: float


def success_probability(q: float, beta: float, *, best: float = 0.0, worst: float = -1.0) -> float:
    """The success rate S with Q(S) = q, in [0, 1]: (e^{q/beta} - e^{worst/beta}) / (e^{best/beta} - e^{worst/beta}).

    Reward units. A Q outside [worst, best] stands for no success rate and is taken for the nearer end.
    """
    if not 0 < beta < float("inf") or not worst < best:
        raise InvalidInput(
            f"beta must be positive and a success worth more than a failure, not {beta}, {best}, {worst}"
        )
    clipped = min(max(q, worst), best)
    # Over e^{best/beta}, so that nothing overflows.
    floor = np.exp((worst - best) / beta)
    return float((np.exp((clipped - best) / beta) - floor) / (1 - floor))


def calibration(predictions: Sequence[float], outcomes: Sequence[bool], bins: int = 10) -> CalibrationCurve:
    """Compare predicted probabilities with outcomes in `bins` bins of equal count, ties kept together.

    Raises InvalidInput: no outcomes, other lengths, predictions outside [0, 1], or fewer than one bin.
    """
    predicted_N, outcome_N = np.asarray(predictions, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    if not len(predicted_N) == len(outcome_N) > 0 or bins < 1:
        raise InvalidInput("calibration compares one or more predictions with as many outcomes, in one or more bins")
    if not ((predicted_N >= 0) & (predicted_N <= 1)).all():
        raise InvalidInput("a predicted probability must be in [0, 1]")
    # By rank of the prediction, so that equal predictions never part.
    edges = np.quantile(predicted_N, np.arange(1, bins) / bins, method="inverted_cdf")
    bin_N = np.searchsorted(np.unique(edges), predicted_N, side="left")
    curve = [_bin(predicted_N[bin_N == number], outcome_N[bin_N == number]) for number in np.unique(bin_N)]
    error = sum(found.outcomes * abs(found.predicted - found.observed) for found in curve) / len(outcome_N)
    return CalibrationCurve(tuple(curve), float(error), float(((predicted_N - outcome_N) ** 2).mean()))


def _bin(predicted_N: np.ndarray, outcome_N: np.ndarray) -> Bin:
    low, high = success_rate_interval(int(outcome_N.sum()), len(outcome_N))
    return Bin(float(predicted_N.mean()), float(outcome_N.mean()), len(outcome_N), low, high)
