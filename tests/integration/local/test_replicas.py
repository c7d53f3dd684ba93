"""Replicas of a local platform follow the wishes in Redis: real processes, a real server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from spo import redis_keys
from spo.local.judge_client import Child
from spo.local.launcher import LocalReplicas

OBEDIENT = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(0))
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = OBEDIENT.replace("lambda *_: exit(0)", "signal.SIG_IGN")


@pytest.fixture
def replicas(redis_server: str, redis_client: redis.Redis, tmp_path: Path) -> Iterator[Callable[[str], LocalReplicas]]:
    made: list[LocalReplicas] = []

    def build(program: str) -> LocalReplicas:
        def child(name: str, _pool: str) -> Child:
            command = [sys.executable, "-c", program]
            return Child(name, command, {}, tmp_path / f"{name}.log", "127.0.0.1:1", lambda: True)

        first = child("inference", "inference")
        first.start()
        made.append(LocalReplicas([first], child, redis_server, drain_seconds=3))
        return made[-1]

    yield build
    for each in made:
        for child in [*each._children, *each.leaving]:
            child.stop_by(0)


def follow_until(replicas: LocalReplicas, holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        replicas.follow()
        time.sleep(0.05)


def names(replicas: LocalReplicas) -> list[str]:
    return [child.name for child in replicas._children if child.is_running()]


def test_replicas_come_and_go_as_wished(
    replicas: Callable[[str], LocalReplicas], redis_client: redis.Redis, tmp_path: Path
) -> None:
    pool = replicas(OBEDIENT)
    redis_client.hset(redis_keys.scale(), "inference", 3)
    follow_until(pool, lambda: names(pool) == ["inference", "inference-2", "inference-3"], "three run")
    follow_until(pool, lambda: (tmp_path / "inference-3.log").read_text() == "up\n", "the third listens to signals")
    leaving = pool._children[-1]

    redis_client.hset(redis_keys.scale(), "inference", 1)

    follow_until(pool, lambda: names(pool) == ["inference"] and not pool.leaving, "one is left")
    assert not leaving.is_running()
    redis_client.hset(redis_keys.scale(), "inference", 2)
    follow_until(pool, lambda: names(pool) == ["inference", "inference-2"], "the second is back")


def test_a_replica_that_does_not_drain_is_killed_and_its_name_is_not_taken_twice(
    replicas: Callable[[str], LocalReplicas], redis_client: redis.Redis, tmp_path: Path
) -> None:
    pool = replicas(STUBBORN)
    redis_client.hset(redis_keys.scale(), "inference", 2)
    follow_until(pool, lambda: names(pool) == ["inference", "inference-2"], "two run")
    follow_until(pool, lambda: (tmp_path / "inference-2.log").read_text() == "up\n", "the second ignores signals")

    redis_client.hset(redis_keys.scale(), "inference", 1)
    follow_until(pool, lambda: bool(pool.leaving), "the second drains")
    redis_client.hset(redis_keys.scale(), "inference", 2)
    follow_until(pool, lambda: len(names(pool)) == 2, "another takes its place")

    assert names(pool) == ["inference", "inference-3"]
    follow_until(pool, lambda: not pool.leaving, "the stubborn one is gone")


def test_without_redis_everything_stays_as_it_is(replicas: Callable[[str], LocalReplicas]) -> None:
    pool = replicas(OBEDIENT)
    pool._client = redis.Redis.from_url("redis://127.0.0.1:1/0")

    pool.follow()

    assert names(pool) == ["inference"]
