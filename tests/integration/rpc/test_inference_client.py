"""Calls about a run reach a replica that serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from spo import redis_keys
from spo.errors import Unreachable
from spo.rpc.pools import REMEMBER_SECONDS, TIME_BYTES, InferenceClient
from spo.testing.peers import ServiceDoubles
from spo.v1.inference_service_pb2 import GenerateRequest
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.prompt_pb2 import PromptGroup, Sampling


@pytest.fixture
def replicas() -> Iterator[dict[str, ServiceDoubles]]:
    with ServiceDoubles() as first, ServiceDoubles() as second, ServiceDoubles() as third:
        yield {"r1": first, "r2": second, "r3": third}


def beat(client: redis.Redis, replica_id: str, address: str, run_id: str, at: float | None = None) -> None:
    request = HeartbeatRequest(replica_id=replica_id, pool="inference", address=address, run_id=run_id)
    stamp = int((time.time() if at is None else at) * 1000).to_bytes(TIME_BYTES, "big")
    client.hset(redis_keys.replicas(), replica_id, stamp + request.SerializeToString())


def ask(client: InferenceClient, run_id: str) -> None:
    client.call("Generate", GenerateRequest(group=PromptGroup(run_id=run_id, sampling=Sampling(samples=1))), 5)


def test_calls_go_in_turn_to_the_replicas_of_their_run(
    redis_client: redis.Redis, replicas: dict[str, ServiceDoubles]
) -> None:
    for replica_id, run_id in (("r1", "a"), ("r2", "a"), ("r3", "b")):
        beat(redis_client, replica_id, replicas[replica_id].address, run_id)
    client = InferenceClient("127.0.0.1:1", redis_client)

    for _ in range(4):
        ask(client, "a")
    ask(client, "b")

    assert [len(replicas[each].inference.versions) for each in ("r1", "r2", "r3")] == [2, 2, 1]
    client.close()
    with pytest.raises(Unreachable):
        ask(client, "a")


def test_a_replica_that_moved_or_fell_silent_is_asked_no_more(
    redis_client: redis.Redis, replicas: dict[str, ServiceDoubles]
) -> None:
    beat(redis_client, "r1", replicas["r1"].address, "a", at=time.time() - 60)
    beat(redis_client, "r2", replicas["r2"].address, "b")
    client = InferenceClient(replicas["r3"].address, redis_client)
    ask(client, "a")
    assert len(replicas["r3"].inference.versions) == 1, "nobody is known to serve it: the address of the settings"

    beat(redis_client, "r2", replicas["r2"].address, "a")
    time.sleep(REMEMBER_SECONDS + 0.1)
    ask(client, "a")

    assert [len(replicas[each].inference.versions) for each in ("r1", "r2", "r3")] == [0, 1, 1]
    client.close()
