"""Estimates of the soft value from samples of pi0."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spo.algorithm.values import (
    estimate_from_successes,
    q_from_rewards,
    q_from_success_rate,
    q_from_successes,
    standard_error_from_rewards,
    success_rate_interval,
)
from spo.errors import InvalidInput

PAPER_BETA = 1 / math.log(100_000)

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
betas = st.floats(0.02, 10)


@given(counts, betas)
def test_qhat_equals_the_papers_formula(count: tuple[int, int], beta: float) -> None:
    successes, samples = count
    rate = successes / samples
    read = beta * math.log(rate * math.exp(0) + (1 - rate) * math.exp(-1 / beta))
    assert q_from_successes(successes, samples, beta) == pytest.approx(read, abs=1e-12)


@given(counts, betas)
def test_binary_rewards_and_their_counts_give_the_same_q(count: tuple[int, int], beta: float) -> None:
    successes, samples = count
    rewards = [0.0] * successes + [-1.0] * (samples - successes)
    assert q_from_rewards(rewards, beta) == pytest.approx(q_from_successes(successes, samples, beta), abs=1e-9)


def test_no_success_is_minus_one_and_nothing_but_success_is_zero() -> None:
    assert q_from_successes(0, 800, PAPER_BETA) == -1.0
    assert q_from_successes(800, 800, PAPER_BETA) == 0.0


def test_one_success_of_800_at_the_papers_beta_is_where_the_paper_says() -> None:
    assert q_from_successes(1, 800, PAPER_BETA) == pytest.approx(-0.58, abs=0.005)


def test_a_tiny_beta_neither_overflows_nor_underflows() -> None:
    assert q_from_success_rate(0.5, 1e-6) == pytest.approx(-1e-6 * math.log(2))
    assert q_from_rewards([-900.0, -1000.0], 1e-3) == pytest.approx(-900.0 - 1e-3 * math.log(2))
    assert standard_error_from_rewards([-900.0, -1000.0], 1e-3) == pytest.approx(1e-3)


@given(st.lists(st.floats(-5, 0), min_size=1, max_size=30), betas)
def test_general_rewards_lie_between_their_mean_and_their_maximum(rewards: list[float], beta: float) -> None:
    q = q_from_rewards(rewards, beta)
    assert np.mean(rewards) - 1e-9 <= q <= max(rewards) + 1e-9


@given(counts, betas)
def test_the_interval_holds_the_estimate(count: tuple[int, int], beta: float) -> None:
    estimate = estimate_from_successes(*count, beta)
    assert -1 <= estimate.low <= estimate.q <= estimate.high <= 0


@pytest.mark.parametrize(("successes", "samples"), [(2, 7), (3, 20), (10, 800)])
def test_the_interval_cuts_a_fortieth_off_each_end_of_the_jeffreys_posterior(successes: int, samples: int) -> None:
    low, high = success_rate_interval(successes, samples)
    rate_N = (np.arange(1_000_000) + 0.5) / 1_000_000
    log_density_N = (successes - 0.5) * np.log(rate_N) + (samples - successes - 0.5) * np.log1p(-rate_N)
    density_N = np.exp(log_density_N - log_density_N.max())
    assert density_N[rate_N < low].sum() / density_N.sum() == pytest.approx(0.025, abs=1e-4)
    assert density_N[rate_N > high].sum() / density_N.sum() == pytest.approx(0.025, abs=1e-4)


def test_no_success_of_800_leaves_a_wide_interval() -> None:
    estimate = estimate_from_successes(0, 800, PAPER_BETA)
    assert estimate.low == -1.0
    assert -0.58 < estimate.high < -0.45
    assert estimate.standard_error == 0.0


def test_the_interval_covers_true_rates_drawn_from_its_prior_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 0.5, size=3000)
    drawn = [success_rate_interval(int(rng.binomial(128, rate)), 128) for rate in rates]
    inside = [low <= rate <= high for rate, (low, high) in zip(rates, drawn, strict=True)]
    assert 0.94 < np.mean(inside) < 0.98


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_the_standard_error_is_the_spread_of_repeated_estimates(rate: float) -> None:
    rng = np.random.default_rng(1)
    drawn = rng.binomial(2000, rate, size=4000)
    spread = np.std([q_from_successes(int(c), 2000, PAPER_BETA) for c in drawn])
    stated = estimate_from_successes(int(2000 * rate), 2000, PAPER_BETA).standard_error
    assert stated == pytest.approx(spread, rel=0.06)
    rewards = [0.0] * int(2000 * rate) + [-1.0] * int(2000 * (1 - rate))
    assert standard_error_from_rewards(rewards, PAPER_BETA) == pytest.approx(stated, rel=1e-3)


def test_the_exponential_of_the_estimate_is_unbiased() -> None:
    # Exactly, over every outcome of 6 rollouts at S = 1/3: sum of P(c) exp(Qhat(c) / beta) = E exp(r / beta).
    rate, n, beta = Fraction(1, 3), 6, 0.4
    expected = sum(
        math.comb(n, c) * float(rate**c * (1 - rate) ** (n - c)) * math.exp(q_from_successes(c, n, beta) / beta)
        for c in range(n + 1)
    )
    assert expected == pytest.approx(float(rate) + float(1 - rate) * math.exp(-1 / beta))


@pytest.mark.parametrize(
    "call",
    [
        lambda: q_from_successes(1, 0, 0.1),
        lambda: q_from_successes(-1, 5, 0.1),
        lambda: q_from_successes(6, 5, 0.1),
        lambda: q_from_successes(1, 5, 0.0),
        lambda: q_from_successes(1, 5, math.nan),
        lambda: q_from_success_rate(math.nan, 0.1),
        lambda: q_from_rewards([], 0.1),
        lambda: q_from_rewards([0.0, math.inf], 0.1),
        lambda: standard_error_from_rewards([0.0], 0.1),
        lambda: success_rate_interval(1, 5, level=1.0),
    ],
)
def test_impossible_numbers_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(InvalidInput):
        call()


def test_values_and_pass_at_k_are_importable_without_torch() -> None:
    code = "import sys; import spo.algorithm.values, spo.algorithm.values; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
