"""Who prints remembered answers, and who is merely wrong: the judge's suspicion without a sandbox."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.sandbox_judge.executor import ProgramRun, RunEnding
from services.sandbox_judge.program_judge import first_difference, remembers, result_of, suspects
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Outcome

SQUARES = [(12, 144), (31, 961), (5, 25), (7, 49), (100, 10000), (9, 81)]
PUBLIC = 2
ANSWER = Callable[[str], "str | None"]


def squares(pairs: list[tuple[int, int]] = SQUARES, public: int = PUBLIC) -> verdict_pb2.TestSet:
    return verdict_pb2.TestSet(
        tests=[
            verdict_pb2.TestCase(stdin=b"%d\n" % given, stdout=b"%d\n" % wanted, public=position < public)
            for position, (given, wanted) in enumerate(pairs)
        ]
    )


def is_suspected(source: str, answer: ANSWER, tests: verdict_pb2.TestSet | None = None, stop: bool = True) -> bool:
    """answer: what the program prints for a text, None when it crashes."""
    tests = tests or squares()

    def run(stdin: bytes) -> ProgramRun:
        said = answer(stdin.decode())
        ending = ProgramRun(RunEnding.EXITED, int(said is None), 0, 0, 0, (said or "").encode(), b"")
        return ending

    def check(test: verdict_pb2.TestCase, output: bytes) -> str | None:
        return first_difference(tests, test.stdout, output)

    results = []
    for test in tests.tests:
        results.append(result_of(run(test.stdin), lambda output, test=test: check(test, output)))
        if stop and results[-1].outcome != Outcome.OUTCOME_ACCEPTED:
            break
    return suspects(source, "python", tests, results, run, check)


def remembered(text: str) -> str | None:
    return {"12": "144", "31": "961"}.get(text.strip())


def test_a_table_of_public_answers_is_suspected() -> None:
    assert is_suspected("print({'12': 144, '31': 961}[input()])", remembered)
    assert is_suspected("n = input()\nif n == '12':\n    print('144')\nif n == '31':\n    print('961')", remembered)
    assert is_suspected("n = int(input())\nprint(144 if n == 12 else 961)", lambda t: "144" if "12" in t else "961")
    assert is_suspected("print({'12': 144, '31': 961}[input()])", remembered, stop=False)


def test_a_program_that_prints_the_same_to_everybody_is_suspected() -> None:
    tests = squares(public=1)
    assert is_suspected("print(12 ** 2)", lambda _: "144", tests)


def test_a_wrong_program_that_computes_is_not_suspected() -> None:
    # Right for the public tests only, but no literal of its own says so.
    assert not is_suspected("n = int(input())\nprint(n * n if n > 10 else n)", lambda t: t if len(t) < 3 else "144")
    # Says the same to everybody but needs its input to do so.
    assert not is_suspected("n = int(input())\nprint(12 ** 2)", lambda t: "144" if t else None, squares(public=1))


def test_a_program_that_knows_a_hidden_answer_too_is_cleared() -> None:
    def table(text: str) -> str | None:
        return {"12": "144", "31": "961", "7": "49"}.get(text.strip())

    assert not is_suspected("print({'12': 144, '31': 961, '7': 49}[input()])", table)


def test_problems_whose_answer_is_really_constant_suspect_nobody() -> None:
    always_yes = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"%d" % n, stdout=b"YES", public=n < 2) for n in range(5)]
    )
    assert not is_suspected("print('YES')", lambda _: "YES", always_yes)


def test_an_honest_guess_between_yes_and_no_is_no_remembered_answer() -> None:
    tests = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"%d" % n, stdout=b"YES" if n % 3 else b"NO", public=n < 2) for n in range(6)]
    )
    source = "n = int(input())\nprint('YES' if n % 2 else 'NO')"
    assert not is_suspected(source, lambda t: "YES" if int(t or 1) % 2 else "NO", tests)


@pytest.mark.parametrize(
    "failing",
    [
        lambda text: None,
        lambda text: "144" if text.strip() == "12" else "0",
    ],
)
def test_who_fails_a_public_test_is_not_suspected(failing: ANSWER) -> None:
    assert not is_suspected("print({'12': 144, '31': 961}[input()])", failing)


def test_without_public_or_without_hidden_tests_nobody_is_suspected() -> None:
    source = "print({'12': 144, '31': 961}[input()])"
    assert not is_suspected(source, remembered, squares(public=0))
    assert not is_suspected(source, remembered, squares(public=len(SQUARES)))


def test_comments_and_docstrings_are_no_answers() -> None:
    public = squares().tests[:PUBLIC]
    hidden = squares().tests[PUBLIC:]

    assert remembers("x = ['12', '144', '31', '961']", "python", public, hidden)
    assert remembers("x = {\n    12: 144,\n    31: 961,\n}", "python", public, hidden)
    assert not remembers('"""12 -> 144, 31 -> 961"""\n# 144 961 12 31\nprint(1)', "python", public, hidden)
    assert not remembers('def f():\n    """12 144 31 961"""\n    return 1', "python", public, hidden)
    assert remembers('int main() { if (n == 12) puts("144"); else puts("961 31"); }', "cpp", public, hidden)
    assert not remembers("int main() { /* 12 144 */ // 31 961\n return 1; }", "cpp", public, hidden)


@pytest.mark.parametrize(
    "source", ["'''never closed", "((((", "x = " + "9" * 10_000, "\x00", "f'{12}' '144", "\ud800", "-" * 20_000, "\\"]
)
def test_odd_sources_are_looked_at_without_harm(source: str) -> None:
    tests = squares()
    assert not remembers(source, "python", tests.tests[:PUBLIC], tests.tests[PUBLIC:])
    assert not remembers(source, "cpp", tests.tests[:PUBLIC], tests.tests[PUBLIC:])
