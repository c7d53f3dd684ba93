"""Qhat_0 with its interval: binary and general rewards, priors learned from other prompts, calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from services.value_estimation.prompt_estimate import PromptFeatures, fit_prior
from spo.algorithm.values import (
    JEFFREYS,
    BetaPrior,
    Evidence,
    calibration,
    q_from_success_rate,
    soft_value_estimate,
    success_probability,
    unsolved_posterior,
)
from spo.errors import InvalidInput

BETA = 0.2


@given(st.integers(1, 200), st.integers(0, 200), st.floats(0.05, 2), st.floats(0.01, 50), st.floats(0.01, 50))
def test_the_interval_holds_the_posterior_median_and_stays_between_the_rewards(
    samples: int, successes: int, beta: float, a: float, b: float
) -> None:
    found = soft_value_estimate(Evidence(samples, min(samples, successes), prior=BetaPrior(a, b)), beta)

    assert -1 - 1e-9 <= found.low <= found.high <= 1e-9
    assert -1 <= found.q <= 0
    assert found.standard_error >= 0


def test_without_a_prior_the_value_is_the_papers_frequency() -> None:
    assert soft_value_estimate(Evidence(8, 2), BETA).q == pytest.approx(q_from_success_rate(0.25, BETA))
    assert soft_value_estimate(Evidence(8, 0), BETA).q == -1


def test_an_unsolved_prompt_is_kept_at_the_posterior_mean() -> None:
    kept = soft_value_estimate(unsolved_posterior(Evidence(8, 0)), BETA)

    drawn = [q_from_success_rate(rate, BETA) for rate in np.random.default_rng(0).beta(0.5, 8.5, size=20_000)]
    assert kept.q == pytest.approx(np.mean(drawn), abs=0.01)
    assert kept.standard_error == pytest.approx(np.std(drawn), abs=0.01)
    assert unsolved_posterior(Evidence(8, 1)) == Evidence(8, 1)


def test_a_small_success_rate_has_a_wide_but_finite_interval() -> None:
    few, many = (soft_value_estimate(Evidence(n, 0, prior=JEFFREYS), 1 / math.log(1e5)) for n in (8, 800))

    assert few.low > -1.0001
    assert few.high - few.low > 0.6 > many.high - many.low, "no success of 800 leaves Q anywhere in about [-1, -0.5]"
    assert many.high - many.low > 0.3


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(1, 9, size=2000)
    held = 0
    for rate in rates:
        found = soft_value_estimate(Evidence(20, int(rng.binomial(20, rate)), prior=BetaPrior(1, 9)), BETA)
        held += found.low <= q_from_success_rate(rate, BETA) <= found.high

    assert held / len(rates) == pytest.approx(0.95, abs=0.015)


def test_shared_rewards_agree_with_counts_where_they_are_only_two() -> None:
    rewards = (0.0,) * 3 + (-1.0,) * 17
    counted = soft_value_estimate(Evidence(20, 3, prior=JEFFREYS), BETA)
    shared = soft_value_estimate(Evidence(20, 3, rewards, JEFFREYS), BETA)

    assert shared.q == pytest.approx(counted.q, abs=0.005)
    assert (shared.low, shared.high) == pytest.approx((counted.low, counted.high), abs=0.03)


def test_equal_rewards_still_have_a_width() -> None:
    found = soft_value_estimate(Evidence(10, 0, (-1.0,) * 10, JEFFREYS), BETA)

    assert found.low < found.q < found.high


def test_other_rewards_move_the_value_with_them() -> None:
    found = soft_value_estimate(Evidence(20, 20, best=-0.5, worst=-2.0), BETA)

    assert found.q == pytest.approx(-0.5)


@pytest.mark.parametrize(("samples", "successes"), [(0, 0), (3, 4), (3, -1)])
def test_impossible_counts_are_refused(samples: int, successes: int) -> None:
    with pytest.raises(InvalidInput):
        soft_value_estimate(Evidence(samples, successes), BETA)


def task_set(prompts: int, samples: int, seed: int) -> tuple[list[str], np.ndarray, list[int], list[PromptFeatures]]:
    """Prompts whose success rate follows pi0's likelihood of a right program, and a word."""
    rng = np.random.default_rng(seed)
    likelihoods, word = rng.normal(-10, 2, prompts), rng.integers(0, 2, prompts)
    rates = 1 / (1 + np.exp(-(likelihoods + 8 - word)))
    features = [PromptFeatures((float(x),), (int(w) + 7,)) for x, w in zip(likelihoods, word, strict=True)]
    ids = [f"{number:064d}" for number in range(prompts)]
    return ids, rates, rng.binomial(samples, rates).tolist(), features


def test_a_prior_learned_from_other_prompts_predicts_a_prompt_it_has_not_seen() -> None:
    ids, _, successes, features = task_set(200, 16, seed=0)
    model = fit_prior(ids, successes, [16] * 200, features)
    unseen_ids, rates, _, unseen = task_set(100, 16, seed=1)

    priors = [model.prior_of(each, known) for each, known in zip(unseen_ids, unseen, strict=True)]

    predicted = np.array([prior.successes / (prior.successes + prior.failures) for prior in priors])
    assert np.abs(predicted - rates).mean() < 0.4 * np.abs(rates - rates.mean()).mean()
    assert model.strength > 10


def test_features_that_tell_nothing_leave_a_weak_prior() -> None:
    rng = np.random.default_rng(0)
    rates = rng.choice([0.02, 0.98], 100)
    ids = [str(number) for number in range(100)]
    features = [PromptFeatures((float(rng.normal()),), tuple(rng.integers(0, 50, 4).tolist())) for _ in ids]

    model = fit_prior(ids, rng.binomial(16, rates).tolist(), [16] * 100, features)

    assert model.strength < 2, "prompts that have nothing in common say nothing about each other"


def test_a_prompts_own_samples_have_no_part_in_its_prior() -> None:
    ids, _, successes, features = task_set(100, 16, seed=2)
    changed = [16 - successes[0], *successes[1:]]

    first, second = (fit_prior(ids, counts, [16] * 100, features) for counts in (successes, changed))

    own = [model.prior_of(ids[0], features[0]) for model in (first, second)]
    rates = [prior.successes / (prior.successes + prior.failures) for prior in own]
    assert rates[0] == pytest.approx(rates[1], abs=1e-6)


def test_impossible_populations_are_refused() -> None:
    with pytest.raises(InvalidInput):
        fit_prior([], [], [], [])
    with pytest.raises(InvalidInput):
        fit_prior(["a"], [3], [2], [PromptFeatures()])


@given(st.floats(0, 1), st.floats(0.05, 2))
def test_the_success_probability_inverts_q(rate: float, beta: float) -> None:
    assert success_probability(q_from_success_rate(rate, beta), beta) == pytest.approx(rate, abs=1e-6)


def test_right_probabilities_are_calibrated_and_bold_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(size=20_000)
    outcomes = (rng.uniform(size=20_000) < truth).tolist()

    right, bold = calibration(truth.tolist(), outcomes), calibration((truth > 0.5).astype(float).tolist(), outcomes)

    assert right.expected_error < 0.02 < 0.2 < bold.expected_error
    assert right.brier < bold.brier
    assert len(right.bins) == 10
    assert sum(each.low <= each.predicted <= each.high for each in right.bins) >= 8


def test_equal_predictions_share_a_bin() -> None:
    found = calibration([0.5] * 100 + [0.9] * 5, [True] * 105)

    assert [each.outcomes for each in found.bins] == [100, 5]


@pytest.mark.parametrize(
    ("predictions", "outcomes"), [([], []), ([0.5], []), ([1.5], [True]), ([float("nan")], [True])]
)
def test_impossible_predictions_are_refused(predictions: list[float], outcomes: list[bool]) -> None:
    with pytest.raises(InvalidInput):
        calibration(predictions, outcomes)
