"""Redis that comes back empty, refuses or is away: what consumers do, and what they say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import structlog
from structlog.testing import LogCapture

from spo import redis_keys
from spo.errors import NotFound
from spo.local.launcher import free_ports
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import Entry, publish
from spo.messaging.streams.recovery import StreamHolder
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.rpc.client import is_healthy
from spo.testing.peers import wait_until

ROOT = Path(__file__).parents[3]
STREAMS = {
    redis_keys.rollouts(): redis_keys.JUDGE_GROUP,
    redis_keys.verdicts(): redis_keys.INGEST_GROUP,
    redis_keys.estimates(): redis_keys.VALUE_GROUP,
}


@contextmanager
def at_work(consumers: list[Consumer], seen: list[bytes]) -> Iterator[None]:
    """Each consumer in a loop of its own, as the services run them."""
    stop = threading.Event()

    def handler_of(consumer: Consumer) -> threading.Thread:
        def finish(entries: list[Entry]) -> None:
            seen.extend(entry.payload for entry in entries)
            consumer.finish(entries)

        return threading.Thread(target=StageRunner(consumer, finish, count=16).run, args=(stop,), daemon=True)

    threads = [handler_of(consumer) for consumer in consumers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


@contextmanager
def refusing_writes(client: redis.Redis) -> Iterator[None]:
    """The server refuses every write, as with a full disk (MISCONF): reading a group is one."""
    client.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        client.config_set("min-replicas-to-write", 0)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    captured = LogCapture()
    structlog.configure(processors=[captured])
    monkeypatch.setattr(recovery, "log", structlog.get_logger())
    return captured


def test_consumers_work_on_when_redis_came_back_empty(redis_client: redis.Redis) -> None:
    holder, seen = StreamHolder(), []
    consumers = [Consumer(redis_client, stream, group, "a", holder=holder) for stream, group in STREAMS.items()]
    with at_work(consumers, seen):
        for stream in STREAMS:
            publish(redis_client, stream, [f"before {stream}".encode()])
        wait_until(lambda: len(seen) == 3, "the entries before", 10)

        redis_client.flushall()
        for stream in STREAMS:
            publish(redis_client, stream, [f"after {stream}".encode()])

        wait_until(lambda: len(seen) == 6, "the entries after", 10)
    assert holder.obstacle() == ""


def test_a_group_that_was_lost_alone_is_made_again_and_nothing_on_the_stream_is_skipped(
    redis_client: redis.Redis,
) -> None:
    consumer = Consumer(redis_client, "s", "group", "a", holder=StreamHolder())
    assert consumer.read(1, 0.01) == []
    publish(redis_client, "s", [b"1", b"2"])
    redis_client.xgroup_destroy("s", "group")

    assert [entry.payload for entry in consumer.read(2, 0.01)] == [b"1", b"2"]


def test_the_stream_of_a_deleted_run_is_not_made_again(redis_client: redis.Redis) -> None:
    redis_client.set(redis_keys.run_spec("job_a"), "{}")
    consumer = Consumer(redis_client, redis_keys.prompts("job_a"), "inference", "a", run_id="job_a")
    consumer.read(1, 0.01)
    redis_client.flushall()

    with pytest.raises(NotFound, match="job_a"):
        consumer.read(1, 0.01)

    assert redis_client.keys("*") == []


def test_a_server_that_refuses_is_one_line_per_stream_and_one_when_it_is_over(
    redis_client: redis.Redis, lines: LogCapture
) -> None:
    holder, seen = StreamHolder(), []
    consumers = [Consumer(redis_client, "s", "group", f"worker-{n}", holder=holder) for n in range(8)]
    with at_work(consumers, seen):
        publish(redis_client, "s", [b"before"])
        wait_until(lambda: seen == [b"before"], "the first entry", 10)
        with refusing_writes(redis_client):
            reason = wait_until(holder.obstacle, "an obstacle", 10)
            threading.Event().wait(2.0)
        publish(redis_client, "s", [b"after"])
        wait_until(lambda: seen == [b"before", b"after"], "the second entry", 60)

    assert reason.startswith("cannot read s: ")
    assert "NOREPLICAS" in reason
    told = [line["event"] for line in lines.entries if line["event"].startswith("a stream cannot be read")]
    assert told == ["a stream cannot be read", "a stream cannot be read: over"]


def test_a_service_that_cannot_read_its_stream_says_not_ready_and_works_on_afterwards(
    redis_server: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    port = free_ports(["replay"], {})["replay"]
    settings = {"SPO_REDIS_URL": redis_server, "SPO_STATE_PATH": str(tmp_path), "SPO_REPLAY_BUFFER_PORT": str(port)}
    address = f"127.0.0.1:{port}"
    check = [sys.executable, "-m", "spo.rpc.healthcheck", address]
    command = [sys.executable, "-m", "services.replay_buffer"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        wait_until(lambda: is_healthy(address), "the replay buffer serves", 90, poll_seconds=0.2)
        with refusing_writes(redis_client):
            wait_until(lambda: not is_healthy(address), "it is not ready", 20, poll_seconds=0.2)
            told = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert "cannot read spo:verdicts" in told.stdout + told.stderr
        wait_until(lambda: is_healthy(address), "it is ready again", 20, poll_seconds=0.2)
        redis_client.delete(redis_keys.verdicts())
        publish(redis_client, redis_keys.verdicts(), [b"\xff no group"])
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "the entry is handled", 20)
    finally:
        process.terminate()
        process.wait(30)

    written = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line for line in written if "exception" in line] == []
