"""Copies of held-out problems are found by their words or by their tests, and honest neighbours are kept."""

import json
import random
from pathlib import Path

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.tasks.decontaminate import ContaminationIndex, _jaccard, _shingles
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem
from spo.tasks.published import ask_for_program
from spo.v1 import verdict_pb2 as verdict

WORDS = [f"word{number}" for number in range(400)]


def story(seed: int, length: int = 200) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(length))


def problem(statement: str, tests: range) -> Problem:
    cases = [verdict.TestCase(stdin=f"{number}\n".encode(), stdout=f"{number**2}\n".encode()) for number in tests]
    return Problem(statement=ask_for_program(statement), tests=verdict.TestSet(tests=cases))


HELD_OUT = problem(story(0), range(10))
INDEX = ContaminationIndex([problem(story(9), range(900, 910)), HELD_OUT], similarity=0.8)


def reason(candidate: Problem) -> str | None:
    copy = INDEX.find_copy(candidate)
    if copy is None:
        return None
    assert copy.held_out_id == HELD_OUT.problem_id
    return copy.reason


def test_case_blanks_and_punctuation_do_not_hide_a_copy() -> None:
    disguised = story(0).upper().replace(" ", ",\n\n ")
    assert reason(problem(disguised, range(100, 110))) == "same statement"


def test_a_statement_with_a_few_words_changed_is_a_copy() -> None:
    words = story(0).split()
    words[20] = words[120] = "changed"
    assert reason(problem(" ".join(words), range(100, 110))) == "similar statement"


def test_a_statement_half_of_which_is_new_is_not_a_copy() -> None:
    half = " ".join(story(0).split()[:100] + story(5).split()[:100])
    assert reason(problem(half, range(100, 110))) is None


def test_the_shared_instruction_makes_no_copies_of_short_statements() -> None:
    index = ContaminationIndex([problem("Print the sum.", range(5))], similarity=0.3)
    assert index.find_copy(problem("Find a longest path.", range(100, 105))) is None


@pytest.mark.parametrize("similarity", [0.1, 0.5, 0.8, 1.0])
def test_the_index_finds_what_comparing_with_every_held_out_statement_finds(similarity: float) -> None:
    rng = random.Random(1)
    few = WORDS[:6]
    held_out = [problem(" ".join(rng.choices(few, k=rng.randint(1, 30))), range(0)) for _ in range(100)]
    index = ContaminationIndex(held_out, similarity)
    shingles = [_shingles(each) for each in held_out]
    found = []
    for _ in range(200):
        # Half of one of them, so that some are as similar as each limit asks.
        words = rng.choice(held_out).statement.split()[: rng.randint(1, 30)]
        candidate = problem(" ".join(words + rng.choices(few, k=rng.randint(0, 4))), range(0))
        nearest = max(_jaccard(_shingles(candidate), each) for each in shingles)
        copy = index.find_copy(candidate)
        assert (copy is not None) == (nearest >= similarity)
        assert copy is None or copy.similarity == nearest
        found.append(copy is not None)
    assert any(found)


def test_the_same_tests_in_other_words_are_a_copy() -> None:
    assert reason(problem(story(1), range(4, 12))) == "same tests"


def test_two_tests_in_common_are_chance() -> None:
    assert reason(problem(story(2), range(8, 10))) is None
    assert reason(problem(story(3), range(7, 30))) is None


def write(file: Path, rows: list[tuple[str, str]]) -> str:
    lines = [
        json.dumps({"statement": text, "difficulty": level, "tests": [{"stdin": text, "stdout": text}]})
        for text, level in rows
    ]
    file.write_text("\n".join(lines))
    return str(file)


def test_a_job_with_a_held_out_file_never_trains_on_copies_of_any_of_it(tmp_path: Path) -> None:
    held_out = [(story(seed), "") for seed in range(4)]
    copies = [(story(seed) + " changed", "") for seed in range(4)]
    fresh = [(story(seed), "") for seed in range(10, 13)]
    spec = TasksSpec(
        kind="jsonl",
        path=write(tmp_path / "train.jsonl", held_out + copies + fresh),
        evaluation_path=write(tmp_path / "test.jsonl", held_out),
        evaluation_kind="jsonl",
        train_problems=100,
        evaluation_problems=2,
    )
    assert {p.statement for p in load_tasks(spec).train} == {text for text, _ in fresh}
    loose = load_tasks(spec.model_copy(update={"near_duplicate_similarity": 1.0}))
    assert len(loose.train) == len(copies) + len(fresh)


def test_only_the_asked_difficulties_are_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [(story(seed), ("easy", "hard")[seed % 2]) for seed in range(10)])
    spec = TasksSpec(kind="jsonl", path=path, train_problems=10, evaluation_problems=2, difficulties=("hard",))
    sets = load_tasks(spec)
    assert {p.difficulty for p in sets.train + sets.evaluation} == {"hard"}
    assert (len(sets.train), len(sets.evaluation)) == (3, 2)


@pytest.mark.parametrize(
    ("tasks", "pointer"),
    [
        ({"kind": "toy", "difficulties": ["easy"]}, "/tasks/difficulties"),
        ({"kind": "jsonl", "path": "x", "evaluation_kind": "taco"}, "/tasks/evaluation_kind"),
    ],
)
def test_filters_that_could_not_work_are_refused_at_submit(tasks: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec({"model": {"path": "m"}, "tasks": tasks})
    assert pointer in {violation.pointer for violation in caught.value.violations}
