"""The toy contest's language: words of a prompt and what each of them means.

A prompt is `{aggregate} of [{map} of] the {filter} [{post}]`, for example "sum of squares of the even numbers plus 3".
A component has a meaning (a Python function), a tier (how rarely pi0 gets it right) and a confuser (what pi0 writes
instead most of the time).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Tier = Literal["easy", "medium", "hard", "very hard"]
TIERS: tuple[Tier, ...] = ("easy", "medium", "hard", "very hard")
MINIMUM_SURVIVORS = 2
PARAMETERS = range(2, 10)

Meaning = TypeVar("Meaning")


@dataclass(frozen=True)
class Component(Generic[Meaning]):
    """One word of the grammar; `phrase` holds `{n}` where the component takes a number."""

    name: str
    phrase: str
    tier: Tier
    confuser: str
    meaning: Meaning

    @property
    def takes_number(self) -> bool:
        """Tell whether the phrase names a number."""
        return "{n}" in self.phrase


Aggregate = Component[Callable[[list[int]], int | list[int]]]
Elementwise = Component[Callable[[int, int], int]]
Filter = Component[Callable[[int, int], bool]]
Post = Component[Callable[[int, int], int]]

AGGREGATES: dict[str, Aggregate] = {
    component.name: component
    for component in (
        Aggregate("sum", "sum of", "easy", "count", sum),
        Aggregate("count", "count of", "medium", "sum", len),
        Aggregate("max", "maximum of", "medium", "min", max),
        Aggregate("min", "minimum of", "medium", "max", min),
        Aggregate("product", "product of", "medium", "sum", math.prod),
        Aggregate("spread", "spread of", "very hard", "max", lambda values: max(values) - min(values)),
        Aggregate("average", "average of", "hard", "sum", lambda values: sum(values) // len(values)),
        Aggregate("first", "first of", "hard", "last", lambda values: values[0]),
        Aggregate("last", "last of", "medium", "first", lambda values: values[-1]),
        Aggregate("second", "second largest of", "very hard", "max", lambda values: sorted(values)[-2]),
        Aggregate("distinct", "distinct count of", "hard", "count", lambda values: len(set(values))),
        Aggregate("sorted", "sorted list of", "medium", "reversed", sorted),
        Aggregate("reversed", "reversed list of", "hard", "sorted", lambda values: values[::-1]),
    )
}
LIST_AGGREGATES = frozenset({"sorted", "reversed"})

MAPS: dict[str, Elementwise] = {
    component.name: component
    for component in (
        Elementwise("identity", "", "easy", "squares", lambda x, n: x),
        Elementwise("squares", "squares of", "medium", "doubles", lambda x, n: x * x),
        Elementwise("cubes", "cubes of", "medium", "squares", lambda x, n: x**3),
        Elementwise("absolute", "absolute values of", "easy", "opposites", lambda x, n: abs(x)),
        Elementwise("doubles", "doubles of", "hard", "squares", lambda x, n: 2 * x),
        Elementwise("halves", "halves of", "hard", "doubles", lambda x, n: x // 2),
        Elementwise("opposites", "opposites of", "medium", "absolute", lambda x, n: -x),
        Elementwise("successors", "successors of", "medium", "predecessors", lambda x, n: x + 1),
        Elementwise("predecessors", "predecessors of", "hard", "successors", lambda x, n: x - 1),
        Elementwise("remainders", "remainders modulo {n} of", "very hard", "digits", lambda x, n: x % n),
        Elementwise("digits", "last digits of", "very hard", "absolute", lambda x, n: abs(x) % 10),
    )
}

FILTERS: dict[str, Filter] = {
    component.name: component
    for component in (
        Filter("all", "numbers", "easy", "positive", lambda x, n: True),
        Filter("even", "even numbers", "medium", "odd", lambda x, n: x % 2 == 0),
        Filter("odd", "odd numbers", "hard", "even", lambda x, n: x % 2 == 1),
        Filter("positive", "positive numbers", "easy", "negative", lambda x, n: x > 0),
        Filter("negative", "negative numbers", "medium", "positive", lambda x, n: x < 0),
        Filter("nonzero", "nonzero numbers", "hard", "positive", lambda x, n: x != 0),
        Filter("multiples", "multiples of {n}", "medium", "nonmultiples", lambda x, n: x % n == 0),
        Filter("nonmultiples", "non-multiples of {n}", "very hard", "multiples", lambda x, n: x % n != 0),
        Filter("above", "numbers above {n}", "medium", "below", lambda x, n: x > n),
        Filter("below", "numbers below {n}", "hard", "above", lambda x, n: x < n),
        Filter("multidigit", "multi-digit numbers", "medium", "singledigit", lambda x, n: abs(x) > 9),
        Filter("singledigit", "single-digit numbers", "very hard", "multidigit", lambda x, n: abs(x) < 10),
    )
}

POSTS: dict[str, Post] = {
    component.name: component
    for component in (
        Post("none", "", "easy", "plus", lambda value, n: value),
        Post("plus", "plus {n}", "easy", "minus", lambda value, n: value + n),
        Post("minus", "minus {n}", "medium", "plus", lambda value, n: value - n),
        Post("times", "times {n}", "medium", "plus", lambda value, n: value * n),
        Post("modulo", "modulo {n}", "very hard", "divided", lambda value, n: value % n),
        Post("divided", "divided by {n}", "hard", "modulo", lambda value, n: value // n),
    )
}


@dataclass(frozen=True)
class Composition:
    """One problem of the grammar: a component of each kind and their numbers (ignored where none is taken)."""

    aggregate: str
    map: str
    filter: str
    post: str
    map_number: int = 2
    filter_number: int = 2
    post_number: int = 2

    @property
    def prompt(self) -> str:
        """Return the statement shown to the policy."""
        phrases = (
            AGGREGATES[self.aggregate].phrase,
            MAPS[self.map].phrase.format(n=self.map_number),
            "the",
            FILTERS[self.filter].phrase.format(n=self.filter_number),
            POSTS[self.post].phrase.format(n=self.post_number),
        )
        return " ".join(phrase for phrase in phrases if phrase)

    @property
    def tier(self) -> Tier:
        """Return the tier of the hardest component."""
        parts = (AGGREGATES[self.aggregate], MAPS[self.map], FILTERS[self.filter], POSTS[self.post])
        return max((part.tier for part in parts), key=TIERS.index)

    def output(self, numbers: Sequence[int]) -> str | None:
        """Return what a right program prints for `numbers`, or None where too few of them survive the filter."""
        keep, transform = FILTERS[self.filter].meaning, MAPS[self.map].meaning
        survivors = [x for x in numbers if keep(x, self.filter_number)]
        if len(survivors) < MINIMUM_SURVIVORS:
            return None
        result = AGGREGATES[self.aggregate].meaning([transform(x, self.map_number) for x in survivors])
        if isinstance(result, list):
            return " ".join(map(str, result))
        return str(POSTS[self.post].meaning(result, self.post_number))
