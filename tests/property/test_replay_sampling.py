"""Shares are exact and draws are uniform without needless repeats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spo.algorithm.replay_sampling import (
    age_weights,
    aged_priority,
    draw_balanced,
    draw_pairs,
    draw_ranks,
    draw_weighted,
    exact_counts,
    value_spread,
)


@given(weights=st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(sum), total=st.integers(0, 1000))
def test_counts_sum_to_the_batch_and_miss_their_share_by_less_than_one(weights: list[int], total: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = exact_counts(shares, total)

    assert sum(counts) == total
    assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0)


@given(window=st.integers(1, 60), count=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_no_rank_repeats_while_others_are_left(window: int, count: int, seed: int) -> None:
    ranks = draw_ranks(np.random.default_rng(seed), window, count)
    times = Counter(ranks)

    assert len(ranks) == count
    assert set(ranks) <= set(range(window))
    assert all(count // window <= times[rank] <= -(-count // window) for rank in range(window))
    assert ranks == draw_ranks(np.random.default_rng(seed), window, count), "the seed decides"


def test_every_rank_is_drawn_equally_often() -> None:
    rng = np.random.default_rng(0)
    times = Counter(rank for _ in range(4000) for rank in draw_ranks(rng, 20, 5))

    # 1,000 expected each, standard deviation 27.
    assert all(abs(times[rank] - 1000) < 5 * 27.4 for rank in range(20))


def test_nothing_can_be_drawn_from_an_empty_window() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_ranks(np.random.default_rng(0), 0, 1)


@given(weights=st.lists(st.floats(0, 100), min_size=1, max_size=40), count=st.integers(0, 100), seed=st.integers(0, 99))
def test_weighted_draws_repeat_no_rank_while_others_are_left(weights: list[float], count: int, seed: int) -> None:
    ranks = draw_weighted(np.random.default_rng(seed), weights, count)
    times = Counter(ranks)

    assert len(ranks) == count
    assert all(count // len(weights) <= times[rank] <= -(-count // len(weights)) for rank in range(len(weights)))
    assert ranks == draw_weighted(np.random.default_rng(seed), weights, count), "the seed decides"


def test_the_first_weighted_draw_is_in_proportion_to_the_weights() -> None:
    rng = np.random.default_rng(0)
    times = Counter(draw_weighted(rng, [1.0, 2.0, 5.0, 0.0], 1)[0] for _ in range(8000))

    # Expected 1000, 2000, 5000; standard deviation at most 45.
    assert all(abs(times[rank] - expected) < 5 * 45 for rank, expected in enumerate([1000, 2000, 5000, 0]))


def test_what_has_no_weight_comes_last_and_not_never() -> None:
    assert draw_weighted(np.random.default_rng(1), [0.0, 1.0, 1.0], 3)[-1] == 0
    assert sorted(draw_weighted(np.random.default_rng(1), [0.0, 0.0], 2)) == [0, 1]


@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=60), count=st.integers(0, 150), seed=st.integers(0, 99))
def test_balanced_draws_take_from_each_key_alike_as_far_as_it_lasts(keys: list[int], count: int, seed: int) -> None:
    ranks = draw_balanced(np.random.default_rng(seed), keys, count)
    sizes, rounds = Counter(keys), Counter(ranks)

    assert len(ranks) == count
    assert all(count // len(keys) <= rounds[rank] <= -(-count // len(keys)) for rank in range(len(keys)))
    given_out = Counter(keys[rank] for rank in ranks[len(keys) * (count // len(keys)) :])
    most = max(given_out.values(), default=0)
    # A key has fewer than the others only where it is used up.
    assert all(given_out[key] >= most - 1 or given_out[key] == sizes[key] for key in sizes)
    assert ranks == draw_balanced(np.random.default_rng(seed), keys, count), "the seed decides"


def test_every_key_and_every_rank_of_a_key_gets_its_turn_equally_often() -> None:
    rng = np.random.default_rng(0)
    keys = ["a"] * 2 + ["b"] * 8
    times = Counter(rank for _ in range(4000) for rank in draw_balanced(rng, keys, 1))

    # 2,000 per key: 1,000 for each a, 250 for each b; standard deviations 27 and 15.
    assert all(abs(times[rank] - (1000 if rank < 2 else 250)) < 5 * 27.4 for rank in range(10))


def test_priorities_halve_with_age_and_grow_with_surprise() -> None:
    assert aged_priority([-0.5, 0.5], age=0, half_life=5) == pytest.approx(0.5)
    assert aged_priority([-0.5], age=10, half_life=5) == pytest.approx(0.125)
    assert aged_priority([0.0], age=0, half_life=5) == 0
    assert value_spread(0.5) == pytest.approx(0.5)
    assert value_spread(0.0) == value_spread(1.0) == 0


@pytest.mark.parametrize("draw", [draw_weighted, draw_balanced])
def test_nothing_can_be_drawn_from_nothing(draw: Any) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(np.random.default_rng(0), [], 1)


def test_a_half_life_halves_how_often_what_is_older_by_it_is_drawn() -> None:
    assert age_weights([0, 4, 8, -3], 4.0) == [1.0, 0.5, 0.25, 1.0]
    rng = np.random.default_rng(1)
    weights = age_weights([0] * 50 + [4] * 50 + [8] * 50, 4.0)
    times = Counter(rank // 50 for _ in range(4000) for rank in draw_weighted(rng, weights, 1))
    # 2,286, 1,143 and 571 expected; standard deviations up to 31.
    assert all(abs(times[age] - 4000 * 0.5**age / 1.75) < 5 * 31.3 for age in range(3))


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40),
    count=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_pairs_are_a_right_and_a_wrong_one_of_a_key_and_repeat_no_rank_while_others_are_left(
    rows: list[tuple[int, bool]], count: int, seed: int
) -> None:
    keys, correct = [key for key, _ in rows], [right for _, right in rows]
    sides = {key: [right for other, right in rows if other == key] for key in keys}
    paired = [key for key, found in sides.items() if len(set(found)) == 2]
    if not paired:
        with pytest.raises(ValueError, match="nothing to draw"):
            draw_pairs(np.random.default_rng(seed), keys, correct, count)
        return
    ranks = draw_pairs(np.random.default_rng(seed), keys, correct, count)
    pairs = list(zip(ranks[::2], ranks[1::2], strict=True))
    assert len(pairs) == count
    assert all(keys[right] == keys[wrong] and correct[right] and not correct[wrong] for right, wrong in pairs)
    turns = Counter(keys[right] for right, _ in pairs)
    assert all(count // len(paired) <= turns[key] <= -(-count // len(paired)) for key in paired)
    for key in paired:
        for side, drawn in ((True, [right for right, _ in pairs]), (False, [wrong for _, wrong in pairs])):
            times = Counter(rank for rank in drawn if keys[rank] == key)
            assert max(times.values(), default=0) <= -(-turns[key] // sides[key].count(side))
    assert ranks == draw_pairs(np.random.default_rng(seed), keys, correct, count), "the seed decides"
