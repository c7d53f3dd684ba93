"""What pi0 of the toy contest is trained on: true descriptions beside programs that are only half right.

Each component of a program is right with a probability by its tier; otherwise it is mostly its fixed confuser. So the
mode of pi0 is often wrong, and cooling the temperature does not repair it: there is room to learn.
"""

import random
from collections.abc import Mapping
from typing import Literal, TypeVar

from spo.tasks.toy.grammar import (
    AGGREGATES,
    FILTERS,
    LIST_AGGREGATES,
    MAPS,
    PARAMETERS,
    POSTS,
    Component,
    Composition,
    Tier,
)
from spo.tasks.toy.problems import sample_composition
from spo.tasks.toy.solutions import HEADERS, STYLES, write_program

Difficulty = Literal["standard", "hard"]

RIGHT_SHARE: Mapping[Difficulty, Mapping[Tier, float]] = {
    "standard": {"easy": 0.80, "medium": 0.50, "hard": 0.24, "very hard": 0.05},
    "hard": {"easy": 0.75, "medium": 0.40, "hard": 0.12, "very hard": 0.02},
}
CONFUSER_SHARE = 0.75
DAMAGED_SHARE = 0.05

Meaning = TypeVar("Meaning")


def sample_pair(rng: random.Random, difficulty: Difficulty) -> tuple[str, str]:
    """Return a statement and a program that someone half right would write for it."""
    composition = sample_composition(rng)
    program = write_program(_misread(composition, rng, difficulty), rng.choice(HEADERS), rng.choice(STYLES), rng)
    return composition.prompt, program


def damage(token_ids: list[int], vocabulary_ids: range, rng: random.Random) -> list[int]:
    """Return the tokens of a program, a `DAMAGED_SHARE` of them with one token replaced by any of `vocabulary_ids`."""
    if rng.random() >= DAMAGED_SHARE:
        return token_ids
    position = rng.randrange(len(token_ids))
    return [*token_ids[:position], rng.choice(vocabulary_ids), *token_ids[position + 1 :]]


def _misread(composition: Composition, rng: random.Random, difficulty: Difficulty) -> Composition:
    shares = RIGHT_SHARE[difficulty]
    aggregate = _misread_component(AGGREGATES, composition.aggregate, shares, rng)
    post = _misread_component(POSTS, composition.post, shares, rng)
    transform = _misread_component(MAPS, composition.map, shares, rng)
    kept = _misread_component(FILTERS, composition.filter, shares, rng)
    return Composition(
        aggregate=aggregate,
        map=transform,
        filter=kept,
        post="none" if aggregate in LIST_AGGREGATES else post,
        map_number=_number(MAPS, composition.map, composition.map_number, rng),
        filter_number=_number(FILTERS, composition.filter, composition.filter_number, rng),
        post_number=_number(POSTS, composition.post, composition.post_number, rng),
    )


def _misread_component(
    components: Mapping[str, Component[Meaning]], name: str, shares: Mapping[Tier, float], rng: random.Random
) -> str:
    component = components[name]
    if rng.random() < shares[component.tier]:
        return name
    if rng.random() < CONFUSER_SHARE:
        return component.confuser
    return rng.choice([other for other in components if other != name])


def _number(components: Mapping[str, Component[Meaning]], name: str, number: int, rng: random.Random) -> int:
    """Return the number the statement names, or any where it names none."""
    return number if components[name].takes_number else rng.choice(PARAMETERS)
