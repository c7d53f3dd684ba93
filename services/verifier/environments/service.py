"""gRPC service of the environments: decodes requests, asks the environment, one observation per seed or turn.

Nothing is kept between calls. An episode's state is signed and goes back with each observation, so that any replica
takes its next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from services.verifier.environments.environment import Reply, Setup
from services.verifier.environments.registry import Environments, all_environments
from services.verifier.environments.sealed_state import Seal, StateSeal
from services.verifier.settings import Settings
from spo.errors import FieldViolation, InternalError, InvalidInput, NotReady, SpoError
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, RpcClient
from spo.spec.environment import setup_from_json
from spo.spec.reward import score_in_range
from spo.v1 import environment_service_pb2 as wire
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceServicer
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub

log = get_logger("environments")

MOST_EPISODES = 4096
MOST_ACTION_CHARACTERS = 1 << 20
MOST_TEXT_CHARACTERS = 1 << 20
# Turns of one request that are taken side by side.
TURNS_AT_ONCE = 16

_Asked = TypeVar("_Asked")


class EnvironmentService(EnvironmentServiceServicer):
    """The environments, for samplers."""

    def __init__(self, environments: Environments, seal: Seal) -> None:
        self._environments = environments
        self._seal = seal
        self._pool = ThreadPoolExecutor(TURNS_AT_ONCE, thread_name_prefix="turns")

    def Begin(self, request: wire.BeginRequest, context: grpc.ServicerContext) -> wire.BeginResponse:
        """The first observation of each episode."""
        environment, setup = self._environments.of(request.environment), _setup(request.environment_json, context)
        _require_few(len(request.seeds), "/seeds")
        episode = f"{request.environment} {request.environment_json}"
        answers = self._asked(request.environment, lambda seed: environment.begin(setup, seed), request.seeds, context)
        return wire.BeginResponse(observations=[self._observation(episode, answer) for answer in answers])

    def Step(self, request: wire.StepRequest, context: grpc.ServicerContext) -> wire.StepResponse:
        """What follows on each turn."""
        environment, setup = self._environments.of(request.environment), _setup(request.environment_json, context)
        _require_few(len(request.turns), "/turns")
        episode = f"{request.environment} {request.environment_json}"
        states = [self._seal.open(episode, turn.state) for turn in request.turns]
        if any(len(turn.action) > MOST_ACTION_CHARACTERS for turn in request.turns):
            raise _fault("/turns", f"an action has at most {MOST_ACTION_CHARACTERS} characters")
        answers = self._asked(
            request.environment,
            lambda each: environment.step(setup, each[0], each[1].action),
            list(zip(states, request.turns, strict=True)),
            context,
        )
        return wire.StepResponse(observations=[self._observation(episode, answer) for answer in answers])

    def DescribeEnvironments(
        self, request: wire.DescribeEnvironmentsRequest, context: grpc.ServicerContext
    ) -> wire.DescribeEnvironmentsResponse:
        """The names of all environments."""
        return wire.DescribeEnvironmentsResponse(environments=self._environments.names)

    def _asked(
        self, name: str, ask: Callable[[_Asked], Reply], episodes: Iterable[_Asked], context: grpc.ServicerContext
    ) -> list[Reply]:
        """The answers, in order; what an environment raises that is no SpoError is its own fault, and names it."""

        def ask_for_somebody(episode: _Asked) -> Reply:
            # Who has gone asks again: done for nobody as well, a slow environment would never catch up.
            if not context.is_active():
                raise NotReady(f"nobody waits any more for environment {name}")
            return ask(episode)

        try:
            return list(self._pool.map(ask_for_somebody, episodes))
        except SpoError:
            raise
        except Exception as error:
            log.exception("an environment failed", environment=name)
            message = f"environment {name} failed: {type(error).__name__}: {error}"[:500]
            raise InternalError(message, code="environment_broken") from error

    def _observation(self, episode: str, answer: Reply) -> wire.Observation:
        if len(answer.text) > MOST_TEXT_CHARACTERS:
            message = f"an observation has {len(answer.text)} characters; at most {MOST_TEXT_CHARACTERS} may travel"
            raise InternalError(message, code="environment_broken")
        score = None if answer.score is None else score_in_range(answer.score)
        if answer.score is not None and score is None:
            message = f"a turn's score is {answer.score}, and not between 0 and 1"
            raise InternalError(message, code="environment_broken")
        state = b"" if answer.done else self._seal.seal(episode, answer.state)
        return wire.Observation(
            text=answer.text,
            state=state,
            done=answer.done,
            score=score,
            verdict=answer.verdict,
            label=answer.label[:100],
        )


def environment_service(client: RedisClient, settings: Settings) -> EnvironmentService:
    """The service of a pool's process: all environments, their programs run by the judge of the settings."""
    judge = RpcClient("sandbox-judge", settings.sandbox_judge_address, JudgeServiceStub)
    return EnvironmentService(all_environments(judge, settings.environment_servers), StateSeal(client))


def _setup(text: str, context: grpc.ServicerContext) -> Setup:
    given = setup_from_json(text)
    remaining = context.time_remaining()
    return Setup(given.arguments, given.problem, DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)


def _require_few(episodes: int, pointer: str) -> None:
    if episodes > MOST_EPISODES:
        raise _fault(pointer, f"must be at most {MOST_EPISODES}")


def _fault(pointer: str, message: str) -> InvalidInput:
    violation = FieldViolation(pointer, message)
    return InvalidInput("this environment cannot be asked so", code="bad_environment", violations=(violation,))
