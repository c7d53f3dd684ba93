"""What samples of pi0 say of a prompt's soft value: a point and an interval, in reward units, for any beta.

Two points. The frequency of a fixed number of samples makes exp(Q / beta) unbiased, as in the paper. Where the data
decided when to stop, no frequency is unbiased any more (a lucky streak ends the sampling); the posterior is what it
was, since the likelihood does not know why sampling ended: sequential estimates are posterior means of exp(Q / beta).
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import betaincinv

from spo.algorithm.monte_carlo import (
    SoftValueEstimate,
    q_from_rewards,
    q_of_two_rewards,
    standard_error_from_rewards,
    success_rate_interval,
)
from spo.algorithm.value_prior import JEFFREYS, BetaPrior
from spo.errors import InvalidInput

BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Evidence:
    """Samples of pi0 on a prompt: successes worth `best`, failures worth `worst`, or `rewards` where there are more.

    With a prior the value is a posterior mean, without one the plain frequency.
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


def soft_value_estimate(evidence: Evidence, beta: float, level: float = 0.95) -> SoftValueEstimate:
    """Qhat_0 with its equal-tailed credible interval and a standard error, reward units.

    The interval is that of the success rate mapped through the monotone Q(S); it is finite, since Q >= worst however
    small S is. Raises InvalidInput: no samples, impossible counts or rewards, beta not in (0, inf).
    """
    if evidence.rewards:
        return _from_rewards(evidence, beta, level)
    if evidence.samples < 1 or not 0 <= evidence.successes <= evidence.samples:
        raise InvalidInput(f"{evidence.successes} successes of {evidence.samples} samples is impossible")

    def q_at(rate: float) -> float:
        return q_of_two_rewards(rate, beta, best=evidence.best, worst=evidence.worst)

    failures = evidence.samples - evidence.successes
    if evidence.prior is None:
        low, high = success_rate_interval(evidence.successes, evidence.samples, level)
        rate = evidence.successes / evidence.samples
        variance = rate * (1 - rate) / evidence.samples
    else:
        a, b = evidence.successes + evidence.prior.successes, failures + evidence.prior.failures
        tail = (1 - level) / 2
        low, high = float(betaincinv(a, b, tail)), float(betaincinv(a, b, 1 - tail))
        rate = a / (a + b)
        variance = rate * (1 - rate) / (a + b + 1)
    q, span = q_at(rate), evidence.best - evidence.worst
    slope = beta * -math.expm1(-span / beta) * math.exp((evidence.best - q) / beta)  # dQ / dS
    return SoftValueEstimate(q=q, low=q_at(low), high=q_at(high), standard_error=slope * math.sqrt(variance))


def unsolved_posterior(evidence: Evidence) -> Evidence:
    """The same evidence under Jeffreys' prior where it has none: what is kept of a prompt without a success.

    The frequency 0 would put Q at the lowest of all values that the samples allow.
    """
    if evidence.prior is not None or evidence.solved:
        return evidence
    return Evidence(
        evidence.samples, evidence.successes, evidence.rewards, JEFFREYS, best=evidence.best, worst=evidence.worst
    )


def _from_rewards(evidence: Evidence, beta: float, level: float) -> SoftValueEstimate:
    """The Bayesian bootstrap (Rubin 1981); with a prior, half a pseudo sample at the best and at the worst reward.

    For two rewards that is Jeffreys' posterior, so samples that are all alike still have a width.
    """
    pseudo = [evidence.best, evidence.worst] if evidence.prior else []
    rewards = np.array([*evidence.rewards, *pseudo], dtype=np.float64)
    shares = np.array([1.0] * len(evidence.rewards) + [0.5] * len(pseudo))
    point = float(beta * np.log(np.average(np.exp((rewards - rewards.max()) / beta), weights=shares)) + rewards.max())
    # Without a prior the interval still needs the pseudo samples: a bootstrap of equal rewards would have no width.
    wide = np.array([*evidence.rewards, evidence.best, evidence.worst], dtype=np.float64)
    widths = np.array([1.0] * len(evidence.rewards) + [0.5, 0.5])
    draws = np.random.default_rng(len(wide)).dirichlet(widths, size=BOOTSTRAP_DRAWS)
    means = draws @ np.exp((wide - wide.max()) / beta)
    low, high = beta * np.log(np.quantile(means, [(1 - level) / 2, (1 + level) / 2])) + wide.max()
    error = standard_error_from_rewards(evidence.rewards, beta) if len(evidence.rewards) > 1 else high - low
    return SoftValueEstimate(
        q=point if evidence.prior else q_from_rewards(evidence.rewards, beta),
        low=float(low),
        high=float(high),
        standard_error=float(error),
    )
