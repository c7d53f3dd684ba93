"""What samples of pi0 say of a prompt's soft value: a point and an interval, in reward units, for any beta.

Two points. The frequency of a fixed number of samples makes exp(Q / beta) unbiased, as in the paper. Where the data
decided when to stop, no frequency is unbiased any more (a lucky streak ends the sampling); the posterior is
unchanged, since the likelihood does not depend on why sampling ended: sequential estimates are posterior means of Q,
whose squared error is the least. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spo.algorithm.beta_quantiles import beta_quantiles
from spo.algorithm.monte_carlo import (
    SoftValueEstimate,
    q_from_rewards,
    q_of_two_rewards,
    standard_error_from_rewards,
    success_rate_interval,
)
from spo.errors import InvalidInput

BOOTSTRAP_DRAWS = 2000
# Midpoints of equally probable slices of a posterior, over which its mean is taken.
SLICES = (np.arange(64) + 0.5) / 64
SMALLEST = 1e-16


@dataclass(frozen=True)
class BetaPrior:
    """Pseudo successes and failures; Jeffreys' where nothing is known."""

    successes: float = 0.5
    failures: float = 0.5


JEFFREYS = BetaPrior()


@dataclass(frozen=True)
class Evidence:
    """Samples of pi0 on a prompt: successes worth `best`, failures worth `worst`, or `rewards` where there are more.

    With a prior the value is the posterior mean of Q, without one that of the plain frequency.
    """

    samples: int
    successes: int
    rewards: Sequence[float] = ()
    prior: BetaPrior | None = None
    best: float = field(default=0.0, kw_only=True)
    worst: float = field(default=-1.0, kw_only=True)

    @property
    def solved(self) -> bool:
        return self.successes > 0

    @property
    def span(self) -> float:
        """Reward units between failure and success."""
        return self.best - self.worst


def soft_value_estimate(evidence: Evidence, beta: float, level: float = 0.95) -> SoftValueEstimate:
    """Qhat_0 with its equal-tailed credible interval and a standard error, reward units.

    The interval is that of the success rate mapped through the monotone Q(S); it is finite, since Q >= worst however
    small S is. Raises InvalidInput: no samples, impossible counts or rewards, beta not in (0, inf).
    """
    if evidence.rewards:
        return _from_rewards(evidence, beta, level)
    if evidence.samples < 1 or not 0 <= evidence.successes <= evidence.samples:
        raise InvalidInput(f"{evidence.successes} successes of {evidence.samples} samples is impossible")

    if evidence.prior is None:
        return _frequency(evidence, beta, level)
    return _posterior(evidence, evidence.prior, beta, level)


def _frequency(evidence: Evidence, beta: float, level: float) -> SoftValueEstimate:
    """The paper's estimate; the interval is Jeffreys', the standard error that of the delta method."""
    low, high = success_rate_interval(evidence.successes, evidence.samples, level)
    rate = evidence.successes / evidence.samples
    q, low, high = (
        q_of_two_rewards(success_rate, beta, best=evidence.best, worst=evidence.worst)
        for success_rate in (rate, low, high)
    )
    slope = beta * -math.expm1(-evidence.span / beta) * math.exp((evidence.best - q) / beta)  # dQ / dS
    error = slope * math.sqrt(rate * (1 - rate) / evidence.samples)
    return SoftValueEstimate(q=q, low=low, high=high, standard_error=error)


def _posterior(evidence: Evidence, prior: BetaPrior, beta: float, level: float) -> SoftValueEstimate:
    """Mean, deviation and quantiles of Q when S follows the Beta posterior.

    An end that samples cannot exclude is in the interval, whatever the prior: S = 0 where none succeeded, S = 1 where
    none failed (Brown, Cai, DasGupta 2001).
    """
    a = evidence.successes + prior.successes
    b = evidence.samples - evidence.successes + prior.failures
    tail = (1 - level) / 2
    rates = np.clip(beta_quantiles(a, b, [tail, 1 - tail, *SLICES]), SMALLEST, 1 - SMALLEST)
    low, high, *slices = evidence.best + beta * np.logaddexp(np.log(rates), np.log1p(-rates) - evidence.span / beta)
    low = low if evidence.successes else evidence.worst
    high = high if evidence.successes < evidence.samples else evidence.best
    return SoftValueEstimate(
        q=float(np.mean(slices)), low=float(low), high=float(high), standard_error=float(np.std(slices))
    )


def unsolved_posterior(evidence: Evidence) -> Evidence:
    """The same evidence under Jeffreys' prior where it has none: what is kept of a prompt without a success.

    The frequency 0 would put Q at the lowest of all values that the samples allow. Samples that earned more than the
    worst reward do not: half a pseudo sample at the best reward would only lift their value.
    """
    earned = any(reward > evidence.worst for reward in evidence.rewards)
    if evidence.prior is not None or evidence.solved or earned:
        return evidence
    return Evidence(
        evidence.samples, evidence.successes, evidence.rewards, JEFFREYS, best=evidence.best, worst=evidence.worst
    )


def _from_rewards(evidence: Evidence, beta: float, level: float) -> SoftValueEstimate:
    """The Bayesian bootstrap (Rubin 1981); with a prior, half a pseudo sample at the best and at the worst reward.

    For two rewards that is Jeffreys' posterior, so samples that are all alike still have a width.
    """
    # Without a prior the interval still needs the pseudo samples: a bootstrap of equal rewards would have no width.
    wide = np.array([*evidence.rewards, evidence.best, evidence.worst], dtype=np.float64)
    widths = np.array([1.0] * len(evidence.rewards) + [0.5, 0.5])
    draws = np.random.default_rng(len(wide)).dirichlet(widths, size=BOOTSTRAP_DRAWS)
    found = beta * np.log(draws @ np.exp((wide - wide.max()) / beta)) + wide.max()
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    error = standard_error_from_rewards(evidence.rewards, beta) if len(evidence.rewards) > 1 else high - low
    return SoftValueEstimate(
        q=float(found.mean()) if evidence.prior else q_from_rewards(evidence.rewards, beta),
        low=float(low),
        high=float(high),
        standard_error=float(error),
    )
