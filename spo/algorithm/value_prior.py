"""What the other prompts tell about a prompt: a Beta prior of its success rate, fitted over the task set.

Empirical Bayes: the successes c of n samples of a prompt follow a Beta-binomial whose mean depends on features of the
prompt by a logistic regression, and whose strength (pseudo samples) is common to all. Features that tell nothing get no
weight, and prompts that have little in common get a weak prior; with few prompts known it stays near Jeffreys'.
No torch here. Axes: P prompt, F feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import betaln, expit, psi

from spo.errors import InvalidInput

Array = NDArray[np.float64]

# Priors of the fit: the strength is log-normal about 1 pseudo sample (Jeffreys' strength), standardised weights are
# normal. Both are weak: some tens of prompts overrule them.
LOG_STRENGTH_DEVIATION = 2.0
WEIGHT_DEVIATION = 1.0
INTERCEPT_DEVIATION = 5.0
STRONGEST = 1e4


@dataclass(frozen=True)
class BetaPrior:
    """Pseudo successes and failures; Jeffreys' where nothing is known."""

    successes: float = 0.5
    failures: float = 0.5


JEFFREYS = BetaPrior()


@dataclass(frozen=True)
class PriorModel:
    """A fitted model; apply it to a prompt's features by `prior_of`."""

    centre_F: Array
    scale_F: Array
    weights_F: Array
    intercept: float
    strength: float

    def prior_of(self, features: Sequence[float]) -> BetaPrior:
        """The prior of a prompt with these features."""
        standardised_F = (np.asarray(features, dtype=np.float64) - self.centre_F) / self.scale_F
        rate = float(expit(self.intercept + standardised_F @ self.weights_F))
        return BetaPrior(self.strength * rate, self.strength * (1 - rate))


def fit_prior(successes: Sequence[int], samples: Sequence[int], features: Sequence[Sequence[float]]) -> PriorModel:
    """The most probable model given each prompt's counts and features. Raises InvalidInput on shapes or counts."""
    successes_P, samples_P = np.asarray(successes, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    features_PF = np.asarray(features, dtype=np.float64).reshape(len(successes_P), -1)
    if samples_P.shape != successes_P.shape or (successes_P < 0).any() or (successes_P > samples_P).any():
        raise InvalidInput("a prior is fitted to successes of samples, prompt by prompt")
    if not np.isfinite(features_PF).all():
        raise InvalidInput("the features of a prompt must be finite")
    centre_F, scale_F = features_PF.mean(axis=0), features_PF.std(axis=0) + 1e-9
    design_PF = (features_PF - centre_F) / scale_F
    start = np.zeros(features_PF.shape[1] + 2)
    start[-2] = np.log((successes_P.sum() + 0.5) / (samples_P.sum() - successes_P.sum() + 0.5))
    found = minimize(
        _loss,
        start,
        args=(design_PF, successes_P, samples_P),
        jac=True,
        method="L-BFGS-B",
        bounds=[(None, None)] * (len(start) - 1) + [(np.log(1e-3), np.log(STRONGEST))],
    )
    return PriorModel(centre_F, scale_F, found.x[:-2], float(found.x[-2]), float(np.exp(found.x[-1])))


def _loss(x: Array, design_PF: Array, successes_P: Array, samples_P: Array) -> tuple[float, Array]:
    """Minus the log posterior of (weights, intercept, log strength), and its gradient."""
    weights_F, intercept, log_strength = x[:-2], x[-2], x[-1]
    strength = np.exp(log_strength)
    rate_P = np.clip(expit(design_PF @ weights_F + intercept), 1e-9, 1 - 1e-9)
    a_P, b_P = strength * rate_P, strength * (1 - rate_P)
    failures_P = samples_P - successes_P
    loss = -(betaln(successes_P + a_P, failures_P + b_P) - betaln(a_P, b_P)).sum()
    both_P = psi(strength) - psi(samples_P + strength)
    slope_a_P = psi(successes_P + a_P) - psi(a_P) + both_P
    slope_b_P = psi(failures_P + b_P) - psi(b_P) + both_P
    slope_eta_P = (slope_a_P - slope_b_P) * strength * rate_P * (1 - rate_P)
    slope_log_strength = (slope_a_P * a_P + slope_b_P * b_P).sum()
    deviations = np.concatenate(
        [np.full(len(weights_F), WEIGHT_DEVIATION), [INTERCEPT_DEVIATION, LOG_STRENGTH_DEVIATION]]
    )
    gradient = -np.concatenate([design_PF.T @ slope_eta_P, [slope_eta_P.sum()], [slope_log_strength]])
    return float(loss + 0.5 * ((x / deviations) ** 2).sum()), gradient + x / deviations**2
