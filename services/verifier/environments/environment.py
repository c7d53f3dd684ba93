"""What an environment is: two functions of values, nothing kept between their calls, and the sealed state of an
episode between them.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from blake3 import blake3

from services.verifier import redis_keys as own_keys
from spo.errors import FieldViolation, InternalError, InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.v1.verdict_pb2 import Verdict

# JSON values: an episode's state travels with it.
State = dict[str, Any]

MOST_STATE_BYTES = 64 << 10
# Of one that travels within another, in base 64.
MOST_INNER_STATE_BYTES = 47 << 10
_KEY_BYTES = _SEAL_BYTES = 32
# KEYS: the shared key.  ARGV: a new one, for where there is none.  Returns the one that holds.
_FIRST_WINS = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
"""


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


class Seal(Protocol):
    """How states travel."""

    def seal(self, episode: str, state: State) -> bytes:
        """The bytes of a state."""

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput."""


class OpenState:
    """States as they are, for servers of environments that only the verifiers ask: those sign what passes on."""

    def seal(self, episode: str, state: State) -> bytes:
        """The state as JSON. Raises InternalError (code "environment_broken") on what is none, or too much of it."""
        return _written(state, MOST_INNER_STATE_BYTES)

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput (code "bad_environment_state")."""
        try:
            state: State = json.loads(sealed)
        except ValueError:
            raise InvalidInput("the episode's state is no JSON", code="bad_environment_state") from None
        return state


class StateSeal:
    """Signs states with a key that all replicas share: the first one has made it, and it is in Redis alone."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = self._shared_key()

    def seal(self, episode: str, state: State) -> bytes:
        """The signed bytes of a state; `episode` names the environment and its setup, and is signed with it.

        Raises InternalError (code "environment_broken") on a state that is no JSON or larger than MOST_STATE_BYTES.
        """
        written = _written(state, MOST_STATE_BYTES)
        return self._signature(episode, written) + written

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput (code "bad_environment_state") on what no replica has signed."""
        signature, written = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(signature, self._signature(episode, written)):
            # Another key, where Redis has lost the first one.
            self._key = self._shared_key()
            if not hmac.compare_digest(signature, self._signature(episode, written)):
                message = "the episode's state is none that an environment of this platform has given out"
                raise InvalidInput(message, code="bad_environment_state")
        state: State = json.loads(written)
        return state

    def _signature(self, episode: str, written: bytes) -> bytes:
        named = episode.encode()
        return blake3(len(named).to_bytes(8, "little") + named + written, key=self._key).digest()

    def _shared_key(self) -> bytes:
        found = self._client.eval(_FIRST_WINS, 1, own_keys.environment_key(), secrets.token_bytes(_KEY_BYTES))
        assert isinstance(found, bytes)
        return found


def _written(state: State, most_bytes: int) -> bytes:
    try:
        written = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InternalError(f"the episode's state is no JSON: {error}", code="environment_broken") from None
    if len(written) > most_bytes:
        message = f"the episode's state has {len(written)} bytes; at most {most_bytes} may travel"
        raise InternalError(message, code="environment_broken")
    return written
