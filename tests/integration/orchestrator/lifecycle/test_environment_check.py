"""A job whose environment does not exist, or refuses its arguments, ends by name before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from services.orchestrator.container import AppContext
from services.verifier.environments.service import Environment, Environments, EnvironmentService, StateSeal, TextGame
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server

GAME = "text_game"


@pytest.fixture
def played(open_context: Callable[..., AppContext], redis_client: redis.Redis) -> Iterator[AppContext]:
    """An orchestrator beside a pool that plays one game."""
    games: dict[str, Environment] = {GAME: TextGame()}
    server = RpcServer("127.0.0.1", 0)
    service = EnvironmentService(Environments(games), StateSeal(redis_client))
    add_EnvironmentServiceServicer_to_server(service, server.server)
    server.start()
    yield open_context(verifier_address=server.address)
    server.stop(1)


def validated(context: AppContext, document: dict[str, Any], **environment: Any) -> str:
    tasks = {**document["tasks"], "environment": environment}
    mix = [{"source": "online", "share": 0.5}, {"source": "reference", "share": 0.5}]
    replay = {**document.get("replay", {}), "mix": mix}
    job_id = context.jobs.submit(parse_job_spec({**document, "tasks": tasks, "replay": replay}))

    def is_over() -> bool:
        context.runner.tick()
        return context.jobs.state(job_id) not in (JobState.QUEUED, JobState.VALIDATING)

    wait_until(is_over, "the job is validated")
    return job_id


def test_an_environment_that_is_there_is_found(played: AppContext, document: dict[str, Any]) -> None:
    assert played.jobs.state(validated(played, document, name=GAME)) is JobState.ESTIMATING


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"name": "no_such_game"}, "environment_not_found"),
        ({"name": GAME, "arguments": {"no_such_argument": 1}}, "bad_environment"),
    ],
)
def test_one_that_cannot_be_played_ends_the_job_by_name(
    played: AppContext, document: dict[str, Any], environment: dict[str, Any], code: str
) -> None:
    job_id = validated(played, document, **environment)

    assert played.jobs.state(job_id) is JobState.FAILED
    assert played.jobs.record(job_id).failure_code == code
