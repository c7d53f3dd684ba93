"""The token between services, over real connections: who shows none or another is refused in words, health is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from spo import observability
from spo.errors import FieldViolation, InvalidInput, Unauthenticated
from spo.rpc.client import HEADER, RpcClient, is_healthy, show_token, tokens_of
from spo.rpc.healthcheck import why_not_serving
from spo.rpc.server import RpcServer
from spo.service.process import ServiceProcess
from spo.service.settings import ServiceSettings
from spo.v1 import replay_service_pb2 as replay
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, ReplayServiceStub, add_ReplayServiceServicer_to_server

TOKEN = "of-this-platform"


class Answering(ReplayServiceServicer):
    """Notes the metadata of each call; raises what a test put in `fault`."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.fault: Exception | None = None

    def GetReplayStatus(self, request: Any, context: Any) -> replay.GetReplayStatusResponse:
        self.seen.append(dict(context.invocation_metadata()))
        if self.fault:
            raise self.fault
        return replay.GetReplayStatusResponse(duplicates=3)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    show_token("")


@contextmanager
def serving(token: str) -> Iterator[tuple[Answering, RpcServer]]:
    servicer, server = Answering(), RpcServer("127.0.0.1", 0, token=token)
    add_ReplayServiceServicer_to_server(servicer, server.server)
    server.start()
    server.set_serving(True)
    try:
        yield servicer, server
    finally:
        server.stop(0)


def ask(server: RpcServer, shown: str) -> int:
    show_token(shown)
    client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
    try:
        return int(client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10).duplicates)
    finally:
        client.close()


def test_whoever_shows_the_token_is_answered_and_errors_still_arrive_as_they_were_raised() -> None:
    with serving(TOKEN) as (servicer, server):
        assert ask(server, TOKEN) == 3
        servicer.fault = InvalidInput("no", violations=(FieldViolation("/run_id", "unknown"),))
        with pytest.raises(InvalidInput) as caught:
            ask(server, TOKEN)
    assert caught.value.violations == (FieldViolation("/run_id", "unknown"),)


@pytest.mark.parametrize(
    ("shown", "words"),
    [("", "shows no token"), ("of-another", "not in this service's SPO_RPC_TOKEN"), (TOKEN[:-1], "not in this")],
)
def test_whoever_shows_none_or_another_is_refused_in_words_before_the_handler(shown: str, words: str) -> None:
    with serving(TOKEN) as (servicer, server):
        with pytest.raises(Unauthenticated, match=words) as caught:
            ask(server, shown)
        assert (caught.value.code, caught.value.retryable) == ("rpc_unauthenticated", True)
        assert TOKEN not in str(caught.value)
    assert servicer.seen == []


def test_a_method_that_does_not_exist_is_refused_alike() -> None:
    with serving(TOKEN) as (_, server):
        show_token("")
        client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
        with pytest.raises(Unauthenticated):
            client.call("SampleBatch", replay.SampleBatchRequest(), 10)
        client.close()


def test_health_is_answered_without_a_token_because_probes_have_none() -> None:
    with serving(TOKEN) as (_, server):
        assert is_healthy(server.address, 10)
        assert why_not_serving(server.address) == ""


def test_a_server_without_a_token_answers_everybody_so_callers_can_have_it_first() -> None:
    with serving("") as (servicer, server):
        assert [ask(server, ""), ask(server, TOKEN)] == [3, 3]
        assert [seen.get(HEADER) for seen in servicer.seen] == [None, f"Bearer {TOKEN}"]


def test_while_it_is_changed_the_old_and_the_new_one_are_accepted_and_the_first_is_shown() -> None:
    assert tokens_of(" new, old ,") == ["new", "old"]
    with serving("new,old") as (servicer, server):
        assert [ask(server, "old"), ask(server, "new,old")] == [3, 3]
        assert [seen[HEADER] for seen in servicer.seen] == ["Bearer old", "Bearer new"]


def test_calls_that_can_be_given_up_show_it_too() -> None:
    with serving(TOKEN) as (_, server):
        show_token(TOKEN)
        client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
        process = ServiceProcess("replay-buffer", _Settings(rpc_token=SecretStr(TOKEN)))
        reply = client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10, stop=process.stop)
        assert reply.duplicates == 3
        client.close()


class _Settings(ServiceSettings, service="token_test"):
    pass


def test_a_service_process_asks_for_the_token_of_its_settings_and_shows_it() -> None:
    process = ServiceProcess("replay-buffer", _Settings(rpc_token=SecretStr(TOKEN)))
    servicer = Answering()
    add_ReplayServiceServicer_to_server(servicer, process.server.server)
    process.answer_probes("starts")
    process.server.loaded()
    client = RpcClient("replay-buffer", process.server.address, ReplayServiceStub)
    assert client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10).duplicates == 3
    client.close()
    with pytest.raises(Unauthenticated):
        ask(process.server, "of-another")
    assert observability.HEADER not in servicer.seen[0]
    assert TOKEN not in repr(process.settings)
    process.server.stop(0)
