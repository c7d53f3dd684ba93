"""Copies of held-out problems are found by their words or by their tests, and honest neighbours are kept."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.tasks.load import ContaminationIndex, _jaccard, _shingles, load_tasks
from spo.tasks.problem import Problem, ask_for_program
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


LONG = (
    "Solve this step by step and show all of your work. The very last line of what you write must be of the form "
    "Answer: X, where X is the answer and nothing else. Do not write anything after that line, and use no calculator."
)
EXAMPLES = "Here is how it is done. Question: What is 1 + 1? Answer: 2. Now answer this one in the same way. Question: "


def sums(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"What is {rng.randint(100, 999)} + {rng.randint(100, 999)}?" for _ in range(count)]


@pytest.mark.parametrize(("before", "after"), [("", ""), ("", LONG), (EXAMPLES, ""), (EXAMPLES, LONG)])
@pytest.mark.parametrize("held", [2, 5, 60])
def test_what_all_statements_share_makes_none_a_copy_and_hides_none(before: str, after: str, held: int) -> None:
    training, held_out = sums(100, 1), sums(held, 2)
    index = ContaminationIndex([problem(f"{before}{each} {after}", range(0)) for each in held_out], similarity=0.8)
    copies: Counter[str] = Counter()
    told = [problem(f"{before}{each} {after}", range(0)) for each in [*training, *held_out]]
    left = list(index.without_copies(told, copies))

    assert left == told[:100]
    assert copies == {"same statement": held}


def test_a_near_copy_is_found_behind_a_shared_instruction() -> None:
    held_out = [problem(f"{story(seed, 60)} {LONG}", range(0)) for seed in range(5)]
    index = ContaminationIndex(held_out, similarity=0.8)
    changed = " ".join("changed" if place == 30 else word for place, word in enumerate(story(3, 60).split()))
    assert index.find_copy(problem(f"{changed} {LONG}", range(0))) is not None
    assert index.find_copy(problem(f"{story(9, 60)} {LONG}", range(0))) is None


def test_an_instruction_that_is_known_is_no_part_of_a_statement() -> None:
    index = ContaminationIndex([problem_of(f"What is 2 + 2? {LONG}", "4")], 0.8, LONG)
    assert index.find_copy(problem_of(f"What is 2 + 3? {LONG}", "5")) is None
    assert index.find_copy(problem_of(f"what is 2 + 2 ? {LONG}", "4")) is not None


def problem_of(statement: str, answer: str) -> Problem:
    return Problem(statement=statement, tests=verdict.TestSet(answer=verdict.AnswerRule(expected=[answer])))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 5 + 3?", "What is 5 - 3?"),
        ("5 * 3", "5 / 3"),
        ("Is 5 < 3?", "Is 5 > 3?"),
        ("2^3", "2 * 3"),
        ("-5", "5"),
        ("What is 10\u00b2?", "What is 102?"),
        # Two vowels of Hindi, which are marks of their own.
        ("\u092e\u0947\u0902", "\u092e\u0948\u0902"),
    ],
)
def test_arithmetic_signs_tell_statements_apart(left: str, right: str) -> None:
    index = ContaminationIndex([problem_of(left, "1")], 0.8)
    assert index.find_copy(problem_of(right, "2")) is None
    assert index.find_copy(problem_of(f" {left.upper()} ", "1")) is not None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("\uff11\uff12 apples", "12 apples"),
        ("so\u00adfar and a\u200bb", "sofar and ab"),
        ("find x\u00b2", "find x^2"),
        ("in\u00a0full", "in full"),
        ("\ufb01nd it", "find it"),
    ],
)
def test_other_code_points_of_the_same_characters_do_not_hide_a_copy(left: str, right: str) -> None:
    for held_out, candidate in ((left, right), (right, left)):
        copy = ContaminationIndex([problem_of(held_out, "1")], 0.8).find_copy(problem_of(candidate, "1"))
        assert copy is not None
        assert copy.reason == "same statement"


def test_a_statement_of_several_problems_is_a_copy_by_its_content_alone() -> None:
    held_out = [problem_of("Guess.", str(number)) for number in range(3)]
    index = ContaminationIndex(held_out, 0.8)
    left = list(index.without_copies([problem_of("Guess.", str(number)) for number in range(1, 9)]))
    assert [each.tests.answer.expected[0] for each in left] == [str(number) for number in range(3, 9)]

    one = ContaminationIndex([problem_of("What is the capital of France?", "Paris")], 0.8)
    assert list(one.without_copies([problem_of("what is the capital of France", "paris")])) == []


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    held_out = [(story(seed), "") for seed in range(4)]
    similar = [(story(0) + " changed", "")]
    spec = TasksSpec(
        kind="jsonl",
        path=write(tmp_path / "train.jsonl", [*held_out, *similar, (story(7), ""), (story(7), "")]),
        evaluation_path=write(tmp_path / "test.jsonl", held_out),
        evaluation_problems=2,
    )
    assert load_tasks(spec).notes == (
        "1 rows that say what another says are left out",
        "5 training problems are left out as copies of held-out ones (same statement: 4, similar statement: 1)",
    )
