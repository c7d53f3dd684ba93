"""pass@k against enumeration of every draw."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spo.algorithm.values import ProblemCounts, distinct_correct, mean_pass_at_k, pass_at_k
from spo.errors import InvalidInput


def test_pass_at_k_equals_the_share_of_all_draws_that_hold_a_correct_sample() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            correct = [True] * c + [False] * (n - c)
            draws = [any(draw) for draw in itertools.combinations(correct, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_1_is_the_share_of_correct_samples() -> None:
    assert pass_at_k(20, 3, 1) == pytest.approx(0.15)


def test_thousands_of_samples_do_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 1, 0), (5, 1, 6), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(InvalidInput):
        pass_at_k(n, c, k)


def test_the_mean_is_over_problems_and_lies_in_its_interval() -> None:
    problems = [ProblemCounts(20, c) for c in (0, 0, 1, 5, 20)]
    estimate = mean_pass_at_k(problems, 10, seed=0)
    assert estimate.mean == pytest.approx(np.mean([pass_at_k(20, p.correct, 10) for p in problems]))
    assert 0 <= estimate.low < estimate.mean < estimate.high <= 1


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    problems = [ProblemCounts(20, c) for c in range(20)]
    first, again, other = (mean_pass_at_k(problems, 1, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)


def test_the_interval_is_about_as_wide_as_the_standard_error_says() -> None:
    rng = np.random.default_rng(0)
    problems = [ProblemCounts(20, int(c)) for c in rng.integers(0, 21, size=200)]
    score = np.array([p.correct / 20 for p in problems])
    estimate = mean_pass_at_k(problems, 1, seed=0)
    expected = 2 * 1.96 * score.std() / np.sqrt(len(score))
    assert estimate.high - estimate.low == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("correct", "edge"), [(0, 0), (20, 1)])
def test_a_few_problems_that_all_fare_alike_leave_an_interval(correct: int, edge: int) -> None:
    few, many = (mean_pass_at_k([ProblemCounts(20, correct)] * count, 1, seed=0) for count in (3, 300))

    assert edge in (few.low, few.high)
    assert few.mean == many.mean == edge
    # Three in three say little: by Clopper and Pearson the success rate may be 0.29, by Jeffreys' prior 0.47.
    assert 0.4 < few.high - few.low < 0.6
    assert 0 < many.high - many.low < 0.01


def test_no_problems_have_no_pass_at_k() -> None:
    with pytest.raises(InvalidInput):
        mean_pass_at_k([], 1, seed=0)


def test_distinct_correct_counts_different_right_programs_once() -> None:
    assert distinct_correct(["a", "a", "b", "c"], [True, True, True, False]) == 2
