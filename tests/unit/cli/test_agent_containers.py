"""What `--image` says, and which requests of an agent in a container are passed on; with an engine: see serving."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from spo.cli.containers import ContainerLimits, _Server
from spo.errors import InvalidInput

SESSION = "/s/ses_01ABC"


def test_an_image_is_named_with_its_limits() -> None:
    assert ContainerLimits.parse("a/b:1") == ContainerLimits("a/b:1", 2 << 30, 1.0)
    assert ContainerLimits.parse("x,processors=2.5,memory_mib=64") == ContainerLimits("x", 64 << 20, 2.5)


@pytest.mark.parametrize(
    "text", ["", ",memory_mib=99", "x,memory_mib=1", "x,memory=99", "x,processors=many", "x,processors=0"]
)
def test_an_image_with_limits_that_mean_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--image"):
        ContainerLimits.parse(text)


@pytest.fixture
def door() -> Iterator[str]:
    """The address of a door to a platform that says which path it was asked for."""

    class Platform(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = f"{self.path} {self.rfile.read(int(self.headers['Content-Length'])).decode()}".encode()
            self.send_response(201)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    platform = ThreadingHTTPServer(("127.0.0.1", 0), Platform)
    base_url = f"http://127.0.0.1:{platform.server_port}{SESSION}/v1"
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(listener, base_url)
    threads = [threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True) for each in (platform, server)]
    for thread in threads:
        thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for each, thread in zip((platform, server), threads, strict=True):
        each.shutdown()
        thread.join()
        each.server_close()
    server.platform.close()


def asked(door: str, path: str, head: str = "Content-Length: 2\r\n") -> tuple[int, str]:
    """Status and body, of a path that no client has put in order."""
    host, port = httpx.URL(door).host, httpx.URL(door).port
    with socket.create_connection((host, port), 30) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\nhi".encode())
        said = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    top, _, body = said.partition("\r\n\r\n")
    return int(top.split()[1]), body


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages?beta=true",
        "/v1/messages/count_tokens",
        ".k-e_Y9/v1/models",
    ],
)
def test_calls_of_the_session_are_passed_on_as_they_are(door: str, path: str) -> None:
    assert asked(door, SESSION + path) == (201, f"{SESSION}{path} hi")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs",
        "/s/ses_01ABD/v1/models",
        f"{SESSION}x/v1/models",
        f"{SESSION}/v1/../../../v1/jobs",
        f"{SESSION}/v1/%2e%2e/%2e%2e/jobs",
        f"{SESSION}/v1/a/../..//jobs",
        f"{SESSION}/v1//models",
        f"{SESSION}.a/../v1/models",
        f"{SESSION}.a/b/v1/models",
        f"http://127.0.0.1/{SESSION}/v1/models",
        f"{SESSION}/v1/models#/v1",
        f"{SESSION}/v1/models?a=/../b",
        "@other.host/v1/models",
    ],
)
def test_no_other_path_is_passed_on(door: str, path: str) -> None:
    status, body = asked(door, path)
    assert (status, "only the session's own paths" in body) == (404, True)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 99999999999\r\n", 413),
        ("Content-Length: -1\r\n", 411),
        ("Transfer-Encoding: chunked\r\n", 411),
    ],
)
def test_a_request_is_as_long_as_it_says_and_no_longer_than_it_may_be(door: str, head: str, status: int) -> None:
    assert asked(door, f"{SESSION}/v1/models", head)[0] == status
