"""Calls that wait for a service: with a limit, until told to stop, and only while the answer is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from spo.errors import InvalidInput, NotReady
from spo.rpc.client import RpcClient
from spo.testing.runs import FOREIGN_TOKEN, ScorerDouble, served_scorer
from spo.v1.value_service_pb2 import (
    ComputeReferenceLogprobsRequest,
    ComputeReferenceLogprobsResponse,
    TokenSequence,
)
from spo.v1.value_service_pb2_grpc import ValueServiceStub


@pytest.fixture
def scorer() -> ScorerDouble:
    absent = ScorerDouble()
    absent.away.set()
    return absent


@pytest.fixture
def client(scorer: ScorerDouble) -> Iterator[RpcClient]:
    with served_scorer(scorer) as address:
        client = RpcClient("value-estimation", address, ValueServiceStub)
        yield client
        client.close()


def ask(
    client: RpcClient,
    *tokens: int,
    patience_seconds: float = 60,
    stop: threading.Event | None = None,
    wanted: bool = True,
) -> ComputeReferenceLogprobsResponse:
    sequence = TokenSequence(prompt_token_ids=[1], response_token_ids=tokens)
    request = ComputeReferenceLogprobsRequest(run_id="job", sequences=[sequence])
    return client.call_patiently(  # type: ignore[no-any-return]
        "ComputeReferenceLogprobs",
        request,
        5,
        patience_seconds=patience_seconds,
        stop=stop or threading.Event(),
        wanted=lambda: wanted,
    )


def test_a_service_that_comes_back_answers_the_waiting_call(client: RpcClient, scorer: ScorerDouble) -> None:
    threading.Timer(0.3, scorer.away.clear).start()

    assert list(ask(client, 7, 8).sequences[0].logprobs) == [-0.5, -0.5]
    assert scorer.refused >= 1


def test_patience_ends_with_what_the_service_said(client: RpcClient, scorer: ScorerDouble) -> None:
    with pytest.raises(NotReady, match="the model still loads"):
        ask(client, 7, patience_seconds=0.7)

    assert scorer.refused >= 2


def test_a_stopping_process_does_not_wait_on(client: RpcClient) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()

    with pytest.raises(NotReady, match="stopped while waiting for value-estimation: the model still loads"):
        ask(client, 7, stop=stop)
    assert time.monotonic() - began < 10


def test_what_nobody_wants_any_more_is_not_waited_for(client: RpcClient, scorer: ScorerDouble) -> None:
    with pytest.raises(NotReady, match="the model still loads"):
        ask(client, 7, wanted=False)

    assert scorer.refused == 1


def test_a_refusal_is_not_repeated(client: RpcClient, scorer: ScorerDouble) -> None:
    scorer.away.clear()

    with pytest.raises(InvalidInput, match="vocabulary"):
        ask(client, FOREIGN_TOKEN)
