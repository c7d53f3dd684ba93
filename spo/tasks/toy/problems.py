"""The toy contest: small programming problems in words, with real tests and many right programs for each.

A program reads one line of 4 to 9 integers in [-20, 20] and prints an integer or, for sorted and reversed, a list.
No two chosen problems share a prompt or behave alike on either's tests, so held-out problems are truly new.
"""

import random

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.problem import DEFAULT_LIMITS, Problem, TaskSets
from spo.tasks.toy.grammar import (
    AGGREGATES,
    FILTERS,
    LIST_AGGREGATES,
    MAPS,
    PARAMETERS,
    POSTS,
    Composition,
)
from spo.tasks.toy.solutions import human_solutions
from spo.v1.verdict_pb2 import CHECKER_TOKENS, TestCase, TestSet

TESTS = 12
PUBLIC_TESTS = 3
MINIMUM_DISTINCT_OUTPUTS = 4
WRONG_SOLUTIONS = 3
# The grammar holds far more, but telling them apart takes time that grows with the square.
PROBLEMS_MAXIMUM = 1_000
_OMITTED_SHARE = 0.2

Examples = list[tuple[tuple[int, ...], str]]


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
