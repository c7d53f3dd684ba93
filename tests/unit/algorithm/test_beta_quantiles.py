"""Quantiles of Beta distributions, against scipy's, for weak and strong priors, few samples and millions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import betaincinv

from spo.algorithm.values import beta_quantiles

LEVELS = np.array([0.0005, 0.025, *(np.arange(64) + 0.5) / 64, 0.975, 0.9995])
PARAMETERS = (1e-7, 1e-3, 0.03, 0.5, 1, 1.5, 10, 3e3, 3e6)


@pytest.mark.parametrize("a", PARAMETERS)
@pytest.mark.parametrize("b", PARAMETERS)
def test_they_are_those_of_scipy(a: float, b: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        found = beta_quantiles(a, b, LEVELS)
    ours, theirs = (rates.clip(1e-16, 1 - 1e-16) for rates in (found, betaincinv(a, b, LEVELS)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    # The distance from 1 to as many digits as rates have.
    np.testing.assert_allclose(1 - ours, 1 - theirs, rtol=1e-8, atol=1e-15)
