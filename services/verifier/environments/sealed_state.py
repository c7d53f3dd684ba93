"""The state of an episode on its way to the sampler and back: signed, so that only what a replica said is taken up."""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Protocol

from blake3 import blake3

from services.verifier import redis_keys as own_keys
from services.verifier.environments.environment import State
from spo.errors import InternalError, InvalidInput
from spo.messaging.redis_client import RedisClient

MOST_STATE_BYTES = 64 << 10
# Of one that travels within another, in base 64.
MOST_INNER_STATE_BYTES = 47 << 10
_KEY_BYTES = _SEAL_BYTES = 32
# KEYS: the shared key.  ARGV: a new one, for where there is none.  Returns the one that holds.
_FIRST_WINS = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
"""


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
