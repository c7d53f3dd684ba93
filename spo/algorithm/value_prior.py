"""What the other prompts tell about a prompt: a Beta prior of its success rate, fitted over the task set.

Empirical Bayes: the successes c of n samples of a prompt follow a Beta-binomial whose mean depends on the prompt's
features by a logistic regression, and whose strength (pseudo samples) is common to all but for a factor: a rare success
is predicted less well in absolute terms and better in relative ones, so the strength goes with 1 / sqrt(rate). Features
that tell nothing get little weight, prompts that have little in common get a weak prior. Only value-estimation fits
one, and only the engines' images have scipy. Axes: P prompt, F feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import betaln, expit, psi

from spo.algorithm.values import BetaPrior
from spo.errors import InvalidInput

Array = NDArray[np.float64]

# Standard deviations of the weights' normal priors: a likelihood is believed at once, a word only when many prompts
# speak for it. The strength is log-normal about one pseudo sample, Jeffreys' strength.
LIKELIHOOD_DEVIATION, WORD_DEVIATION, INTERCEPT_DEVIATION, LOG_STRENGTH_DEVIATION = 1.0, 0.1, 5.0, 2.0
LOG_STRENGTH_BOUNDS = (-7.0, 9.0)
SMALLEST_RATE = 1e-7
# The rate at which `strength` is meant.
ORDINARY_RATE = 0.05
FOLDS = 10
# Words are folded into so many; a collision only blurs.
WORD_BUCKETS = 256


@dataclass(frozen=True)
class PromptFeatures:
    """What is known of a prompt before any sample.

    `solution_logprobs` are ln pi0 of whole programs known to be right, nats: where pi0 likes them, it will write such
    programs itself. `words` are the statement's token ids.
    """

    solution_logprobs: tuple[float, ...] = ()
    words: tuple[int, ...] = ()

    def row(self) -> Array:
        """One row of the design: three likelihood columns, then one column per bucket of words."""
        logprobs = self.solution_logprobs
        likelihood = [1.0, max(logprobs), sum(logprobs) / len(logprobs)] if logprobs else [0.0, 0.0, 0.0]
        present = np.zeros(WORD_BUCKETS)
        present[[word % WORD_BUCKETS for word in self.words]] = 1.0
        return np.concatenate([likelihood, present])


@dataclass(frozen=True)
class RateModel:
    """A logistic regression on standardised features."""

    centre_F: Array
    scale_F: Array
    weights_F: Array
    intercept: float

    def rate(self, features_F: Array) -> float:
        """The success rate expected of a prompt."""
        return float(expit(self.intercept + ((features_F - self.centre_F) / self.scale_F) @ self.weights_F))


@dataclass(frozen=True)
class PriorModel:
    """One regression per fold, fitted to the other folds, and the strength that their predictions deserve.

    strength: pseudo samples of a prompt of ordinary rate.
    """

    rates: tuple[RateModel, ...]
    strength: float

    def prior_of(self, prompt_id: str, features: PromptFeatures) -> BetaPrior:
        """The prior of a prompt; its own samples have no part in it."""
        rate = min(max(self.rates[fold_of(prompt_id)].rate(features.row()), SMALLEST_RATE), 1 - SMALLEST_RATE)
        strength = self.strength * math.sqrt(ORDINARY_RATE / rate)
        return BetaPrior(strength * rate, strength * (1 - rate))


def fold_of(prompt_id: str) -> int:
    """The fold of a prompt, the same in every process."""
    return crc32(prompt_id.encode()) % FOLDS


def fit_prior(
    prompt_ids: Sequence[str], successes: Sequence[int], samples: Sequence[int], features: Sequence[PromptFeatures]
) -> PriorModel:
    """Fit the prior of each fold to the prompts of the others. Raises InvalidInput on impossible counts.

    Cross-fitting keeps a prompt's samples from being counted in its prior and again in its posterior, and the strength,
    found on predictions of prompts that a regression has not seen, honest.
    """
    successes_P, samples_P = np.asarray(successes, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    if not len(prompt_ids) == len(successes_P) == len(samples_P) == len(features) > 0:
        raise InvalidInput("a prior is fitted to one or more prompts, each with its counts and features")
    if (successes_P < 0).any() or (successes_P > samples_P).any():
        raise InvalidInput("a prior is fitted to successes of samples")
    features_PF = np.stack([found.row() for found in features])
    folds_P = np.array([fold_of(prompt_id) for prompt_id in prompt_ids])
    rates = [
        _fit(features_PF[kept], successes_P[kept], samples_P[kept]) for kept in (folds_P != f for f in range(FOLDS))
    ]
    predicted_P = np.array([rates[fold].rate(row_F) for fold, row_F in zip(folds_P, features_PF, strict=True)])
    predicted_P = predicted_P.clip(SMALLEST_RATE, 1 - SMALLEST_RATE)

    def loss(log_strength: float) -> float:
        strength_P = np.exp(log_strength) * np.sqrt(ORDINARY_RATE / predicted_P)
        likelihood = _log_likelihood(strength_P * predicted_P, strength_P * (1 - predicted_P), successes_P, samples_P)
        return float(0.5 * (log_strength / LOG_STRENGTH_DEVIATION) ** 2 - likelihood.sum())

    found = minimize_scalar(loss, bounds=LOG_STRENGTH_BOUNDS, method="bounded")
    return PriorModel(tuple(rates), float(np.exp(found.x)))


def _fit(features_PF: Array, successes_P: Array, samples_P: Array) -> RateModel:
    """The most probable regression under the Beta-binomial, weights and strength together."""
    count = features_PF.shape[1]
    if not len(features_PF):
        return RateModel(np.zeros(count), np.ones(count), np.zeros(count), 0.0)
    centre_F, scale_F = features_PF.mean(axis=0), features_PF.std(axis=0)
    # A column that is the same for all prompts says nothing, about unseen prompts either.
    varies_F = scale_F > 1e-6
    scale_F[~varies_F] = 1.0
    design_PF = (features_PF[:, varies_F] - centre_F[varies_F]) / scale_F[varies_F]
    deviations_F = np.full(count, WORD_DEVIATION)
    deviations_F[: count - WORD_BUCKETS] = LIKELIHOOD_DEVIATION
    deviations = np.concatenate([deviations_F[varies_F], [INTERCEPT_DEVIATION, LOG_STRENGTH_DEVIATION]])
    start = np.zeros(len(deviations))
    start[-2] = np.log((successes_P.sum() + 0.5) / ((samples_P - successes_P).sum() + 0.5))
    found = minimize(
        _loss,
        start,
        args=(design_PF, successes_P, samples_P, deviations),
        jac=True,
        method="L-BFGS-B",
        bounds=[(None, None)] * (len(start) - 1) + [LOG_STRENGTH_BOUNDS],
    )
    weights_F = np.zeros(count)
    weights_F[varies_F] = found.x[:-2]
    return RateModel(centre_F, scale_F, weights_F, float(found.x[-2]))


def _log_likelihood(a_P: Array, b_P: Array, successes_P: Array, samples_P: Array) -> Array:
    """ln of the Beta-binomial, without the binomial coefficient."""
    found_P: Array = betaln(successes_P + a_P, samples_P - successes_P + b_P) - betaln(a_P, b_P)
    return found_P


def _loss(x: Array, design_PF: Array, successes_P: Array, samples_P: Array, deviations: Array) -> tuple[float, Array]:
    """Minus the log posterior of (weights, intercept, log strength), and its gradient."""
    strength = np.exp(x[-1])
    rate_P = np.clip(expit(design_PF @ x[:-2] + x[-2]), SMALLEST_RATE, 1 - SMALLEST_RATE)
    a_P, b_P = strength * rate_P, strength * (1 - rate_P)
    failures_P = samples_P - successes_P
    loss = 0.5 * ((x / deviations) ** 2).sum() - _log_likelihood(a_P, b_P, successes_P, samples_P).sum()
    both_P = psi(strength) - psi(samples_P + strength)
    slope_a_P = psi(successes_P + a_P) - psi(a_P) + both_P
    slope_b_P = psi(failures_P + b_P) - psi(b_P) + both_P
    slope_logit_P = (slope_a_P - slope_b_P) * strength * rate_P * (1 - rate_P)
    slope_log_strength = (slope_a_P * a_P + slope_b_P * b_P).sum()
    slopes = np.concatenate([design_PF.T @ slope_logit_P, [slope_logit_P.sum()], [slope_log_strength]])
    return float(loss), x / deviations**2 - slopes
