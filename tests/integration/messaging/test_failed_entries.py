"""What a failure of a handler does to its entry and to the others, on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis

from spo import redis_keys
from spo.errors import InternalError, InvalidInput, NotFound, NotReady
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import Entry, counted_append_words, depth, publish
from spo.messaging.streams.recovery import StreamHolder, troubles_of
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.testing.peers import wait_until

STREAM, NEXT = "spo:test:rollouts", "spo:test:verdicts"


class Stage:
    """A worker on STREAM that forwards to NEXT and fails as a test says."""

    def __init__(self, client: redis.Redis, fault: Callable[[Entry], Exception | None]) -> None:
        self.consumer = Consumer(client, STREAM, "judges", "a", reclaim_after_seconds=1.0, holder=StreamHolder())
        self.fault = fault
        self.handled: list[list[bytes]] = []
        self.stop = threading.Event()
        runner = StageRunner(self.consumer, self.handle, count=16)
        self.thread = threading.Thread(target=runner.run, args=(self.stop,), daemon=True)

    def handle(self, entries: list[Entry]) -> None:
        self.handled.append([entry.payload for entry in entries])
        for entry in entries:
            error = self.fault(entry)
            if error:
                raise error
            self.consumer.forward(entry, NEXT, entry.payload)

    def __enter__(self) -> Stage:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(10)


def payloads(client: redis.Redis, stream: str) -> set[bytes]:
    return {fields[b"payload"] for _, fields in client.xrange(stream)}


def test_an_entry_that_fails_is_isolated_and_the_others_of_its_batch_are_finished(redis_client: redis.Redis) -> None:
    """A judge that fails on one program of sixteen groups: fifteen groups go on at once, none is given up on."""
    publish(redis_client, STREAM, [str(number).encode() for number in range(16)])

    def fault(entry: Entry) -> Exception | None:
        return NotReady("the judge failed 3 times", code="judge_fault") if entry.payload == b"2" else None

    with Stage(redis_client, fault) as stage:
        wait_until(lambda: redis_client.xlen(NEXT) == 15, "fifteen finished entries", 10)
        wait_until(lambda: stage.handled.count([b"2"]) >= 5, "more deliveries than were once allowed", 30)

    assert payloads(redis_client, STREAM) == {b"2"}
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 0


def test_invalid_input_is_a_dead_letter_at_once_and_harms_no_neighbour(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"good 1", b"bad", b"good 2"])

    def fault(entry: Entry) -> Exception | None:
        return InvalidInput("not a group") if entry.payload == b"bad" else None

    with Stage(redis_client, fault):
        wait_until(lambda: redis_client.xlen(STREAM) == 0, "no entry left", 10)

    assert payloads(redis_client, NEXT) == {b"good 1", b"good 2"}
    (letter,) = recovery.newest(redis_client, STREAM, "")
    assert letter.reason == "not a group [invalid_input]"
    assert recovery.find(redis_client, STREAM, letter.letter_id, "")[1] == b"bad"


def test_a_service_that_answers_internal_for_a_while_costs_time_and_no_entry(redis_client: redis.Redis) -> None:
    """A hundred groups meet a service that is out of memory for three seconds."""
    redis_client.set(redis_keys.run_spec("job_a"), "{}")
    with redis_client.pipeline() as pipe:
        for number in range(100):
            for words in counted_append_words(STREAM, str(number).encode(), "job_a"):
                pipe.execute_command(*words)
        pipe.execute()
    began = time.monotonic()
    well_at = began + 3.0

    def fault(_: Entry) -> Exception | None:
        return InternalError("CUDA out of memory") if time.monotonic() < well_at else None

    with Stage(redis_client, fault) as stage:
        wait_until(lambda: bool(troubles_of(redis_client, "job_a", now_ms())), "a wait reason", 10)
        wait_until(lambda: time.monotonic() > began + 1.5, "more than a second")
        (trouble,) = troubles_of(redis_client, "job_a", now_ms())
        tries, seconds = len(stage.handled), time.monotonic() - began
        wait_until(lambda: redis_client.xlen(NEXT) == 100, "all entries finished", 20)

    assert (trouble.place, trouble.reason) == (STREAM, "CUDA out of memory [internal]")
    # What failed comes again after a second.
    assert tries < 30 * (1 + seconds), "an outage is noticed after a few entries, not tried with each"
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 0
    assert redis_client.hlen(redis_keys.dead_letter_counts("job_a")) == 0


def now_ms() -> int:
    return int(time.time() * 1000)


def test_an_entry_that_fails_waits_longer_each_time(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    member = Consumer(redis_client, STREAM, "judges", "a", reclaim_after_seconds=60.0, holder=StreamHolder())
    (entry,) = member.read(1, 0.05)
    waits = []
    for _ in range(7):
        member.fail(entry, NotReady("away"))
        (pending,) = redis_client.xpending_range(STREAM, "judges", "-", "+", 1)
        waits.append(round(60 - pending["time_since_delivered"] / 1000))

    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert pending["times_delivered"] == 0, "a failure that its holder survives is no delivery"


def test_an_entry_of_a_deleted_run_is_dropped_and_one_of_a_living_run_never(redis_client: redis.Redis) -> None:
    redis_client.set(redis_keys.run_spec("alive"), "{}")
    for run in ("alive", "gone"):
        for words in counted_append_words(STREAM, run.encode(), run):
            redis_client.execute_command(*words)

    def fault(_: Entry) -> Exception | None:
        return NotFound("there is no run", code="unknown_run")

    with Stage(redis_client, fault) as stage:
        wait_until(lambda: len(stage.handled) > 3, "both handled", 10)
        wait_until(lambda: payloads(redis_client, STREAM) == {b"alive"}, "only the living run's entry", 10)

    assert redis_client.keys("spo:gone*") == []
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 0


def test_a_fault_of_ours_is_retried_like_any_other(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    faults: list[Exception] = [KeyError("a bug"), MemoryError()]

    with Stage(redis_client, lambda _: faults.pop() if faults else None):
        wait_until(lambda: redis_client.xlen(NEXT) == 1, "the entry finished", 15)


def test_an_entry_is_pending_while_its_handler_fails(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    with Stage(redis_client, lambda _: NotReady("judge is away")) as stage:
        wait_until(lambda: bool(stage.handled), "a delivery", 10)

    assert (depth(redis_client, STREAM, "judges").lag, depth(redis_client, STREAM, "judges").pending) == (0, 1)
