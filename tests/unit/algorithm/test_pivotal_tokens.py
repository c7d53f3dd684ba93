"""The bisection of Pivotal Token Search on success rates that are known everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from spo.algorithm.values import PivotalToken, next_positions, pivotal_tokens
from spo.errors import InvalidInput

THRESHOLD = 0.2


def search(truth: list[float], limit: int = 1000, budget: int = 1000) -> dict[int, float]:
    """Ask and answer until the search is over or the budget spent; every asked position is new and inside."""
    rates: dict[int, float] = {}
    while asked := next_positions(len(truth) - 1, rates, threshold=THRESHOLD, limit=min(limit, budget - len(rates))):
        assert not set(asked) & set(rates)
        assert len(asked) == len(set(asked)) <= limit
        rates |= {position: truth[position] for position in asked}
    return rates


def steps(length: int, jumps: dict[int, float], start: float) -> list[float]:
    """Success rates that are flat but for jumps: token index -> change."""
    truth = [start]
    for index in range(length):
        truth.append(truth[-1] + jumps.get(index, 0.0))
    return truth


def test_the_one_token_that_decides_is_found_in_logarithmic_time() -> None:
    truth = steps(1000, {613: 0.7}, start=0.1)
    rates = search(truth)
    assert pivotal_tokens(rates, threshold=THRESHOLD) == (PivotalToken(613, truth[613], truth[614]),)
    assert len(rates) <= 2 + math.ceil(math.log2(1000))


def test_a_flat_trajectory_costs_only_its_two_ends() -> None:
    assert search(steps(64, {}, start=0.4)) == {0: 0.4, 64: 0.4}


@given(st.integers(1, 60), st.dictionaries(st.integers(0, 59), st.floats(0.21, 0.3), max_size=3))
def test_every_jump_of_a_monotone_trajectory_is_found(length: int, jumps: dict[int, float]) -> None:
    inside = {index: jump for index, jump in jumps.items() if index < length}
    found = pivotal_tokens(search(steps(length, inside, start=0.05)), threshold=THRESHOLD)
    assert [token.index for token in found] == sorted(inside)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40), st.integers(1, 3), st.integers(1, 20))
def test_stopping_and_resuming_or_asking_in_smaller_pieces_finds_the_same(
    truth: list[float], limit: int, budget: int
) -> None:
    whole = search(truth)
    assert search(truth, limit=limit) == whole
    partial = search(truth, budget=budget)
    assert len(partial) <= budget
    assert set(partial) <= set(whole)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_when_it_ends_every_wide_interval_has_similar_ends(truth: list[float]) -> None:
    rates = search(truth)
    known = sorted(rates)
    for left, right in pairwise(known):
        assert right - left == 1 or abs(rates[right] - rates[left]) <= THRESHOLD


def test_with_a_small_budget_the_widest_difference_is_asked_first() -> None:
    rates = {0: 0.0, 10: 0.3, 20: 1.0}
    assert next_positions(20, rates, threshold=THRESHOLD, limit=1) == (15,)


@pytest.mark.parametrize(
    ("length", "rates", "threshold"),
    [(0, {}, 0.2), (5, {6: 0.1}, 0.2), (5, {-1: 0.1}, 0.2), (5, {0: 1.5}, 0.2), (5, {0: math.nan}, 0.2), (5, {}, 2)],
)
def test_impossible_rates_are_refused(length: int, rates: dict[int, float], threshold: float) -> None:
    with pytest.raises(InvalidInput):
        next_positions(length, rates, threshold=threshold, limit=1)
