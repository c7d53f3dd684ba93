"""A real HTTP server on loopback that behaves as its test says, and a scheduler that may ask it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis

from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler

Reply = tuple[int, bytes, dict[str, str]]


@dataclass
class RewardServer:
    """Answers each POST by `reply(its body)`; remembers headers and bodies."""

    reply: Callable[[dict[str, Any]], Reply] = lambda asked: answer(scores=[1.0] * len(asked["responses"]))
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        """host:port."""
        return self.url.split("/")[2]


def answer(status: int = 200, **document: Any) -> Reply:
    """A JSON answer."""
    return status, json.dumps(document).encode(), {}


@pytest.fixture
def server() -> Iterator[RewardServer]:
    told = RewardServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.headers.append({name.lower(): value for name, value in self.headers.items()})
            told.bodies.append(body)
            status, content, headers = told.reply(json.loads(body))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(content)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    told.url = f"http://127.0.0.1:{httpd.server_port}/score"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield told
    told.released.set()
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def schedulers(redis_client: redis.Redis, server: RewardServer) -> Iterator[Callable[..., VerifierScheduler]]:
    """Builds schedulers that may ask the server and are not patient; takes other Settings' fields."""
    made: list[VerifierScheduler] = []

    def build(**fields: Any) -> VerifierScheduler:
        chosen = {
            "verifier_http_hosts": [server.host],
            "http_networks": ["127.0.0.0/8"],
            "attempts": 2,
            "backoff_seconds": 0.01,
            **fields,
        }
        settings = Settings(**chosen)
        made.append(VerifierScheduler(redis_client, settings, scorers_of(settings)))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close(1.0)
