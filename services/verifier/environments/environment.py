"""What an environment is: two functions of values, and nothing that is kept between their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spo.errors import FieldViolation, InvalidInput
from spo.v1.verdict_pb2 import Verdict

# JSON values: an episode's state travels with it.
State = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """How an environment is set up for one problem. `seconds`: how long this call may take yet."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 30.0

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """An argument that is a whole number in a range. Raises InvalidInput."""
        value = self.arguments.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise bad_argument(name, f"must be a whole number from {low} to {high}")
        return value

    def text(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        """An argument that is text, one of the choices where there are any. Raises InvalidInput."""
        value = self.arguments.get(name, default)
        if not isinstance(value, str) or (choices and value not in choices):
            raise bad_argument(name, f"must be one of {', '.join(choices)}" if choices else "must be text")
        return value

    def only(self, *names: str) -> None:
        """Raises InvalidInput where there is an argument of another name."""
        for name in self.arguments:
            if name not in names:
                raise bad_argument(name, f"there is no such argument; there are: {', '.join(names)}")


@dataclass(frozen=True)
class Reply:
    """What an environment says to the policy, and what it knows of the episode from now on.

    score: of the turn just taken, between 0 and 1. verdict: of the whole episode, by environments that decide it
    themselves, and then at every turn: it is what the episode is worth where it is cut here.
    """

    text: str = ""
    state: State = field(default_factory=dict)
    done: bool = False
    score: float | None = None
    verdict: Verdict | None = None
    label: str = ""


class Environment(Protocol):
    """Answers the policy's turns. All that it knows of an episode is in the state, so any replica goes on."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        """What follows the problem's statement; `seed` decides what is random. Raises InvalidInput."""

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What follows when the policy writes `action`; the same for the same values where it can be."""


def bad_argument(name: str, message: str) -> InvalidInput:
    """An argument of the job's that the environment does not take."""
    violation = FieldViolation(f"/arguments/{name}", message)
    return InvalidInput(f"{name} {message}", code="bad_environment", violations=(violation,))
