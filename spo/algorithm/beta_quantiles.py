"""Quantiles of a Beta distribution by numpy alone: the services that read values start without scipy.

On the log odds the density is smooth and has one hump. It is integrated over cells that are narrow about the hump and
wide in the tails (Gauss-Legendre), and a quantile is found within its cell by Newton's method. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Log odds of 1e-16, the smallest rate that can be told from 0 and whose complement from 1.
EDGE = 37.0
CELLS = 128
NEWTON_STEPS = 4
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
# From [-1, 1] to [0, 1].
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2


def beta_quantiles(a: float, b: float, levels: Sequence[float] | Array) -> Array:
    """The quantiles of Beta(a, b) at `levels` in (0, 1), for a, b > 0; those beyond 1e-16 and 1 - 1e-16 are these."""
    centre = min(max(math.log(a / b), -EDGE), EDGE)
    peak = a * centre - (a + b) * np.logaddexp(0, centre)

    def density(odds: Array) -> Array:
        found: Array = np.exp(a * odds - (a + b) * np.logaddexp(0, odds) - peak)
        return found

    def mass(low_N: Array, high_N: Array) -> Array:
        width_N = high_N - low_N
        found: Array = density(low_N[:, None] + width_N[:, None] * _NODES) @ _WEIGHTS * width_N
        return found

    scale = min(1.0, math.sqrt(1 / a + 1 / b))
    first, last = (math.asinh((end - centre) / scale) for end in (-EDGE, EDGE))
    edges = centre + scale * np.sinh(np.linspace(first, last, CELLS + 1))
    # Beyond the edges the density is exponential.
    lower, upper = density(np.array([-EDGE, EDGE])) / (a, b)
    below = lower + np.concatenate([[0.0], np.cumsum(mass(edges[:-1], edges[1:]))])
    wanted_N = np.asarray(levels) * (below[-1] + upper)
    cells_N = np.clip(np.searchsorted(below, wanted_N) - 1, 0, CELLS - 1)
    low_N, high_N = edges[cells_N], edges[cells_N + 1]
    odds_N = (low_N + high_N) / 2
    for _ in range(NEWTON_STEPS):
        excess_N = below[cells_N] + mass(low_N, odds_N) - wanted_N
        odds_N = np.clip(odds_N - excess_N / density(odds_N), low_N, high_N)
    rates_N: Array = 1 / (1 + np.exp(-odds_N))
    return rates_N
