"""gRPC plumbing over a real connection: typed errors, deadlines, health."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from spo.errors import FieldViolation, InternalError, InvalidInput, LeaseLost, NotReady, SpoError, Unreachable
from spo.rpc.client import RpcClient, is_healthy
from spo.rpc.server import RpcServer
from spo.v1 import replay_service_pb2 as replay
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, ReplayServiceStub, add_ReplayServiceServicer_to_server


class Scripted(ReplayServiceServicer):
    """Raises what a test put in `fault`, after `release` is set."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.release = threading.Event()
        self.release.set()

    def GetReplayStatus(self, request: Any, context: Any) -> replay.GetReplayStatusResponse:
        self.release.wait(20)
        if self.fault:
            raise self.fault
        return replay.GetReplayStatusResponse(duplicates=3)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, RpcServer]]:
    servicer, server = Scripted(), RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(servicer, server.server)
    server.start()
    yield servicer, server
    servicer.release.set()
    server.stop(1)


def ask(server: RpcServer, deadline_seconds: float = 10) -> replay.GetReplayStatusResponse:
    client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
    try:
        return client.call("GetReplayStatus", replay.GetReplayStatusRequest(), deadline_seconds)  # type: ignore[no-any-return]
    finally:
        client.close()


@pytest.mark.parametrize("kind", [InvalidInput, LeaseLost, NotReady])
def test_a_typed_error_arrives_as_it_was_raised(scripted: tuple[Scripted, RpcServer], kind: type[SpoError]) -> None:
    scripted[0].fault = kind("no", code=kind.default_code, violations=(FieldViolation("/run_id", "unknown"),))

    with pytest.raises(kind) as caught:
        ask(scripted[1])

    assert type(caught.value) is kind
    assert caught.value.code == kind.default_code
    assert caught.value.violations == (FieldViolation("/run_id", "unknown"),)


@pytest.mark.parametrize(
    "refuses",
    [
        pytest.param(("CONFIG", "SET", "min-replicas-to-write", "1"), id="too few replicas"),
        # Of an address where nobody is: a primary that a failover demoted answers as this one does.
        pytest.param(("REPLICAOF", "127.0.0.1", "1"), id="a replica by now"),
    ],
)
def test_a_redis_that_takes_no_writes_for_now_is_no_fault_of_the_service(
    scripted: tuple[Scripted, RpcServer], redis_client: redis.Redis, refuses: tuple[str, ...]
) -> None:
    redis_client.execute_command(*refuses)
    try:
        with pytest.raises(redis.ResponseError) as alone:
            redis_client.set("a", "b")
        with redis_client.pipeline(transaction=False) as pipe:
            pipe.eval("#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], 1)", 1, "a")
            with pytest.raises(redis.ResponseError) as among_others:
                pipe.execute()
    finally:
        redis_client.execute_command("REPLICAOF", "NO", "ONE")
        redis_client.config_set("min-replicas-to-write", 0)

    for refused in (alone, among_others):
        scripted[0].fault = refused.value
        with pytest.raises(NotReady) as told:
            ask(scripted[1])
        assert told.value.code == "redis_refuses"


def test_an_unexpected_exception_becomes_an_internal_error(scripted: tuple[Scripted, RpcServer]) -> None:
    scripted[0].fault = ZeroDivisionError("oops")

    with pytest.raises(InternalError, match="ZeroDivisionError"):
        ask(scripted[1])


def test_a_call_ends_at_its_deadline_and_names_the_service(scripted: tuple[Scripted, RpcServer]) -> None:
    scripted[0].release.clear()

    with pytest.raises(Unreachable, match=f"replay-buffer at {scripted[1].address}"):
        ask(scripted[1], deadline_seconds=0.3)


def test_an_absent_service_is_named_with_its_address() -> None:
    client = RpcClient("replay-buffer", "127.0.0.1:1", ReplayServiceStub)

    with pytest.raises(Unreachable, match=r"replay-buffer at 127\.0\.0\.1:1"):
        client.call("GetReplayStatus", replay.GetReplayStatusRequest(), deadline_seconds=2)
    client.close()


def test_health_follows_readiness(scripted: tuple[Scripted, RpcServer]) -> None:
    server = scripted[1]
    assert not is_healthy(server.address)

    server.set_serving(True)

    assert is_healthy(server.address)


def test_a_long_poll_is_given_up_soon_after_the_process_is_told_to_stop(scripted: tuple[Scripted, RpcServer]) -> None:
    scripted[0].release.clear()
    client = RpcClient("replay-buffer", scripted[1].address, ReplayServiceStub)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()

    with pytest.raises(Unreachable, match="the process is stopping"):
        client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 60, stop=stop)

    assert not scripted[0].release.is_set(), "the call must end before its answer"
    client.close()


def test_a_call_that_can_be_given_up_returns_its_answer_and_its_errors(scripted: tuple[Scripted, RpcServer]) -> None:
    client = RpcClient("replay-buffer", scripted[1].address, ReplayServiceStub)
    answer = client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10, stop=threading.Event())
    scripted[0].fault = LeaseLost("no")

    with pytest.raises(LeaseLost):
        client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10, stop=threading.Event())

    assert answer.duplicates == 3
    client.close()
