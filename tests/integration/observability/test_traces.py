"""Traces over real gRPC and a real Redis into a real OTLP receiver: connected, cheap when off, silent about text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from spo import observability
from spo.errors import NotFound
from spo.messaging.streams.entries import append_words, publish
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.peers import Collector
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2_grpc import (
    JudgeServiceServicer,
    JudgeServiceStub,
    add_JudgeServiceServicer_to_server,
)

SECRET = "canary-7f3a"


class Judge(JudgeServiceServicer):
    """Fails as asked, with a text that nobody may find in a trace."""

    def Judge(self, request: judge.JudgeRequest, context: Any) -> judge.JudgeResponse:
        if request.language == "unknown":
            raise NotFound(f"no language for {SECRET}", code="unknown_language")
        return judge.JudgeResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        observability.configure_traces("test", "test-1", listening.endpoint)
        yield listening
        observability.finish_traces()


@pytest.fixture
def peer() -> Iterator[RpcClient]:
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(Judge(), server.server)  # type: ignore[abstract]
    server.start()
    client = RpcClient("judge", server.address, JudgeServiceStub)
    yield client
    client.close()
    server.stop(1)


def test_a_group_is_one_trace_over_stream_and_call(
    collector: Collector, redis_client: redis.Redis, peer: RpcClient
) -> None:
    ids = observability.group_ids("job_1", "job_1-0")
    dispatch = observability.begin("dispatch", ids=ids, run="job_1", group="job_1-0")
    redis_client.execute_command(*append_words("here", b"one", dispatch.header))
    dispatch.end()
    here, there = (Consumer(redis_client, name, "group", "me") for name in ("here", "there"))
    first = here.read(1)[0]
    sample = observability.begin("sample", parent=first.trace)
    here.forward(first, "there", b"two", sample.header)
    sample.end()
    second = there.read(1)[0]
    with observability.span("ingest", parent=second.trace):
        peer.call("Judge", judge.JudgeRequest(programs=[SECRET]))
    observability.finish_traces()

    kinds = ("INTERNAL", "CLIENT", "SERVER")
    chain = sorted(collector.spans, key=lambda span: (kinds.index(span.kind), span.name))
    assert [span.name for span in chain] == ["dispatch", "ingest", "sample", "Judge", "Judge"]
    chain[1:3] = chain[2:0:-1]

    assert {span.trace_id for span in collector.spans} == {f"{ids[0]:032x}"}
    assert (chain[0].span_id, chain[0].parent_id) == (f"{ids[1]:016x}", "")
    assert [span.parent_id for span in chain[1:]] == [span.span_id for span in chain[:-1]]
    assert chain[0].attributes == {"spo.run": "job_1", "spo.group": "job_1-0"}


def test_a_batch_links_to_the_first_spans_of_its_groups(collector: Collector) -> None:
    with observability.span("draw batch", step=3) as drawn:
        drawn.link([("job_1", "a"), ("job_1", "b"), ("job_1", "a")])
    observability.finish_traces()

    expected = [observability.group_ids("job_1", group) for group in ("a", "b")]
    assert collector.spans[0].links == tuple((f"{trace:032x}", f"{span:016x}") for trace, span in expected)


def test_a_failure_is_told_by_its_code_and_never_by_its_text(collector: Collector, peer: RpcClient) -> None:
    with pytest.raises(NotFound), observability.span("ingest"):
        peer.call("Judge", judge.JudgeRequest(language="unknown", programs=[SECRET]))
    observability.finish_traces()

    assert [span.error for span in collector.spans] == ["unknown_language"] * 3
    assert SECRET.encode() not in b"".join(collector.bodies)


def test_calls_outside_of_a_span_make_no_trace(collector: Collector, peer: RpcClient) -> None:
    peer.call("Judge", judge.JudgeRequest())
    observability.finish_traces()

    assert collector.spans == []


def test_an_entry_without_a_trace_goes_on_without_one(redis_client: redis.Redis) -> None:
    publish(redis_client, "here", [b"one"])
    here, there = (Consumer(redis_client, name, "group", "me") for name in ("here", "there"))
    here.forward(here.read(1)[0], "there", b"two")

    assert there.read(1)[0].trace == ""
    assert set(redis_client.xrange("there")[0][1]) == {b"payload"}  # type: ignore[index]


def test_a_collector_that_is_away_delays_the_end_by_seconds_at_most() -> None:
    observability.configure_traces("test", "test-1", "http://127.0.0.1:1")
    with observability.span("work"):
        pass
    began = time.monotonic()
    finishing = threading.Thread(target=observability.finish_traces, daemon=True)
    finishing.start()
    finishing.join(20)

    assert not finishing.is_alive()
    assert time.monotonic() - began < 12


def test_switched_off_a_span_costs_less_than_ten_microseconds() -> None:
    rounds = 2000
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            observability.begin("sample", run="job_1").end()
        best = min(best, (time.perf_counter() - began) / rounds)
    assert best < 10e-6
