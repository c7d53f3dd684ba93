"""Steps of Redis' clock: a dead member keeps its entries for one reclaim time at most, a living one loses none."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
import redis

from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.messaging.streams.entries import publish
from spo.messaging.streams.recovery import StreamHolder
from spo.messaging.streams.stage import Consumer
from spo.testing.peers import wait_until
from tests.chaos.clocks import Clocks
from tests.conftest import free_port as any_port

STREAM, GROUP = "spo:test:clock", "judges"
RECLAIM_SECONDS = 1.0


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisClient, Clocks]]:
    """A server whose clock can be stepped."""
    folder = tmp_path_factory.mktemp("stepped")
    clocks = Clocks(folder / "clocks")
    if not clocks.works:
        pytest.skip("no C compiler")
    port = any_port()
    process = subprocess.Popen(
        server_command(port, folder / "redis"), env=clocks.environment("redis"), stdout=subprocess.DEVNULL
    )
    try:
        with connect(f"redis://127.0.0.1:{port}/0", 20) as client:
            yield client, clocks
    finally:
        process.kill()
        process.wait(20)


def member(client: RedisClient, name: str) -> Consumer:
    return Consumer(client, STREAM, GROUP, name, RECLAIM_SECONDS, holder=StreamHolder(proven=True))


def step_to(client: RedisClient, clocks: Clocks, seconds: float) -> None:
    """Step, and wait until the server goes by it: it may still think in the time of its last tick."""
    clocks.set("redis", seconds)
    for _ in range(2):
        wait_until(lambda: abs(client.time()[0] - time.time() - seconds) < 2, "the step")  # type: ignore[attr-defined]


def begin(client: RedisClient, clocks: Clocks, entries: int) -> None:
    step_to(client, clocks, 0.0)
    client.delete(STREAM, f"{STREAM}:clock")
    publish(client, STREAM, [str(number).encode() for number in range(entries)])


@pytest.mark.parametrize("step", [-3600.0, -60.0, -5.0, 5.0, 3600.0])
def test_after_a_step_a_dead_members_entries_go_to_another_within_two_reclaim_times(
    step: float, stepped: tuple[RedisClient, Clocks]
) -> None:
    client, clocks = stepped
    begin(client, clocks, 3)
    assert len(member(client, "dead").read(5, 0.1)) == 3
    step_to(client, clocks, step)

    lives, found, began = member(client, "lives"), 0, time.monotonic()
    while found < 3 and time.monotonic() - began < 20:
        found += len(lives.read(5, 0.1))

    assert found == 3
    assert time.monotonic() - began < 4 * RECLAIM_SECONDS


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("step", [-60.0, 10.0, 3600.0])
def test_a_step_takes_nothing_from_a_member_that_keeps_its_entries_alive(
    step: float, known: bool, stepped: tuple[RedisClient, Clocks]
) -> None:
    """Whether the one that looks has looked before the step, or comes after it."""
    client, clocks = stepped
    begin(client, clocks, 3)
    holder, other = member(client, "holder"), member(client, "other")
    held = holder.read(5, 0.1)
    if known:
        assert other.read(5, 0.01) == []
    step_to(client, clocks, step)

    began = time.monotonic()
    while time.monotonic() - began < 2.5 * RECLAIM_SECONDS:
        assert other.read(5, RECLAIM_SECONDS / 8) == []
        holder.keep_alive(held)

    owners = client.xpending_range(STREAM, GROUP, "-", "+", 10)  # type: ignore[attr-defined]
    assert {(entry["consumer"], entry["times_delivered"]) for entry in owners} == {(b"holder", 1)}


def test_a_full_server_refuses_a_forward_whole_and_lets_acknowledgements_and_deletes_pass(
    redis_client: redis.Redis,
) -> None:
    holder = StreamHolder(proven=True)
    consumer = Consumer(redis_client, STREAM, GROUP, "full", 60.0, holder=holder)
    publish(redis_client, STREAM, [b"x"] * 4)
    forwarded, finished, buried, kept = consumer.read(4, 0.1)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            consumer.forward(forwarded, f"{STREAM}:next", b"R" * 1_000_000)
        consumer.finish([finished])
        consumer.dead_letter(buried, "why")
        consumer.keep_alive([kept])
        consumer.release([kept])
        assert [entry.payload for entry in consumer.read(4, 0.1)] == [b"x"], "what was given back is had again"
        redis_client.delete(f"{STREAM}:dead")
    finally:
        redis_client.config_set("maxmemory", 0)
    assert redis_client.xlen(STREAM) == 2
    assert not redis_client.exists(f"{STREAM}:next")
    assert consumer.forward(forwarded, f"{STREAM}:next", b"R"), "it is forwarded once there is room"
