"""What samples of pi0 say, without torch: soft values and their intervals, pass@k, calibration of Q_t, and pivotal
tokens.

Quantiles of a Beta distribution by numpy alone: the services that read values start without scipy.
On the log odds the density is smooth and has one hump. It is integrated over cells that are narrow about the hump and
wide in the tails (Gauss-Legendre), and a quantile is found within its cell by Newton's method. No torch here.

Monte-Carlo estimates of the soft value Q from samples of pi0 (Soft Policy Optimization, Cohen et al. 2025, 3.1.3).
No torch here: the orchestrator, the replay buffer and value-estimation read values without it. Units: beta, rewards and
Q in reward units. Binary rewards are 0 (success) and -1 (failure).

What samples of pi0 say of a prompt's soft value: a point and an interval, in reward units, for any beta.
Two points. The frequency of a fixed number of samples makes exp(Q / beta) unbiased, as in the paper. Where the data
decided when to stop, no frequency is unbiased any more (a lucky streak ends the sampling); the posterior is
unchanged, since the likelihood does not depend on why sampling ended: sequential estimates are posterior means of Q,
whose squared error is the least. No torch here.

pass@k and how sure we are of it (Soft Policy Optimization, Cohen et al. 2025, section 5; Li et al. 2022).
No torch here: the orchestrator evaluates without it.

Does Q_t predict what it stands for, the success of pi0 going on from a prefix? Reliability by bin, ECE, Brier score.
No torch here. A prediction is of a prefix, an outcome of one continuation by pi0: Q_t is about pi0, so continuations of
the trained policy would measure something else. Axes: N outcome.

Pivotal Token Search: where does the chance of success change? (Abdin et al. 2024; Cohen et al. 2025, 3.1.3).
No torch here. The search holds no state: it is a function of the success rates known so far, so it resumes from
whatever was stored. Ask `next_positions`, roll out pi0 from those prefixes, add the rates, until the answer is empty.
Position t is the prefix of the first t response tokens; S_t is the success rate of pi0 from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spo.errors import InvalidInput

Array = NDArray[np.float64]

# Log odds of 1e-16, the smallest rate that can be told from 0 and whose complement from 1.
EDGE = 37.0
CELLS = 128
NEWTON_STEPS = 4
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
# From [-1, 1] to [0, 1].
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2

BOOTSTRAP_DRAWS = 2000
# Midpoints of equally probable slices of a posterior, over which its mean is taken.
SLICES = (np.arange(64) + 0.5) / 64
SMALLEST = 1e-16


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


@dataclass(frozen=True)
class ProblemCounts:
    """Of `samples` responses to one problem, `correct` passed every test."""

    samples: int
    correct: int


@dataclass(frozen=True)
class PassAtKEstimate:
    """Mean over problems with its interval [low, high]."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without replacement, hold a correct one.

    Raises InvalidInput unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise InvalidInput(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(
    problems: Sequence[ProblemCounts], k: int, *, seed: int, level: float = 0.95, resamples: int = 2000
) -> PassAtKEstimate:
    """pass@k averaged over problems, with a percentile bootstrap over problems (the problems are the sample).

    Problems that all have one score, say all solved, cannot be resampled into anything else: then it is the Jeffreys
    interval of that share among as many problems solved or not; what lies between 0 and 1 varies no more than these.
    Equal inputs and seed give equal intervals. Raises InvalidInput without problems, or as `pass_at_k`.
    """
    if not problems:
        raise InvalidInput("pass@k needs at least one problem")
    score_P = np.array([pass_at_k(problem.samples, problem.correct, k) for problem in problems])
    if np.ptp(score_P) == 0:
        return _of_one_score(float(score_P[0]), len(score_P), level)
    rng = np.random.default_rng(seed)
    # One resample at a time: thousands of problems by thousands of resamples need not lie in memory together.
    means = [score_P[rng.integers(len(score_P), size=len(score_P))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return PassAtKEstimate(mean=float(score_P.mean()), low=float(low), high=float(high))


def _of_one_score(share: float, problems: int, level: float) -> PassAtKEstimate:
    tail = (1 - level) / 2
    low, high = beta_quantiles(problems * share + 0.5, problems * (1 - share) + 0.5, [tail, 1 - tail])
    return PassAtKEstimate(mean=share, low=float(min(low, share)), high=float(max(high, share)))


def distinct_correct(programs: Sequence[str], correct: Sequence[bool]) -> int:
    """How many different programs among the correct ones; the caller normalises their text."""
    return len({program for program, right in zip(programs, correct, strict=True) if right})


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


@dataclass(frozen=True)
class PivotalToken:
    """The response token at `index` (from 0) took the success rate from `before` to `after`."""

    index: int
    before: float
    after: float


def next_positions(length: int, rates: Mapping[int, float], *, threshold: float, limit: int) -> tuple[int, ...]:
    """The prefixes to roll out next, most telling first, at most `limit`; empty when the search is over.

    First the ends 0 and `length`; then the midpoint of every interval of neighbouring known positions whose rates
    differ by more than `threshold`, the widest difference first. Raises InvalidInput on rates that cannot be.
    """
    _check(length, rates, threshold)
    ends = tuple(end for end in (0, length) if end not in rates)
    if ends:
        return ends[:limit]
    differing = [
        (abs(rates[right] - rates[left]), left, right)
        for left, right in pairwise(sorted(rates))
        if right - left > 1 and abs(rates[right] - rates[left]) > threshold
    ]
    differing.sort(key=lambda interval: (-interval[0], interval[1]))
    return tuple((left + right) // 2 for _, left, right in differing[:limit])


def pivotal_tokens(rates: Mapping[int, float], *, threshold: float) -> tuple[PivotalToken, ...]:
    """The single tokens between neighbouring known positions that moved the rate by more than `threshold`, in order."""
    return tuple(
        PivotalToken(left, rates[left], rates[right])
        for left, right in pairwise(sorted(rates))
        if right - left == 1 and abs(rates[right] - rates[left]) > threshold
    )


def _check(length: int, rates: Mapping[int, float], threshold: float) -> None:
    if length < 1:
        raise InvalidInput(f"a response of {length} tokens holds no pivotal token")
    if not 0 <= threshold <= 1:
        raise InvalidInput(f"a threshold on success rates must be in [0, 1], not {threshold}")
    for position, rate in rates.items():
        if not 0 <= position <= length or not 0 <= rate <= 1:
            raise InvalidInput(f"success rate {rate} at position {position} of {length} is impossible")
