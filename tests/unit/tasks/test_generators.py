"""Problems of reasoning-gym: splits that never meet, the same in every process, faults of generators by their field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.generate import names
from spo.tasks.load import load_tasks
from spo.tasks.problem import TaskSets
from tests.support.budget import sampled

# A process of reasoning-gym for each row takes three seconds: two rows a day, and more where these change.
SOURCES = ("spo/tasks/generate.py", "spo/tasks/sources.py")
# These take longer than a second for each problem.
SLOW = frozenset({"knight_swap", "zebra_puzzles", "intermediate_integration", "puzzle24", "arc_agi"})


def made(*generators: dict[str, Any], train: int = 20, held_out: int = 5, seed: int = 0) -> TaskSets:
    return load_tasks(
        TasksSpec(
            kind="reasoning_gym",
            generators=generators,  # type: ignore[arg-type]
            train_problems=train,
            evaluation_problems=held_out,
            seed=seed,
        )
    )


def statements(tasks: TaskSets) -> tuple[set[str], set[str]]:
    return {problem.statement for problem in tasks.train}, {problem.statement for problem in tasks.evaluation}


def test_problems_are_mixed_by_weight_and_scored_by_their_own_data_set() -> None:
    tasks = made({"name": "chain_sum", "settings": {"max_terms": 3}}, {"name": "gcd", "weight": 3}, train=21)

    assert [len(tasks.train), len(tasks.evaluation)] == [21, 5]
    assert sorted(problem.difficulty for problem in tasks.train) == ["chain_sum"] * 5 + ["gcd"] * 16
    problem = next(problem for problem in tasks.train if problem.difficulty == "chain_sum")
    scoring = problem.tests.scoring_function
    arguments = json.loads(scoring.arguments_json)
    assert (scoring.library, arguments["dataset"], arguments["tag"]) == ("reasoning_gym", "chain_sum", "answer")
    assert arguments["entry"]["metadata"]["num_terms"] <= 3
    assert problem.statement.startswith(arguments["entry"]["question"])
    assert problem.human_solutions == (f"<answer>{arguments['entry']['answer']}</answer>",)
    again = made({"name": "chain_sum", "settings": {"max_terms": 3}}, {"name": "gcd", "weight": 3}, train=21)
    assert again == tasks


def test_a_question_that_both_splits_would_make_is_held_out_only() -> None:
    small = {"name": "chain_sum", "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}

    tasks = made(small, train=100, held_out=60)

    train, held_out = statements(tasks)
    assert (len(train), len(held_out)) == (100, 60)
    assert not train & held_out


AT_FAULT = [
    ({"name": "chain_sums"}, "/tasks/generators/1/name", "did you mean chain_sum"),
    ({"name": "composite"}, "/tasks/generators/1/name", "reasoning-gym has no data set composite"),
    ({"name": "gcd", "settings": {"bits": 3}}, "/tasks/generators/1/settings/bits", "gcd has the settings"),
    ({"name": "gcd", "settings": {"min_numbers": 0}}, "/tasks/generators/1/settings", "gcd cannot be made"),
    ({"name": "coin_flip", "settings": {"max_trials": 3}}, "/tasks/generators/1", "different problems"),
]


@pytest.mark.parametrize(("generator", "pointer", "told"), sampled(AT_FAULT, 2, lambda _: SOURCES))
def test_a_generator_at_fault_is_named_by_its_field(generator: dict[str, Any], pointer: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        made({"name": "lcm"}, generator, train=400)

    (fault,) = caught.value.violations
    assert fault.pointer == pointer
    assert told in fault.message


@pytest.mark.slow
def test_all_quick_generators_make_disjoint_splits_that_no_hash_seed_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [name for name in names() if name not in SLOW]
    assert len(known) >= 98
    generators = [{"name": name} for name in known]

    tasks = made(*generators, train=2 * len(known), held_out=len(known))

    train, held_out = statements(tasks)
    assert (len(train), len(held_out)) == (2 * len(known), len(known))
    assert not train & held_out
    assert {problem.difficulty for problem in tasks.train} == set(known)
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert made(*generators, train=2 * len(known), held_out=len(known)) == tasks


TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("chain_sum", {"min_terms": 2**40, "max_terms": 2**40}),
    ("chain_sum", {"max_digits": 10**9}),
    ("gcd", {"max_numbers": 2**50}),
    ("letter_counting", {"max_words": 10**8}),
    ("n_queens", {"n": 10**6}),
    ("spiral_matrix", {"max_n": 10**7}),
]


@pytest.mark.parametrize(("name", "settings"), sampled(TOO_MUCH, 2, lambda _: SOURCES))
def test_settings_that_would_take_all_memory_are_refused_where_they_stand(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        made({"name": name, "settings": settings})

    assert caught.value.code == "unusable_generator"
    assert caught.value.violations[0].pointer.startswith("/tasks/generators/0/settings")
