"""What a connection may cost: raw sockets against the real server."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import container
from services.orchestrator.container import AppContext
from services.orchestrator.http import middleware
from spo.testing.peers import ServiceDoubles, wait_until

Document = dict[str, Any]
MOST = 6


@pytest.fixture
def url(open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]) -> str:
    return serve(open_context(max_connections=MOST))


@pytest.fixture
def connect(url: str) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as opened:

        def connection() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20))

        yield connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def problem_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, answer[:300]
    document = json.loads(body)
    assert int(head.split()[1]) == document["status"]
    return document["status"], document["code"]


def head_of(size_bytes: int, path: str = "/healthz") -> bytes:
    """A request whose target and headers have so many bytes, as the server counts them."""
    given = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: "
    counted = len(path) + len("HostlocalhostConnectioncloseX-Long") + 3 * 4
    return (given + "x" * (size_bytes - counted) + "\r\n\r\n").encode()


@pytest.mark.parametrize("size_bytes", [1000, 60_000, middleware.MAX_HEAD_BYTES])
def test_a_head_within_the_limit_is_read(connect: Callable[[], socket.socket], size_bytes: int) -> None:
    connection = connect()
    connection.sendall(head_of(size_bytes))

    assert received(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size_bytes", [middleware.MAX_HEAD_BYTES + 1, 70_000, 130_000, 300_000, 900_000])
@pytest.mark.parametrize("piece_bytes", [10_000, 1_000_000])
def test_a_head_over_the_limit_is_a_problem(
    connect: Callable[[], socket.socket], size_bytes: int, piece_bytes: int
) -> None:
    connection = connect()
    head = head_of(size_bytes)
    for start in range(0, len(head), piece_bytes):
        connection.sendall(head[start : start + piece_bytes])

    assert problem_of(received(connection)) == (431, "head_too_large")


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_what_is_no_http_is_a_problem(connect: Callable[[], socket.socket], nonsense: bytes) -> None:
    connection = connect()
    connection.sendall(nonsense)

    assert problem_of(received(connection)) == (400, "malformed_request")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(middleware, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 1.0)


def trickle(connection: socket.socket, seconds: float = 8.0) -> float:
    """Send a byte now and then until the server lets go; returns after how many seconds."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            connection.sendall(b"x")
        except OSError:
            break
        connection.settimeout(0.1)
        try:
            if not connection.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
def test_an_unfinished_head_is_not_waited_for(connect: Callable[[], socket.socket], before: bytes) -> None:
    connection = connect()
    if before:
        connection.sendall(before)
        assert b"200" in connection.recv(65536)
    connection.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")

    assert problem_of(received(connection)) == (408, "head_timeout")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        # A body that is read, and one that is refused before it is.
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: 100000\r\n\r\n",
    ],
    ids=["head", "body", "refused body"],
)
def test_a_byte_now_and_then_holds_no_connection(connect: Callable[[], socket.socket], begun: bytes) -> None:
    connection = connect()
    connection.sendall(begun)

    assert trickle(connection) < 7


@pytest.mark.usefixtures("hasty")
def test_a_connection_without_a_request_is_closed(connect: Callable[[], socket.socket]) -> None:
    assert received(connect()) == b""


@pytest.mark.usefixtures("hasty")
def test_a_client_that_does_not_read_is_let_go(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.settimeout(1.0)

    def is_let_go() -> bool:
        try:
            connection.sendall(request * 20)
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    wait_until(is_let_go, "the server closes the connection", 20)


def test_beyond_the_limit_connections_are_told_to_come_back(url: str, connect: Callable[[], socket.socket]) -> None:
    idle = [connect() for _ in range(MOST)]

    def ask(path: str) -> httpx.Response:
        return httpx.get(f"{url}{path}", trust_env=False, timeout=10)

    wait_until(lambda: ask("/v1/jobs").status_code == 503, "the limit is reached", 10)
    refused = ask("/v1/jobs")
    assert (refused.json()["code"], refused.headers["retry-after"]) == ("too_many_connections", "1")
    assert ask("/healthz").status_code == 200
    for connection in idle:
        connection.close()
    wait_until(lambda: ask("/v1/jobs").status_code == 200, "there is room again", 10)


# --- checks of specs ---


def test_checks_that_take_long_hold_up_nobody_else(
    api: httpx.Client, context: AppContext, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixty of one tenant at once few run, few wait, the others are told to come back; health checks answer."""
    under_way = threading.Semaphore(0)
    released = threading.Event()
    accept = context.spec_check.require_possible

    def slow(*given: Any) -> None:
        under_way.release()
        assert released.wait(60)
        accept(*given)

    object.__setattr__(context.spec_check, "require_possible", slow)

    def submit(_: int) -> httpx.Response:
        return api.post("/v1/jobs?validate_only=true", json=document)

    with ThreadPoolExecutor(60) as clients:
        answers = [clients.submit(submit, number) for number in range(60)]
        assert under_way.acquire(timeout=20)
        refused = 60 - (container.CHECKS + container.CHECKS_WAITING) // 2
        wait_until(lambda: sum(each.done() for each in answers) == refused, "the rest is refused", 30)
        took = []
        for path in ("/healthz", "/v1/jobs", "/readyz") * 5:
            began = time.monotonic()
            assert api.get(path).status_code == 200
            took.append(time.monotonic() - began)
        released.set()
        statuses = sorted(each.result().status_code for each in answers)

    assert max(took) < 2
    assert statuses == [200] * (60 - refused) + [503] * refused
    busy = next(each.result() for each in answers if each.result().status_code == 503)
    assert (busy.json()["code"], busy.headers["retry-after"]) == ("checks_busy", "1")


def test_calls_that_last_hold_up_nobody_else(
    api: httpx.Client, peers: ServiceDoubles, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighty completions of a model that does not answer: the last are told to come back, all else answers beside."""
    job_id = api.post("/v1/jobs", json=document).json()["id"]
    asked, released = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> str:
        asked.release()
        assert released.wait(60)
        return "said"

    monkeypatch.setattr(peers.inference, "respond", slow)

    def complete(_: int) -> httpx.Response:
        return api.post(f"/v1/policies/{job_id}/completions", json={"prompt": "x"})

    with ThreadPoolExecutor(80) as clients:
        answers = [clients.submit(complete, number) for number in range(80)]
        assert asked.acquire(timeout=20)
        refused = 80 - container.LASTING - container.LASTING_WAITING
        wait_until(lambda: sum(each.done() for each in answers) == refused, "the rest is refused", 30)
        for path in ("/readyz", "/v1/jobs"):
            assert api.get(path, timeout=5).status_code == 200
        released.set()
        statuses = sorted(each.result().status_code for each in answers)

    assert statuses == [200] * (80 - refused) + [503] * refused
    assert {each.result().json().get("code") for each in answers} == {None, "calls_busy"}


@pytest.mark.timeout(60)
def test_paths_to_anything_else_cost_nothing(api: httpx.Client, document: Document, tmp_path: Path) -> None:
    folder = tmp_path / "fifo"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    for path in ("/", "/usr", "/proc", "x" * 5000, "/" + "x" * 300, "/a\x00b", str(folder)):
        answer = api.post("/v1/jobs?validate_only=true", json={**document, "model": {"path": path}})
        assert answer.status_code == 422, (path[:40], answer.text[:300])
        assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/model/path"], path[:40]
        tasks = {"kind": "jsonl", "path": path}
        answer = api.post("/v1/jobs?validate_only=true", json={**document, "tasks": tasks})
        assert answer.status_code == 422, (path[:40], answer.text[:300])
        assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/tasks/path"], path[:40]
