"""The toy contest: right programs pass, wrong ones do not, and held-out problems are new."""

import contextlib
import io
import random
import subprocess
import sys

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.toy import (
    AGGREGATES,
    FILTERS,
    MAPS,
    POSTS,
    TIERS,
    Composition,
    every_program,
    make_examples,
    sample_composition,
    sample_pair,
    toy_tasks,
)


@pytest.fixture(scope="module")
def contest() -> TaskSets:
    return toy_tasks(train_problems=160, evaluation_problems=80, seed=0)


def printed_by(program: str, stdin: str) -> list[str]:
    """Words a trusted program prints, run here and now."""
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdin = before
    return output.getvalue().split()


def printed_by_or_nothing(program: str, stdin: str) -> list[str]:
    # A program for another problem may divide by the length of an empty list.
    with contextlib.suppress(Exception):
        return printed_by(program, stdin)
    return []


def passes(program: str, problem: Problem) -> bool:
    return all(
        printed_by_or_nothing(program, test.stdin.decode()) == test.stdout.decode().split()
        for test in problem.tests.tests
    )


def test_every_human_solution_passes_every_test(contest: TaskSets) -> None:
    for problem in contest.train + contest.evaluation:
        for program in problem.human_solutions:
            assert passes(program, problem), (problem.statement, program)


def test_every_spelling_of_every_component_is_right() -> None:
    rng = random.Random(7)
    for aggregate in AGGREGATES:
        for transform, keep, post in zip(MAPS, FILTERS, [*POSTS, *POSTS], strict=False):
            composition = Composition(aggregate, transform, keep, post, *(rng.randint(2, 9) for _ in range(3)))
            examples = make_examples(composition)[:1]
            for program in every_program(composition):
                for numbers, output in examples:
                    assert printed_by(program, " ".join(map(str, numbers))) == output.split(), program


def test_human_solutions_run_as_real_processes(contest: TaskSets) -> None:
    for problem in contest.evaluation[:8]:
        for program in problem.human_solutions[:2]:
            test = problem.tests.tests[0]
            finished = subprocess.run(
                [sys.executable, "-I", "-c", program], input=test.stdin, capture_output=True, timeout=30, check=True
            )
            assert finished.stdout.split() == test.stdout.split()


def test_a_problem_has_several_different_right_programs(contest: TaskSets) -> None:
    assert all(len(problem.human_solutions) >= 6 for problem in contest.train)
    assert all(len(set(problem.human_solutions)) == len(problem.human_solutions) for problem in contest.train)


def test_every_wrong_solution_fails_a_test(contest: TaskSets) -> None:
    for problem in contest.train:
        assert problem.wrong_solutions
        for program in problem.wrong_solutions:
            assert not passes(program, problem), (problem.statement, program)


def test_hard_coded_answers_pass_one_public_test_only_by_luck_of_the_reward(contest: TaskSets) -> None:
    problem = next(problem for problem in contest.train if problem.wrong_solutions[-1].startswith("print("))
    hard_coded = problem.wrong_solutions[-1]
    outputs = [test.stdout.decode().split() for test in problem.public_tests.tests]
    assert printed_by(hard_coded, "") in outputs


def test_three_of_twelve_tests_are_public(contest: TaskSets) -> None:
    for problem in contest.evaluation:
        assert [test.public for test in problem.tests.tests] == [True] * 3 + [False] * 9
        assert len(problem.public_tests.tests) == 3


def test_no_held_out_problem_shares_its_prompt_or_its_behaviour_with_a_training_problem(contest: TaskSets) -> None:
    assert not {p.statement for p in contest.train} & {p.statement for p in contest.evaluation}
    for trained in contest.train:
        program = trained.human_solutions[0]
        for held_out in contest.evaluation:
            test_by_test = (
                printed_by_or_nothing(program, test.stdin.decode()) == test.stdout.decode().split()
                for test in held_out.tests.tests
            )
            assert not all(test_by_test), (trained.statement, held_out.statement)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    spec = TasksSpec(kind="toy", train_problems=20, evaluation_problems=10, seed=3)
    again, other = load_tasks(spec), load_tasks(spec.model_copy(update={"seed": 4}))
    first = load_tasks(spec)
    assert [p.problem_id for p in first.train] == [p.problem_id for p in again.train]
    assert not {p.problem_id for p in first.train} & {p.problem_id for p in other.train}


def test_held_out_problems_do_not_depend_on_the_number_of_training_problems() -> None:
    assert toy_tasks(5, 10, 0).evaluation == toy_tasks(20, 10, 0).evaluation


def test_more_problems_than_the_grammar_holds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="has 1000 problems"):
        load_tasks(TasksSpec(kind="toy", train_problems=1_000, evaluation_problems=1))


def test_a_problem_is_identified_by_all_that_decides_a_reward() -> None:
    first, second = toy_tasks(2, 0, 0).train
    same_words = Problem(statement=first.statement, tests=second.tests)
    same_tests = Problem(statement=second.statement, tests=first.tests)
    fenced = Problem(statement=first.statement, tests=first.tests, response_format="fenced")
    assert len({p.problem_id for p in (first, second, same_words, same_tests, fenced)}) == 5
    assert Problem(statement=first.statement, tests=first.tests).problem_id == first.problem_id


def test_the_corpus_of_pi0_is_right_less_often_the_harder_the_tier() -> None:
    rng = random.Random(0)
    right, seen = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
    compositions = {}
    while len(compositions) < 2_000:
        composition = sample_composition(rng)
        compositions[composition.prompt] = composition
    pairs = (sample_pair(rng, "standard") for _ in range(20_000))
    for statement, program in pairs:
        if composition := compositions.get(statement):
            seen[composition.tier] += 1
            right[composition.tier] += all(
                printed_by_or_nothing(program, " ".join(map(str, numbers))) == output.split()
                for numbers, output in make_examples(composition)
            )
    shares = [right[tier] / seen[tier] for tier in TIERS[1:]]
    assert shares == sorted(shares, reverse=True)
    assert 0.02 < sum(right.values()) / sum(seen.values()) < 0.15
