"""Fixtures of the orchestrator's tests: a desk on a real server, with doubles for the services it asks."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator.desk import Desk
from services.orchestrator.http_server import HttpServer
from services.orchestrator.settings import Settings
from spo.testing_peers import Peers

Document = dict[str, Any]


@pytest.fixture
def peers() -> Iterator[Peers]:
    with Peers() as playing:
        yield playing


@pytest.fixture
def open_desk(
    redis_server: str, redis_client: redis.Redis, peers: Peers, tmp_path: Path
) -> Iterator[Callable[..., Desk]]:
    """Builds desks on the same Redis, as a restarted orchestrator would be; keyword arguments are settings."""
    desks: list[Desk] = []

    def build(**settings: Any) -> Desk:
        addresses = {f"{name}_address": peers.address for name in ("inference", "sandbox_judge", "replay_buffer")}
        chosen = {"redis_url": redis_server, "state_path": tmp_path / "state", "http_port": 0, **addresses, **settings}
        desk = Desk(Settings(**chosen), redis.Redis.from_url(redis_server), threading.Event())
        desks.append(desk)
        return desk

    yield build
    for desk in desks:
        desk.stop.set()
        desk.close()
        desk.redis.close()


@pytest.fixture
def desk(open_desk: Callable[..., Desk]) -> Desk:
    return open_desk()


@pytest.fixture
def serve() -> Iterator[Callable[[Desk], str]]:
    """Really serves a desk over HTTP; returns the URL."""
    running: list[tuple[Desk, threading.Thread]] = []

    def start(desk: Desk) -> str:
        http = HttpServer(desk)
        thread = threading.Thread(target=http.run, args=(desk.stop,))
        thread.start()
        running.append((desk, thread))
        wait_until(lambda: http.port > 0, "the HTTP server listens")
        return f"http://127.0.0.1:{http.port}"

    yield start
    for desk, thread in running:
        desk.stop.set()
        thread.join(15)
        assert not thread.is_alive()


@pytest.fixture
def api(desk: Desk, serve: Callable[[Desk], str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve(desk), timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """A spec that can be accepted: a model folder without weights to speak of and a small toy contest."""
    folder = tmp_path / "pi0"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return {
        "name": "test job",
        "model": {"path": str(folder)},
        "tasks": {"kind": "toy", "train_problems": 6, "evaluation_problems": 3},
        "evaluation": {"interval_steps": 10, "samples": 4, "ks": [1, 2]},
        "trainer": {"steps": 20, "update_interval": 10, "checkpoint_interval": 10},
    }


@pytest.fixture
def until() -> Callable[[Callable[[], Any], str], Any]:
    return wait_until


def wait_until(holds: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Polls until something holds and returns it."""
    deadline = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.02)
