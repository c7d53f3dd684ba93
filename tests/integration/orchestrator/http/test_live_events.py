"""A job's history, live: no gap and no repeat, however often the connection breaks."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import redis

from services.orchestrator.container import AppContext
from services.orchestrator.http.events import KEPT_EVENTS, EventStream
from services.orchestrator.job_records import CANCEL
from services.orchestrator.steps import act_on
from spo.spec.job_spec import parse_job_spec
from spo.testing.peers import wait_until

STREAM = {"Accept": "text/event-stream"}


def submitted(context: AppContext, document: dict[str, Any]) -> str:
    return context.jobs.submit(parse_job_spec(document))


def follow(api: httpx.Client, job_id: str, last_seen: int, at_most: int) -> list[int]:
    """Reads at most so many events after one, checks that id and body agree, and hangs up."""
    seen: list[int] = []
    headers = {**STREAM, "Last-Event-ID": str(last_seen)}
    with api.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event_id = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            if name == "data":
                assert json.loads(value)["seq"] == int(event_id)
                seen.append(int(event_id))
                if len(seen) == at_most:
                    break
    return seen


def test_history_comes_in_pages(context: AppContext, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    for number in range(5):
        context.jobs.append(job_id, "progress", {"done": number})

    first = api.get(f"/v1/jobs/{job_id}/events", params={"limit": 4}).json()
    rest = api.get(f"/v1/jobs/{job_id}/events", params={"limit": 4, "after_seq": first["next_cursor"]}).json()

    assert [event["seq"] for event in first["items"] + rest["items"]] == [1, 2, 3, 4, 5, 6]
    assert rest["next_cursor"] is None


def test_a_stream_cut_again_and_again_misses_and_repeats_nothing(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document)
    # Cut every five events: a hundred times.
    total = 501

    def write() -> None:
        for number in range(total - 2):
            context.jobs.append(job_id, "progress", {"done": number})
        act_on(context.jobs, job_id, CANCEL)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    cuts = 0
    while len(seen) < total:
        seen += follow(api, job_id, seen[-1] if seen else 0, at_most=2)
        cuts += 1
    writer.join()

    assert cuts >= 100
    assert seen == list(range(1, total + 1))


def test_a_stream_ends_with_the_job(context: AppContext, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    threading.Timer(2.0, act_on, (context.jobs, job_id, CANCEL)).start()

    assert follow(api, job_id, 0, at_most=1000) == [1, 2]


def test_a_drained_orchestrator_ends_its_streams(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document)
    threading.Timer(2.0, context.stop.set).start()

    assert follow(api, job_id, 0, at_most=1000) == [1]


def test_many_listeners_of_a_job_share_one_reader(
    context: AppContext,
    api: httpx.Client,
    document: dict[str, Any],
    redis_client: redis.Redis,
) -> None:
    job_id = submitted(context, document)
    # Waiting in a blocking read.
    reading = lambda: [each for each in redis_client.client_list() if "b" in each["flags"]]  # noqa: E731
    with ExitStack() as listening:
        client = listening.enter_context(httpx.Client(base_url=api.base_url, trust_env=False, timeout=30))
        answers = [
            listening.enter_context(client.stream("GET", f"/v1/jobs/{job_id}/events", headers=STREAM))
            for _ in range(40)
        ]
        lines = [answer.iter_lines() for answer in answers]
        for each in lines:
            assert next(line for line in each if line.startswith("id: ")) == "id: 1"
        wait_until(lambda: len(reading()) == 1, "one connection waits for events")
        context.jobs.append(job_id, "progress", {})
        for each in lines:
            assert next(line for line in each if line.startswith("id: ")) == "id: 2"
    wait_until(lambda: not reading(), "nobody reads for nobody")


def test_a_listener_that_fell_far_behind_misses_nothing(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document)
    total = 3 * KEPT_EVENTS
    with socket.create_connection(("127.0.0.1", api.base_url.port or 0), timeout=30) as slow:
        slow.sendall(
            f"GET /v1/jobs/{job_id}/events HTTP/1.0\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode()
        )
        for number in range(total - 2):
            context.jobs.append(job_id, "progress", {"done": number, "padding": "x" * 4000})
        act_on(context.jobs, job_id, CANCEL)
        told = b"".join(iter(lambda: slow.recv(1 << 16), b""))

    assert [int(line[4:]) for line in told.split(b"\r\n") if line.startswith(b"id: ")] == list(range(1, total + 1))


def test_a_listener_that_takes_nothing_is_cut_off() -> None:
    closed = asyncio.Event()

    async def frames() -> AsyncIterator[bytes]:
        try:
            yield b"id: 1\r\n\r\n"
        finally:
            closed.set()

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        # As a server does when the peer's window is full.
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def serve() -> None:
        scope = {"type": "http", "path": "/v1/jobs/x/events", "method": "GET", "headers": []}
        await EventStream(frames(), send_seconds=0.2)(scope, receive, send)

    asyncio.run(asyncio.wait_for(serve(), 10))
    assert closed.is_set()
