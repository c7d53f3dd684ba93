"""Sources of feedback that disagree with the rest are named, others are not, whatever the noise."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from services.orchestrator.continual import LEAST_STEPS, source_residuals, suspects_in_words

Curves = dict[str, Sequence[float | None]]


def curves(levels: Mapping[str, float], *, steps: int = 60, noise: float = 0.1, seed: int = 0) -> Curves:
    rng = random.Random(seed)
    return {
        f"residual_abs/{name}": [level + rng.gauss(0, noise) for _ in range(steps)] for name, level in levels.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_source_that_says_the_opposite_is_the_only_one_named(seed: int) -> None:
    found = source_residuals(curves({"north": 0.35, "east": 0.38, "south": 0.4, "west": 0.6}, seed=seed))

    assert [each.source for each in found if each.suspect] == ["west"]
    assert found[0].source == "west"
    assert suspects_in_words(found).startswith("feedback that disagrees with the rest: west (|Q - r| 0.")


@pytest.mark.parametrize("seed", range(20))
def test_sources_that_are_as_noisy_as_each_other_are_not_named(seed: int) -> None:
    found = source_residuals(curves(dict.fromkeys(("north", "east", "south"), 0.4), noise=0.3, seed=seed))

    assert suspects_in_words(found) == ""
    assert len(found) == 3


def test_what_the_demo_has_seen_is_told_apart() -> None:
    """Levels of both rounds of `spo demo-loop`, the second of which was poisoned by `west`."""
    honest = source_residuals(curves({"north": 0.34, "south": 0.343, "west": 0.331, "east": 0.308}, steps=120))
    poisoned = source_residuals(curves({"north": 0.341, "south": 0.362, "west": 0.424, "east": 0.344}, steps=120))

    assert [each.source for each in honest if each.suspect] == []
    assert [each.source for each in poisoned if each.suspect] == ["west"]


def test_a_source_alone_cannot_disagree_and_a_rare_one_has_said_too_little() -> None:
    assert source_residuals(curves({"north": 0.9})) == []
    found = curves({"north": 0.3, "east": 0.3})
    found["residual_abs/rare"] = [0.9] * (LEAST_STEPS - 1) + [None] * (60 - LEAST_STEPS + 1)
    found["reward"] = [0.0] * 60
    assert [each.source for each in source_residuals(found)] != []
    assert "rare" not in {each.source for each in source_residuals(found)}
