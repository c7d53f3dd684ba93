"""The toy contest: the language of its prompts, problems with real tests, the programs people write for them, and
what its pi0 is trained on.

The toy contest's language: words of a prompt and what each of them means.
A prompt is `{aggregate} of [{map} of] the {filter} [{post}]`, for example "sum of squares of the even numbers plus 3".
A component has a meaning (a Python function), a tier (how rarely pi0 gets it right) and a confuser (what pi0 writes
instead most of the time).

The toy contest: small programming problems in words, with real tests and many right programs for each.
A program reads one line of 4 to 9 integers in [-20, 20] and prints an integer or, for sorted and reversed, a list.
No two chosen problems share a prompt or behave alike on either's tests, so held-out problems are truly new.

What pi0 of the toy contest is trained on: true descriptions beside programs that are only half right.
Each component of a program is right with a probability by its tier; otherwise it is mostly its fixed confuser. So the
mode of pi0 is often wrong, and cooling the temperature does not repair it: there is room to learn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.problem import DEFAULT_LIMITS, Problem, TaskSets
from spo.v1.verdict_pb2 import CHECKER_TOKENS, TestCase, TestSet

Tier = Literal["easy", "medium", "hard", "very hard"]
TIERS: tuple[Tier, ...] = ("easy", "medium", "hard", "very hard")
MINIMUM_SURVIVORS = 2
PARAMETERS = range(2, 10)

Meaning = TypeVar("Meaning")

HEADERS = (
    "a=list(map(int,input().split()))\n",
    "a=[int(v) for v in input().split()]\n",
    "import sys\na=list(map(int,sys.stdin.read().split()))\n",
)
STYLES = ("inline", "named", "loop", "functional")

# Expressions of one element x; {n} is the component's number.
MAP_SPELLINGS: dict[str, tuple[str, ...]] = {
    "identity": ("x",),
    "squares": ("x*x", "x**2"),
    "cubes": ("x*x*x", "x**3"),
    "absolute": ("abs(x)",),
    "doubles": ("2*x", "x*2", "x+x"),
    "halves": ("x//2",),
    "opposites": ("-x", "0-x"),
    "successors": ("x+1", "1+x"),
    "predecessors": ("x-1", "-1+x"),
    "remainders": ("x%{n}",),
    "digits": ("abs(x)%10",),
}
FILTER_SPELLINGS: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "even": ("x%2==0", "not x%2", "x%2<1"),
    "odd": ("x%2", "x%2==1", "x%2!=0", "x%2>0"),
    "positive": ("x>0", "0<x"),
    "negative": ("x<0", "0>x"),
    "nonzero": ("x!=0", "x"),
    "multiples": ("x%{n}==0", "not x%{n}", "x%{n}<1"),
    "nonmultiples": ("x%{n}!=0", "x%{n}", "x%{n}>0"),
    "above": ("x>{n}", "{n}<x"),
    "below": ("x<{n}", "{n}>x"),
    "multidigit": ("abs(x)>9", "9<abs(x)"),
    "singledigit": ("abs(x)<10", "10>abs(x)"),
}
# (lines before the print, printed expression); {e} is the list.
AGGREGATE_SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "sum": (("", "sum({e})"), ("s=0\nfor y in {e}:\n s+=y\n", "s")),
    "count": (("", "len({e})"), ("", "sum(1 for y in {e})")),
    "max": (("", "max({e})"), ("", "sorted({e})[-1]")),
    "min": (("", "min({e})"), ("", "sorted({e})[0]")),
    "product": (("import math\n", "math.prod({e})"), ("s=1\nfor y in {e}:\n s*=y\n", "s")),
    "spread": (("", "(max({e})-min({e}))"), ("c=sorted({e})\n", "(c[-1]-c[0])")),
    "average": (("", "(sum({e})//len({e}))"), ("c={e}\n", "(sum(c)//len(c))")),
    "first": (("", "{e}[0]"), ("", "{e}.pop(0)")),
    "last": (("", "{e}[-1]"), ("", "{e}.pop()")),
    "second": (("", "sorted({e})[-2]"), ("", "sorted({e},reverse=True)[1]")),
    "distinct": (("", "len(set({e}))"),),
    "sorted": (("", "sorted({e})"), ("c=sorted({e})\n", "c")),
    "reversed": (("", "{e}[::-1]"), ("", "reversed({e})")),
}
POST_SPELLINGS: dict[str, tuple[str, ...]] = {
    "none": ("{v}",),
    "plus": ("{v}+{n}", "{n}+{v}"),
    "minus": ("{v}-{n}", "-{n}+{v}"),
    "times": ("{v}*{n}", "{n}*{v}"),
    "modulo": ("{v}%{n}",),
    "divided": ("{v}//{n}",),
}

TESTS = 12
PUBLIC_TESTS = 3
MINIMUM_DISTINCT_OUTPUTS = 4
WRONG_SOLUTIONS = 3
# The grammar holds far more, but telling them apart takes time that grows with the square.
PROBLEMS_MAXIMUM = 1_000
_OMITTED_SHARE = 0.2

Examples = list[tuple[tuple[int, ...], str]]

Difficulty = Literal["standard", "hard"]

RIGHT_SHARE: Mapping[Difficulty, Mapping[Tier, float]] = {
    "standard": {"easy": 0.80, "medium": 0.50, "hard": 0.24, "very hard": 0.05},
    "hard": {"easy": 0.75, "medium": 0.40, "hard": 0.12, "very hard": 0.02},
}
CONFUSER_SHARE = 0.75
DAMAGED_SHARE = 0.05


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


def human_solutions(composition: Composition, rng: random.Random) -> tuple[str, ...]:
    """Return one right program per header and style, spellings at random, in random order, without repeats."""
    programs = [write_program(composition, header, style, rng) for header, style in product(HEADERS, STYLES)]
    rng.shuffle(programs)
    return tuple(dict.fromkeys(programs))


def write_program(composition: Composition, header: str, style: str, rng: random.Random) -> str:
    """Return a program for `composition` with spellings at random."""
    parts = _Parts(
        header,
        style,
        rng.choice(MAP_SPELLINGS[composition.map]),
        rng.choice(FILTER_SPELLINGS[composition.filter]),
        rng.choice(AGGREGATE_SPELLINGS[composition.aggregate]),
        rng.choice(POST_SPELLINGS[composition.post]),
    )
    return _assemble(composition, parts)


def every_program(composition: Composition) -> Iterator[str]:
    """Yield each right program that the headers, styles and spellings can make."""
    seen = set()
    for chosen in product(
        HEADERS,
        STYLES,
        MAP_SPELLINGS[composition.map],
        FILTER_SPELLINGS[composition.filter],
        AGGREGATE_SPELLINGS[composition.aggregate],
        POST_SPELLINGS[composition.post],
    ):
        program = _assemble(composition, _Parts(*chosen))
        if program not in seen:
            seen.add(program)
            yield program


class _Parts(NamedTuple):
    """How one program is written: its header, its style, and the spelling of each component."""

    header: str
    style: str
    map: str
    filter: str
    aggregate: tuple[str, str]
    post: str


def _assemble(composition: Composition, parts: _Parts) -> str:
    element = parts.map.format(n=composition.map_number)
    condition = parts.filter.format(n=composition.filter_number)
    lines, values = _survivors(parts.style, element, condition)
    before, result = (part.format(e=values) for part in parts.aggregate)
    if composition.aggregate in LIST_AGGREGATES:
        return f"{parts.header}{lines}{before}print(*{result})"
    printed = parts.post.format(v=result, n=composition.post_number)
    return f"{parts.header}{lines}{before}print({printed})"


def _survivors(style: str, element: str, condition: str) -> tuple[str, str]:
    """Return (lines that come first, expression of the list of mapped survivors)."""
    comprehension = f"[{element} for x in a if {condition}]" if condition else f"[{element} for x in a]"
    match style:
        case "inline":
            return "", comprehension
        case "named":
            return f"b={comprehension}\n", "b"
        case "loop":
            body = f" if {condition}:\n  b.append({element})\n" if condition else f" b.append({element})\n"
            return f"b=[]\nfor x in a:\n{body}", "b"
        case "functional":
            return f"b=list({_functional(element, condition)})\n", "b"
    raise ValueError(f"unknown style {style!r}")


def _functional(element: str, condition: str) -> str:
    survivors = f"filter(lambda x:{condition},a)" if condition else "a"
    return survivors if element == "x" else f"map(lambda x:{element},{survivors})"


def toy_tasks(train_problems: int, evaluation_problems: int, seed: int) -> TaskSets:
    """Return disjoint training and held-out problems; the held-out ones depend only on their number and the seed."""
    wanted = train_problems + evaluation_problems
    if wanted > PROBLEMS_MAXIMUM:
        raise InvalidInput(
            f"the toy contest has {PROBLEMS_MAXIMUM} problems, not {wanted}",
            violations=(FieldViolation("/tasks/train_problems", f"with the held-out ones at most {PROBLEMS_MAXIMUM}"),),
        )
    rng = random.Random(f"toy contest {seed}")
    chosen: list[tuple[Composition, Examples]] = []
    while len(chosen) < wanted:
        composition = sample_composition(rng)
        examples = make_examples(composition)
        if len({output for _, output in examples}) < MINIMUM_DISTINCT_OUTPUTS:
            continue
        if not any(_behave_alike(composition, examples, *other) for other in chosen):
            chosen.append((composition, examples))
    problems = [toy_problem(composition, examples) for composition, examples in chosen]
    return TaskSets(
        train=tuple(problems[evaluation_problems:]),
        evaluation=tuple(problems[:evaluation_problems]),
    )


def sample_composition(rng: random.Random) -> Composition:
    """Return a random problem of the grammar; the map and the post are optional."""
    aggregate = rng.choice(list(AGGREGATES))
    transform = "identity" if rng.random() < _OMITTED_SHARE else rng.choice(list(MAPS))
    post = "none" if rng.random() < _OMITTED_SHARE else rng.choice(list(POSTS))
    return Composition(
        aggregate=aggregate,
        map=transform,
        filter=rng.choice(list(FILTERS)),
        post="none" if aggregate in LIST_AGGREGATES else post,
        map_number=rng.choice(PARAMETERS),
        filter_number=rng.choice(PARAMETERS),
        post_number=rng.choice(PARAMETERS),
    )


def make_examples(composition: Composition) -> Examples:
    """Return the inputs and right outputs of a composition's tests; the same for the same prompt, always."""
    rng = random.Random(composition.prompt)
    examples: dict[tuple[int, ...], str] = {}
    while len(examples) < TESTS:
        numbers = tuple(rng.randint(-20, 20) for _ in range(rng.randint(4, 9)))
        output = composition.output(numbers)
        if output is not None:
            examples[numbers] = output
    return list(examples.items())


def toy_problem(composition: Composition, examples: Examples) -> Problem:
    """Return the problem of a composition: three public tests and nine hidden ones, right and wrong programs."""
    rng = random.Random(f"solutions of {composition.prompt}")
    cases = [
        TestCase(
            stdin=f"{' '.join(map(str, numbers))}\n".encode(),
            stdout=f"{output}\n".encode(),
            public=index < PUBLIC_TESTS,
        )
        for index, (numbers, output) in enumerate(examples)
    ]
    return Problem(
        statement=composition.prompt,
        tests=TestSet(tests=cases, checker=CHECKER_TOKENS, limits=DEFAULT_LIMITS),
        human_solutions=human_solutions(composition, rng),
        wrong_solutions=(*_mistaken_programs(composition, examples, rng), *_hard_coded_programs(composition, examples)),
        difficulty=composition.tier,
    )


def _behave_alike(left: Composition, left_examples: Examples, right: Composition, right_examples: Examples) -> bool:
    return _solves(left, right_examples) or _solves(right, left_examples)


def _solves(composition: Composition, examples: Examples) -> bool:
    return all(composition.output(numbers) == output for numbers, output in examples)


def _mistaken_programs(composition: Composition, examples: Examples, rng: random.Random) -> list[str]:
    """Return programs for other compositions that fail at least one test."""
    programs: list[str] = []
    while len(programs) < WRONG_SOLUTIONS:
        other = sample_composition(rng)
        if not _solves(other, examples):
            programs.append(human_solutions(other, rng)[0])
    return programs


def _hard_coded_programs(composition: Composition, examples: Examples) -> list[str]:
    """Return programs that print the answer of one public test: what a weak reward lets through."""
    if composition.aggregate in LIST_AGGREGATES:
        return []
    return list(dict.fromkeys(f"print({output})" for _, output in examples[:PUBLIC_TESTS]))


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


def newest_model(models: Path, difficulty: str) -> Path | None:
    """The folder of the pi0 built last below `models`, None where there is none."""
    made = models.glob(f"toy-{difficulty}-*/config.json")
    newest = max(made, key=lambda config: config.stat().st_mtime, default=None)
    return newest.parent if newest else None


def wanted_difficulty(document: Mapping[str, Any]) -> str | None:
    """The difficulty of a spec of the toy contest that names no model, None of every other spec."""
    tasks, model = document.get("tasks"), document.get("model", {})
    if not isinstance(tasks, Mapping) or not isinstance(model, Mapping) or tasks.get("kind") != "toy":
        return None
    return None if model.get("path") else "hard" if tasks.get("difficulty") == "hard" else "standard"
