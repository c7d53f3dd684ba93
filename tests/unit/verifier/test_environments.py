"""The environments of the box that need no judge: what they compute, what they decide, what they refuse."""

from __future__ import annotations

import pytest

from services.verifier.environments.service import Calculator, Setup, TextGame, computed, fenced_call, tagged_call
from spo.errors import InvalidInput
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("2^10", "1024"),
        ("7 // 2 - -7 % 4", "2"),
        ("sqrt(16) / 8", "0.5"),
        ("max(1, gcd(12, 18), 3)", "6"),
        ("1 / 0", "error: division by zero"),
        ("(-1) ** 0.5", "error: the result is no real number"),
        ("9 ** 9 ** 9 ** 9", "error: the result has more than 4096 bits"),
        ("(2 ** 3000) * (2 ** 3000)", "error: a number has at most 4096 bits"),
        ("2 ** 1000", "error: the result has more than 50 digits"),
        ("1e308 * 10", "error: the result is not finite"),
        ("1 +", "error: this is no arithmetic expression"),
        ("(" * 240, "error: this is no arithmetic expression"),
        ("9" * 501, "error: an expression has at most 500 characters"),
    ],
)
def test_the_calculator_computes_within_its_bounds(expression: str, value: str) -> None:
    assert computed(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').system('id')", "().__class__", "x", "True", "'a' * 9", "[1]", "round(1, ndigits=2)"],
)
def test_the_calculator_knows_nothing_but_numbers(expression: str) -> None:
    assert computed(expression).startswith("error: only numbers")


def test_an_action_without_a_call_ends_the_episode() -> None:
    calculator = Calculator()
    asked = calculator.step(Setup(), {}, "first <calculator>1+1</calculator> then <calculator>2*4")
    assert (asked.text, asked.done, asked.label) == ("8", False, "calculator")
    assert calculator.step(Setup(), {}, "The answer is 8").done


def test_the_last_call_counts() -> None:
    assert tagged_call("<t>a</t><t>b</t>c", "t") == "b"
    assert tagged_call("a</t>", "t") is None
    assert fenced_call("```python\na\n```\n```text\nb\n```\n```py\nc", ("python", "py")) == "c"
    assert fenced_call("```a```", ("python",)) is None


def test_a_game_is_decided_by_itself_also_where_it_is_cut() -> None:
    game, setup = TextGame(), Setup({"low": 1, "high": 8, "guesses": 3})
    first = game.begin(setup, seed=5)
    again = game.begin(setup, seed=5)
    assert (first.state, first.text) == (again.state, again.text)
    assert {game.begin(setup, seed).state["number"] for seed in range(200)} == set(range(1, 9))
    assert first.verdict is not None
    assert first.verdict.outcome == OUTCOME_WRONG_ANSWER

    number = first.state["number"]
    low = game.step(setup, first.state, f"I say 9, no, {number - 1}")
    assert low.text == "Higher. 2 guesses are left."
    assert "number" not in low.text
    nothing = game.step(setup, low.state, "I give up")
    assert nothing.text == "That is no number. 1 guess is left."
    won = game.step(setup, nothing.state, str(number))
    lost = game.step(setup, nothing.state, str(number + 1))
    assert won.verdict is not None
    assert lost.verdict is not None
    assert (won.done, won.verdict.outcome) == (True, OUTCOME_ACCEPTED)
    assert (lost.done, lost.verdict.outcome) == (True, OUTCOME_WRONG_ANSWER)


@pytest.mark.parametrize(
    ("arguments", "pointer"),
    [({"low": 9, "high": 1}, "/arguments/high"), ({"low": "1"}, "/arguments/low"), ({"hihg": 1}, "/arguments/hihg")],
)
def test_arguments_that_an_environment_does_not_take_are_named(arguments: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        TextGame().begin(Setup(arguments), 0)
    assert [violation.pointer for violation in caught.value.violations] == [pointer]
