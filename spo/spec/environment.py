"""Conversations: the environment that answers the policy's turns, and what a prompt carries to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import Field

from spo.errors import InvalidInput
from spo.spec.section import Section

# The environment that shows the outcome of a problem's public tests.
RETRY_WITH_ERRORS = "retry_with_errors"
MOST_TURNS = 1000
MOST_OBSERVATION_TOKENS = 1_000_000

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Value = (
    bool
    | Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(ge=-1e9, le=1e9)]
    | Annotated[str, Field(max_length=4096)]
    | None
)


class EnvironmentSpec(Section):
    """The environment of a job's problems, and where its conversations end."""

    name: Name = Field(description="Such as retry_with_errors, python, calculator, text_game; or one of your own.")
    max_turns: int = Field(default=8, ge=1, le=MOST_TURNS, description="Turns of the policy; a longer episode is cut.")
    max_observation_tokens: int = Field(
        default=512, ge=1, le=MOST_OBSERVATION_TOKENS, description="Longer observations are cut in the middle."
    )
    arguments: dict[Name, _Value] = Field(
        default_factory=dict,
        max_length=32,
        description="What the environment is told; in texts, {statement} is the problem's statement.",
    )


@dataclass(frozen=True)
class ConversationSetup:
    """One conversation: at most so many turns of the policy, observations cut to so many tokens.

    arguments: what the job tells the environment; problem: what the environment is told of the problem.
    """

    max_turns: int = 8
    max_observation_tokens: int = 512
    arguments: Mapping[str, object] = field(default_factory=dict)
    problem: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical JSON: the prompt's `environment_json`."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def setup_from_json(text: str) -> ConversationSetup:
    """The inverse of `to_json`; what is not there has its default. Raises InvalidInput (code "bad_environment")."""
    try:
        document = json.loads(text or "{}")
        names = ConversationSetup.__dataclass_fields__
        setup = ConversationSetup(**{name: value for name, value in document.items() if name in names})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"environment_json is no JSON object: {error}", code="bad_environment") from None
    numbers = {
        "max_turns": (setup.max_turns, MOST_TURNS),
        "max_observation_tokens": (setup.max_observation_tokens, MOST_OBSERVATION_TOKENS),
    }
    for name, (value, most) in numbers.items():
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInput(f"{name} of environment_json must be from 1 to {most}", code="bad_environment")
    if not isinstance(setup.arguments, Mapping) or not isinstance(setup.problem, Mapping):
        raise InvalidInput("arguments and problem of environment_json are objects", code="bad_environment")
    return setup
