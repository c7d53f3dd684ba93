"""Runs that share a stream: one that blocks, fails or floods keeps no other waiting, and nothing is lost or doubled."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from spo import redis_keys
from spo.errors import InvalidInput, NotReady
from spo.messaging.streams.entries import Entry, counted_append_words, depth
from spo.messaging.streams.recovery import newest
from spo.messaging.streams.stage import MAX_LANES, Consumer, StageRunner
from spo.testing.peers import wait_until

STREAM, GROUP = "spo:estimates", "readers"
FLOOD = 3000


def publish(client: redis.Redis, run_id: str, count: int) -> None:
    client.set(redis_keys.run_spec(run_id), "{}")
    with client.pipeline(transaction=False) as pipe:
        for number in range(count):
            for words in counted_append_words(STREAM, f"{run_id}-{number}".encode(), run_id):
                pipe.execute_command(*words)
        pipe.execute()


class Handler:
    """Counts what it finishes; `hook` may block or fail first."""

    def __init__(self, consumer: Consumer, hook: Callable[[Entry], object] = lambda entry: None) -> None:
        self.consumer = consumer
        self.hook = hook
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, entries: list[Entry]) -> None:
        assert len({entry.run_id for entry in entries}) == 1, "one run at a time"
        for entry in entries:
            self.hook(entry)
            self.consumer.finish([entry])
            with self._lock:
                self.done[entry.payload.decode()] += 1

    def of(self, run_id: str) -> int:
        with self._lock:
            return sum(name.startswith(f"{run_id}-") for name in self.done)


def a_consumer(client: redis.Redis, name: str = "one", reclaim_seconds: float = 20.0) -> Consumer:
    return Consumer(client, STREAM, GROUP, name, reclaim_after_seconds=reclaim_seconds)


@contextmanager
def working(lanes: StageRunner) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=lanes.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def test_a_flood_of_one_run_that_blocks_keeps_ten_entries_of_another_waiting_for_nothing(
    redis_client: redis.Redis,
) -> None:
    publish(redis_client, "job_FLOOD", FLOOD)
    publish(redis_client, "job_SMALL", 10)
    released = threading.Event()
    consumer = a_consumer(redis_client)
    handler = Handler(consumer, lambda entry: entry.run_id == "job_FLOOD" and released.wait(60))

    with working(StageRunner(consumer, handler, threads=4)):
        wait_until(lambda: handler.of("job_SMALL") == 10, "the small run is done")
        assert handler.of("job_FLOOD") == 0, "while the other has not got anywhere"
        released.set()
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "the flood is over", 60)

    assert set(handler.done.values()) == {1}
    assert len(handler.done) == FLOOD + 10


def test_a_run_by_itself_is_handled_as_fast_as_it_can_be_and_each_entry_once(redis_client: redis.Redis) -> None:
    publish(redis_client, "job_ALONE", FLOOD)
    # So long that what was given back can only have been taken back.
    consumer = a_consumer(redis_client, reclaim_seconds=600)
    handler = Handler(consumer)

    with working(StageRunner(consumer, handler, threads=2, count=8)):
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "all is done", 60)

    assert set(handler.done.values()) == {1}
    assert len(handler.done) == FLOOD


def test_a_run_whose_entries_fail_backs_off_alone_and_an_invalid_entry_is_a_dead_letter(
    redis_client: redis.Redis,
) -> None:
    publish(redis_client, "job_FAILS", 50)
    publish(redis_client, "job_WORKS", 200)
    away = threading.Event()
    away.set()

    def hook(entry: Entry) -> None:
        if entry.payload == b"job_WORKS-7":
            raise InvalidInput("not a request")
        if entry.run_id == "job_FAILS" and away.is_set():
            raise NotReady("its model is away")

    consumer = a_consumer(redis_client, reclaim_seconds=1)
    handler = Handler(consumer, hook)

    with working(StageRunner(consumer, handler, threads=2, count=4)):
        wait_until(lambda: handler.of("job_WORKS") == 199, "the other run is done")
        assert handler.of("job_FAILS") == 0
        away.clear()
        wait_until(lambda: handler.of("job_FAILS") == 50, "it goes on when it can", 60)

    assert [letter.run_id for letter in newest(redis_client, STREAM, "job_WORKS")] == ["job_WORKS"]
    assert redis_client.hgetall(redis_keys.entries_in_flight("job_FAILS")) == {}


class HalfAwayConsumer(Consumer):
    """Redis is away the first time that entries are given back."""

    was_away = False

    def release(self, entries: Sequence[Entry], after_seconds: float = 0.0) -> None:
        if entries and not self.was_away:
            self.was_away = True
            raise redis.ConnectionError("away")
        super().release(entries, after_seconds)


def test_what_could_not_be_given_back_while_redis_was_away_is_handled_all_the_same(redis_client: redis.Redis) -> None:
    publish(redis_client, "job_A", 20)
    consumer = HalfAwayConsumer(redis_client, STREAM, GROUP, "one", reclaim_after_seconds=600)
    handler = Handler(consumer, lambda _: time.sleep(0.05))

    with working(StageRunner(consumer, handler)):
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "all is done", 20)

    assert consumer.was_away
    assert set(handler.done.values()) == {1}


class SlowReleaseConsumer(Consumer):
    """Takes so long to give entries back that a lane runs empty meanwhile."""

    def release(self, entries: Sequence[Entry], after_seconds: float = 0.0) -> None:
        super().release(entries, after_seconds)
        time.sleep(0.5 if entries else 0)


def test_a_lane_that_runs_empty_while_entries_are_given_back_takes_them_back(redis_client: redis.Redis) -> None:
    publish(redis_client, "job_A", 20)
    consumer = SlowReleaseConsumer(redis_client, STREAM, GROUP, "one", reclaim_after_seconds=600)
    handler = Handler(consumer)

    with working(StageRunner(consumer, handler)):
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "all is done", 20)

    assert set(handler.done.values()) == {1}


def test_what_waits_in_a_lane_is_given_back_by_a_stop_and_taken_by_another_at_once(redis_client: redis.Redis) -> None:
    publish(redis_client, "job_A", 40)
    first, blocked = a_consumer(redis_client, "one", 600), threading.Event()
    begun = threading.Event()
    handler = Handler(first, lambda entry: (begun.set(), blocked.wait(30)))
    lanes = StageRunner(first, handler, threads=1, count=2)
    stop = threading.Event()
    thread = threading.Thread(target=lanes.run, args=(stop,))
    thread.start()
    begun.wait(20)
    wait_until(lambda: depth(redis_client, STREAM, GROUP).lag == 0, "all are read")

    stop.set()
    wait_until(lambda: first.in_hand <= 2, "what waits is given back")
    blocked.set()
    thread.join(20)
    second = a_consumer(redis_client, "two", 1)
    successor = Handler(second)
    with working(StageRunner(second, successor)):
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "the other does the rest")

    assert set((handler.done + successor.done).values()) == {1}
    assert len(handler.done + successor.done) == 40


def test_a_tenant_whose_many_runs_block_holds_up_no_run_of_another(redis_client: redis.Redis) -> None:
    runs = [f"job_A{number:02}" for number in range(4 * MAX_LANES)]
    for run_id in runs:
        redis_client.hset(redis_keys.job_record(run_id), "tenant", "a")
        publish(redis_client, run_id, 10)
    for run_id in ("job_B1", "job_B2"):
        redis_client.hset(redis_keys.job_record(run_id), "tenant", "b")
        publish(redis_client, run_id, 20)
    consumer = a_consumer(redis_client, reclaim_seconds=600)
    released = threading.Event()
    handler = Handler(consumer, lambda entry: entry.run_id in runs and released.wait(60))

    with working(StageRunner(consumer, handler)):
        wait_until(lambda: handler.of("job_B1") + handler.of("job_B2") == 40, "the other tenant's are done")
        assert sum(map(handler.of, runs)) == 0, "while the first tenant has not got anywhere"
        released.set()
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "all is done", 60)

    assert set(handler.done.values()) == {1}
    assert len(handler.done) == 10 * len(runs) + 40
