"""The pool of environments, as a replica asks it: with deadlines, and with patience while the pool is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import Message

from spo.errors import InternalError, NotReady
from spo.rpc.client import RpcClient
from spo.v1.environment_service_pb2 import BeginRequest, BeginResponse, Observation, StepRequest, StepResponse, Turn
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from spo.v1.prompt_pb2 import Prompt

# Calls under way at once: a tool may take seconds, and each episode waits for its own.
CALLS = 64
CALL_SECONDS = 60.0
# An environment that is away for longer fails the group, which is then tried again elsewhere.
PATIENCE_SECONDS = 600.0
# What a call has begun is kept: a slow environment is asked for few at a time, so that each call ends in time.
SEEDS_PER_CALL = 16

_Answer = TypeVar("_Answer", BeginResponse, StepResponse)


class EnvironmentPool:
    """Begins episodes and takes their turns; an episode's state comes with each answer and is kept nowhere else."""

    def __init__(self, address: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._client = RpcClient("verifier", address, EnvironmentServiceStub)
        self._patience_seconds = patience_seconds
        self._stop = threading.Event()
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="environments")

    def run(self, work: Callable[[], None]) -> None:
        """Do work that asks an environment, in a thread of its own. Raises NotReady once closed."""
        try:
            self._calls.submit(work)
        except RuntimeError as error:
            raise NotReady("the replica is stopping") from error

    def begin(self, prompt: Prompt, seeds: Sequence[int], wanted: Callable[[], bool]) -> list[Observation]:
        """The first observations, one per seed. Raises what the environment raised, NotReady when it stays away."""
        found: list[Observation] = []
        for start in range(0, len(seeds), SEEDS_PER_CALL):
            part = seeds[start : start + SEEDS_PER_CALL]
            request = BeginRequest(environment=prompt.environment, environment_json=prompt.environment_json, seeds=part)
            response = self._ask("Begin", request, BeginResponse, wanted)
            found += _as_many(response.observations, len(part), prompt)
        return found

    def step(self, prompt: Prompt, state: bytes, action: str, wanted: Callable[[], bool]) -> Observation:
        """What follows on an action; asking again with the same state is the same turn. Raises as `begin`."""
        request = StepRequest(
            environment=prompt.environment,
            environment_json=prompt.environment_json,
            turns=[Turn(state=state, action=action)],
        )
        response = self._ask("Step", request, StepResponse, wanted)
        return _as_many(response.observations, 1, prompt)[0]

    def close(self) -> None:
        """Give up what waits, for the end of the process."""
        self._stop.set()
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _ask(self, method: str, request: Message, kind: type[_Answer], wanted: Callable[[], bool]) -> _Answer:
        answer = self._client.call_patiently(
            method,
            request,
            CALL_SECONDS,
            patience_seconds=self._patience_seconds,
            stop=self._stop,
            wanted=wanted,
        )
        assert isinstance(answer, kind)
        return answer


def _as_many(found: Sequence[Observation], wanted: int, prompt: Prompt) -> list[Observation]:
    if len(found) != wanted:
        message = f"environment {prompt.environment} gave {len(found)} observations for {wanted} episodes"
        raise InternalError(message, code="environment_broken")
    return list(found)
