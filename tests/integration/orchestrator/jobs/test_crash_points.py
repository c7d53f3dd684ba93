"""The orchestrator is killed at each of its commits, just before Redis has it and just after: each happens once.

A proxy in front of the real Redis sees every command of the real process and chooses the moment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from services.orchestrator.job_records import fold
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.client import Client
from spo.local.warm_parent import WarmProcess
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.v1.value_pb2 import EstimateRequest
from tests.conftest import free_port
from tests.support.warm_services import ORCHESTRATOR, start_warm, warm_parent

pytestmark = pytest.mark.slow

LIFE_SECONDS = 240.0
# Words of a commit: EVAL, script, number of keys, six keys, job, expected states, new state, ..., kind.
NEW_STATE, POSITION = 11, b"estimates_published"
POINTS = ("queued", "validating", "estimating", "published", "cancelling", "cancelled")


def commands_in(buffer: bytearray) -> Iterator[tuple[bytes, list[bytes]]]:
    """The whole commands at the start of what a client sent, with their words; they leave the buffer."""
    while buffer.startswith(b"*"):
        try:
            head, at = _line(buffer, 0)
            words = []
            for _ in range(int(head[1:])):
                size, at = _line(buffer, at)
                end = at + int(size[1:])
                if len(buffer) < end + 2:
                    return
                words.append(bytes(buffer[at:end]))
                at = end + 2
        except ValueError:
            return
        raw = bytes(buffer[:at])
        del buffer[:at]
        yield raw, words


def _line(buffer: bytearray, at: int) -> tuple[bytes, int]:
    end = buffer.index(b"\r\n", at)
    return bytes(buffer[at:end]), end + 2


def point_of(words: list[bytes]) -> str:
    """The commit that a command is, or ""."""
    if words[0] != b"EVAL" or len(words) < 20:
        return ""
    return words[NEW_STATE].decode() or ("published" if POSITION in words else "")


@dataclass
class Executioner:
    """Between an orchestrator and Redis: kills it once before and once after each commit."""

    redis_url: str
    process: WarmProcess | None = None
    left: Counter[tuple[str, str]] = field(
        default_factory=lambda: Counter((point, when) for point in POINTS for when in ("before", "after"))
    )
    killed: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        place = urlsplit(self.redis_url)
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection((place.hostname or "", place.port or 0))
            answered = threading.Event()
            threading.Thread(target=self._upwards, args=(client, server, answered), daemon=True).start()
            threading.Thread(target=self._downwards, args=(client, server, answered), daemon=True).start()

    def _upwards(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        buffer = bytearray()
        try:
            while part := client.recv(1 << 16):
                buffer += part
                for raw, words in commands_in(buffer):
                    point = point_of(words)
                    if point and self._kills(point, "before"):
                        return
                    answered.clear()
                    server.sendall(raw)
                    if point and self.left[point, "after"]:
                        # Redis has it; whether the process hears of it is a race that it loses or wins.
                        answered.wait(10)
                        if self._kills(point, "after"):
                            return
        except OSError:
            pass
        finally:
            server.close()
            client.close()

    def _downwards(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        try:
            while part := server.recv(1 << 16):
                answered.set()
                client.sendall(part)
        except OSError:
            pass

    def _kills(self, point: str, when: str) -> bool:
        with self._lock:
            if not self.left[point, when] or self.process is None:
                return False
            self.left[point, when] -= 1
            self.killed.append((point, when))
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
            return True


class Restarter:
    """Starts the orchestrator again whenever it died."""

    def __init__(self, executioner: Executioner, peers: ServiceDoubles, folder: Path) -> None:
        self.executioner = executioner
        self.log = folder / "orchestrator.log"
        self.port = free_port()
        self.stop = threading.Event()
        self.environment = os.environ | {
            "SPO_REDIS_URL": executioner.url,
            "SPO_STATE_PATH": str(folder / "state"),
            "SPO_ORCHESTRATOR_PORT": str(free_port()),
            "SPO_ORCHESTRATOR_HTTP_PORT": str(self.port),
            "SPO_INFERENCE_ADDRESS": peers.address,
            "SPO_SANDBOX_JUDGE_ADDRESS": peers.address,
            "SPO_REPLAY_BUFFER_ADDRESS": peers.address,
        }
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Restarter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(30)
        if self.executioner.process:
            self.executioner.process.kill()
            self.executioner.process.wait(10)

    def _run(self) -> None:
        while not self.stop.wait(0.05):
            process = self.executioner.process
            if process is None or process.poll() is not None:
                self.executioner.process = start_warm("services.orchestrator", self.environment, self.log)


@pytest.mark.timeout(300)
def test_killed_at_every_commit_each_transition_happens_exactly_once(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, document: dict[str, Any], tmp_path: Path
) -> None:
    warm_parent(ORCHESTRATOR)  # in this thread: it ends with the one that began it
    executioner = Executioner(redis_server)
    jobs = JobStore(redis_client)
    deadline = time.monotonic() + LIFE_SECONDS
    running = Restarter(executioner, peers, tmp_path)
    url = f"http://127.0.0.1:{running.port}"
    with running, Client(url, retry_seconds=LIFE_SECONDS, timeout_seconds=10) as client:
        job_id = client.submit(document, idempotency_key="once").id
        while redis_client.xlen(redis_keys.estimates()) < 6 or executioner.left["published", "after"]:
            assert time.monotonic() < deadline, running.log.read_text()[-3000:]
            time.sleep(0.1)
        while jobs.state(job_id) is not JobState.CANCELLED or executioner.left.total():
            assert time.monotonic() < deadline, (executioner.left, running.log.read_text()[-3000:])
            client.cancel(job_id)
            time.sleep(0.1)
    executioner.close()

    assert sorted(executioner.killed) == sorted((point, when) for point in POINTS for when in ("before", "after"))
    events = jobs.events(job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    moves = [event.body for event in events if event.kind == "state"]
    assert [move["to"] for move in moves] == ["queued", "validating", "estimating", "cancelling", "cancelled"]
    assert fold(moves) is JobState.CANCELLED
    assert redis_client.zcard(redis_keys.job_index()) == 1
    asked: Any = redis_client.xrange(redis_keys.estimates())
    prompts = [EstimateRequest.FromString(fields[b"payload"]).prompt.prompt_id for _, fields in asked]
    assert len(prompts) == len(set(prompts)) == 6
    assert json.loads(redis_client.get(redis_keys.run_spec(job_id)) or b"")["name"] == document["name"]
