"""Shares are exact and draws are uniform without needless repeats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spo.algorithm.replay_sampling import draw_ranks, exact_counts


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
