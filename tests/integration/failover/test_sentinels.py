"""Redis Sentinels choose a new primary: clients follow it, and what its replicas had acknowledged is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from spo import redis_keys
from spo.errors import Unreachable
from spo.messaging.redis_client import as_spo_error, connect, open_async_server, public_address
from spo.messaging.streams.entries import Entry
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.testing.peers import wait_until
from tests.support.sentinels import PASSWORD, SENTINEL_PASSWORD, SentinelCluster

FAILOVERS = 2
MOST_SECONDS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelCluster]:
    started = SentinelCluster(tmp_path_factory.mktemp("sentinels"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


class Writer(threading.Thread):
    """Writes to a stream all the time; `kept` is what a replica had, too, when it was acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.client = connect(url)
        self.stop = threading.Event()
        self.kept: list[tuple[float, bytes]] = []
        self.codes: set[str] = set()

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            payload = b"%d" % number
            try:
                with self.client.pipeline(transaction=False) as pipe:
                    pipe.xadd(redis_keys.rollouts(), {"payload": payload})
                    pipe.execute_command("WAIT", 1, 500)
                    if pipe.execute()[1] >= 1:
                        self.kept.append((time.monotonic(), payload))
            except redis.RedisError as error:
                self.codes.add(as_spo_error(error).code)
                time.sleep(0.05)


@pytest.mark.slow
def test_clients_follow_the_primary_and_what_was_replicated_is_there(
    cluster: SentinelCluster, record_property: Callable[[str, object], None]
) -> None:
    client = connect(cluster.url())
    consumer = Consumer(connect(cluster.url()), redis_keys.rollouts(), redis_keys.JUDGE_GROUP, "judge", 60.0)
    seen: set[bytes] = set()
    stop = threading.Event()

    def handle(entries: list[Entry]) -> None:
        seen.update(entry.payload for entry in entries)
        consumer.finish(entries)

    reader = threading.Thread(target=StageRunner(consumer, handle, count=16).run, args=(stop,))
    writer = Writer(cluster.url())
    reader.start()
    writer.start()
    try:
        for _ in range(FAILOVERS):
            before = len(writer.kept)
            wait_until(lambda at=before: len(writer.kept) > at + 200, "writes go on", 30)
            killed = time.monotonic()
            old = cluster.kill_primary()
            wait_until(lambda at=killed: writer.kept[-1][0] > at + 0.5, "writes go on", MOST_SECONDS)
            began = next(at for at, _ in writer.kept if at > killed + 0.5)
            record_property("failover_seconds", round(began - killed, 1))
            print(f"writes went on {began - killed:.1f} s after the kill")
            # The Sentinels tell each other who it is now.
            wait_until(lambda at=old: cluster.primary() != at, "every Sentinel knows the new primary", 20)
            assert client.ping()
            cluster.revive(old)
    finally:
        writer.stop.set()
        writer.join(20)
    try:
        kept = {payload for _, payload in writer.kept}
        wait_until(lambda: kept <= seen, "every replicated write is handled", 30)
    finally:
        stop.set()
        reader.join(20)
    assert writer.codes <= {"redis_unreachable", "redis_failover"}


async def written_to_both(client: Any) -> None:
    """A first write that the replica holds too: Sentinels still settle on a loaded machine and cut connections then."""
    for _ in range(20):
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            await client.set("before", 1)
            if await client.wait(1, 5000) == 1:
                return
        await asyncio.sleep(0.5)
    raise AssertionError("the replica never held the first write")


def test_live_events_follow_it_too(cluster: SentinelCluster) -> None:
    async def follow() -> None:
        async with open_async_server(cluster.url()) as client:
            await client.set("before", 1)
            await client.wait(1, 5000)
            old = cluster.kill_primary()
            deadline = time.monotonic() + MOST_SECONDS
            found = None
            while found is None and time.monotonic() < deadline:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    found = await client.get("before")
                await asyncio.sleep(0.1)
            assert found == b"1"
            cluster.revive(old)

    asyncio.run(follow())


def test_a_service_that_no_sentinel_watches_is_told_without_secrets(cluster: SentinelCluster) -> None:
    url = cluster.url().replace("/mymaster/", "/another/")
    with pytest.raises(Unreachable, match="another/0 of the Sentinels at") as failed:
        connect(url, 0.5)
    assert failed.value.code == "redis_failover"
    assert PASSWORD not in str(failed.value) + public_address(url)


def test_sentinels_that_want_another_password_say_so_at_once(cluster: SentinelCluster) -> None:
    url = cluster.url().partition("?")[0]
    with pytest.raises(Unreachable, match="refuses the user or password") as failed:
        connect(url, 30)
    assert failed.value.code == "redis_refused"
    assert SENTINEL_PASSWORD not in str(failed.value)


def test_sentinels_that_are_away_are_passed_over(cluster: SentinelCluster) -> None:
    url = cluster.url().replace("@", "@127.0.0.1:1,", 1)
    assert connect(url, 5).ping()
    with pytest.raises(Unreachable) as failed:
        connect("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster", 0.5)
    assert failed.value.code == "redis_failover"


def test_a_service_says_what_is_wrong_with_its_url(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "SPO_REDIS_URL": "redis+sentinel://:canary@there:26379",
        "SPO_STATE_PATH": str(tmp_path),
    }
    command = [sys.executable, "-m", "services.replay_buffer"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode
    assert "bad_redis_url" in done.stdout + done.stderr
    assert "canary" not in done.stdout + done.stderr
