"""The gate: a version is served only where the same problems show that it is better."""

from __future__ import annotations

import numpy as np
import pytest

from services.orchestrator.continual import compare
from spo.errors import PreconditionFailed

SAMPLES = 20


def table(rates: np.ndarray, seed: int) -> list[dict[str, object]]:
    """An evaluation of problems that are solved at these rates."""
    correct = np.random.default_rng(seed).binomial(SAMPLES, rates)
    return [
        {"prompt_id": f"p{number}", "samples": SAMPLES, "correct": int(found)} for number, found in enumerate(correct)
    ]


def test_the_interval_covers_the_true_gain_and_no_gain_rarely_passes() -> None:
    rng = np.random.default_rng(0)
    covered = passed = 0
    trials = 200
    for trial in range(trials):
        before = rng.beta(1, 2, size=60)
        found = compare(table(before, 2 * trial), table(before, 2 * trial + 1), level=0.95, seed=trial)
        covered += found.low <= 0 <= found.high
        passed += found.low > 0

    assert covered / trials > 0.9
    assert passed / trials < 0.06


def test_pairs_show_a_gain_that_means_side_by_side_would_not() -> None:
    before = np.random.default_rng(1).beta(0.5, 0.5, size=80)
    after = np.clip(before + 0.05, 0, 1)

    found = compare(table(before, 1), table(after, 2), level=0.95, seed=0)

    assert found.gain == pytest.approx(found.candidate - found.served)
    assert found.low > 0
    assert found.problems == 80


def test_equal_inputs_give_equal_intervals() -> None:
    before, after = table(np.full(30, 0.4), 1), table(np.full(30, 0.6), 2)

    assert compare(before, after, level=0.95, seed=7) == compare(before, after, level=0.95, seed=7)


@pytest.mark.parametrize("missing", [0, 1])
def test_evaluations_of_different_problems_are_not_compared(missing: int) -> None:
    tables = [table(np.full(5, 0.5), seed) for seed in (1, 2)]
    tables[missing] = tables[missing][:-1]

    with pytest.raises(PreconditionFailed, match="different problems") as caught:
        compare(*tables, level=0.95, seed=0)
    assert caught.value.code == "not_comparable"
