"""Monte-Carlo estimates of the soft value Q from samples of pi0 (Soft Policy Optimization, Cohen et al. 2025, 3.1.3).

No torch here: the orchestrator, the replay buffer and value-estimation read values without it. Units: beta, rewards and
Q in reward units. Binary rewards are 0 (success) and -1 (failure).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spo.algorithm.beta_quantiles import beta_quantiles
from spo.errors import InvalidInput


@dataclass(frozen=True)
class SoftValueEstimate:
    """Qhat with a credible interval [low, high] and the delta-method standard error, all in reward units."""

    q: float
    low: float
    high: float
    standard_error: float


def q_from_success_rate(success_rate: float, beta: float) -> float:
    """beta ln(S + (1 - S) exp(-1 / beta)), between -1 and 0, without forming exp(-1 / beta).

    Raises InvalidInput when S is not in [0, 1] or beta not in (0, inf).
    """
    _check_beta(beta)
    if not 0 <= success_rate <= 1:
        raise InvalidInput(f"a success rate must be in [0, 1], not {success_rate}")
    if success_rate == 0:
        return -1.0
    if success_rate == 1:
        return 0.0
    return float(beta * np.logaddexp(math.log(success_rate), math.log1p(-success_rate) - 1 / beta))


def q_of_two_rewards(success_rate: float, beta: float, *, best: float, worst: float) -> float:
    """As `q_from_success_rate` where a success is worth `best` and a failure `worst` < best, both finite.

    Raises as `q_from_success_rate`, and InvalidInput unless worst < best.
    """
    span = best - worst
    if not 0 < span < math.inf:
        raise InvalidInput(f"a success must be worth more than a failure, not {best} and {worst}")
    return best + span * q_from_success_rate(success_rate, beta / span)


def q_from_successes(successes: int, samples: int, beta: float) -> float:
    """Qhat from `successes` of `samples` rollouts of pi0, reward units. Raises InvalidInput on impossible counts."""
    _check_counts(successes, samples)
    return q_from_success_rate(successes / samples, beta)


def q_from_rewards(rewards: Sequence[float], beta: float) -> float:
    """beta ln mean exp(r_i / beta) by log-sum-exp, reward units. Raises InvalidInput: none, or non-finite rewards."""
    log_weights_N = _log_weights(rewards, beta)
    return float(beta * (np.logaddexp.reduce(log_weights_N) - math.log(len(rewards))))


def success_rate_interval(successes: int, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Equal-tailed Jeffreys interval of the success rate: quantiles of Beta(c + 1/2, n - c + 1/2).

    The end that the data cannot exclude is 0 when nothing passed and 1 when everything did (Brown, Cai, DasGupta 2001).
    Raises InvalidInput on impossible counts or a level outside (0, 1).
    """
    _check_counts(successes, samples)
    if not 0 < level < 1:
        raise InvalidInput(f"a level must be in (0, 1), not {level}")
    tail = (1 - level) / 2
    low, high = beta_quantiles(successes + 0.5, samples - successes + 0.5, [tail, 1 - tail])
    return float(low) if successes else 0.0, float(high) if successes < samples else 1.0


def estimate_from_successes(successes: int, samples: int, beta: float, level: float = 0.95) -> SoftValueEstimate:
    """Qhat from binary rewards; the interval is the success rate's, mapped through the monotone q_from_success_rate.

    The standard error is 0 at 0 or all successes, where the interval is the only honest statement.
    """
    low, high = success_rate_interval(successes, samples, level)
    q = q_from_successes(successes, samples, beta)
    rate = successes / samples
    slope = beta * -math.expm1(-1 / beta) * math.exp(-q / beta)  # dQ / dS
    return SoftValueEstimate(
        q=q,
        low=q_from_success_rate(low, beta),
        high=q_from_success_rate(high, beta),
        standard_error=slope * math.sqrt(rate * (1 - rate) / samples) if 0 < rate < 1 else 0.0,
    )


def standard_error_from_rewards(rewards: Sequence[float], beta: float) -> float:
    """Delta-method standard error of `q_from_rewards`, reward units.

    beta * sd(w) / (mean(w) sqrt(N)) with w = exp(r / beta). Raises InvalidInput below two rewards.
    """
    if len(rewards) < 2:
        raise InvalidInput("a standard error needs at least two rewards")
    log_weights_N = _log_weights(rewards, beta)
    weights_N = np.exp(log_weights_N - log_weights_N.max())
    return float(beta * weights_N.std(ddof=1) / (weights_N.mean() * math.sqrt(len(rewards))))


def _log_weights(rewards: Sequence[float], beta: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _check_beta(beta)
    rewards_N = np.array(rewards, dtype=np.float64)
    if rewards_N.size == 0 or not np.isfinite(rewards_N).all():
        raise InvalidInput("a soft value needs one or more rewards, all finite")
    log_weights_N: np.ndarray[tuple[int], np.dtype[np.float64]] = rewards_N / beta
    return log_weights_N


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise InvalidInput(f"beta must be positive and finite, not {beta}")


def _check_counts(successes: int, samples: int) -> None:
    if samples < 1 or not 0 <= successes <= samples:
        raise InvalidInput(f"{successes} successes of {samples} samples is impossible")
