"""Holders that vanish with their entries: who is to blame, and who is given up on, on a real server."""

from __future__ import annotations

import threading
import time

import redis

from spo import redis_keys
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import Entry, publish
from spo.messaging.streams.recovery import ENTRY_DEATHS, StreamHolder
from spo.messaging.streams.stage import PROVEN_WEIGHT, Consumer, deliver
from spo.testing.peers import wait_until

STREAM, NEXT, GROUP = "spo:test:rollouts", "spo:test:verdicts", "judges"


class Killed(BaseException):
    """Ends a holder in the middle of a handler, as SIGKILL would: nothing of it is written any more."""


class Replica:
    """A process with one consumer; dead ones are replaced by fresh ones, as restarts do."""

    born = 0

    def __init__(self, client: redis.Redis, deadly: set[bytes], *, proven: bool) -> None:
        Replica.born += 1
        holder = StreamHolder(proven=proven)
        name = f"replica-{Replica.born}"
        self.consumer = Consumer(client, STREAM, GROUP, name, reclaim_after_seconds=0.0, holder=holder)
        self.deadly = deadly
        self.handled: list[list[bytes]] = []

    def handle(self, entries: list[Entry]) -> None:
        self.handled.append([entry.payload for entry in entries])
        if self.deadly & {entry.payload for entry in entries} or b"any" in self.deadly:
            raise Killed
        for entry in entries:
            self.consumer.forward(entry, NEXT, entry.payload)

    def work_once(self, count: int = 4) -> bool:
        """Read and handle; False when that killed it."""
        try:
            deliver(self.consumer, self.handle, self.consumer.read(count, 0.01))
        except Killed:
            return False
        return True


def payloads(client: redis.Redis, stream: str) -> list[bytes]:
    return sorted(fields[b"payload"] for _, fields in client.xrange(stream))


def run_until_empty(client: redis.Redis, deadly: set[bytes], *, proven: bool, most: int) -> int:
    """Let one replica after the other work until the stream is empty; returns how many died."""
    deaths, replica = 0, Replica(client, deadly, proven=proven)
    for _ in range(most):
        if not client.xlen(STREAM):
            return deaths
        if not replica.work_once():
            deaths += 1
            replica = Replica(client, deadly, proven=proven)
    return deaths


def test_an_entry_of_a_silent_consumer_is_given_to_another(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    Replica(redis_client, set(), proven=True).consumer.read(1, 0.01)

    (entry,) = Replica(redis_client, set(), proven=True).consumer.read(1, 0.01)

    assert (entry.payload, entry.deliveries, entry.alone) == (b"x", 2, False)


def test_five_holders_preempted_one_after_the_other_bury_nothing(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"innocent"])
    for _ in range(5):
        assert not Replica(redis_client, {b"any"}, proven=True).work_once(), "it had the entry in hand and was killed"

    assert Replica(redis_client, set(), proven=True).work_once()

    assert payloads(redis_client, NEXT) == [b"innocent"]
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 0
    assert not redis_client.exists(redis_keys.lone_deliveries(STREAM)), "the count goes with the entry"


def test_an_entry_that_kills_its_holders_is_found_out_and_the_others_of_its_batches_are_finished(
    redis_client: redis.Redis,
) -> None:
    publish(redis_client, STREAM, [b"a", b"b", b"poison", b"c"])

    deaths = run_until_empty(redis_client, {b"poison"}, proven=True, most=100)

    assert deaths == ENTRY_DEATHS.in_company + ENTRY_DEATHS.alone
    assert payloads(redis_client, NEXT) == [b"a", b"b", b"c"]
    (letter,) = recovery.newest(redis_client, STREAM, "")
    assert letter.reason == "7 holders vanished with it, the last ones while they had nothing else"
    assert not redis_client.exists(redis_keys.lone_deliveries(STREAM))


def test_the_crash_loop_of_a_replica_that_never_finishes_anything_buries_nobody_for_long(
    redis_client: redis.Redis,
) -> None:
    names = [f"group {number}".encode() for number in range(10)]
    publish(redis_client, STREAM, names)

    deaths = run_until_empty(redis_client, {b"any"}, proven=False, most=100)

    assert deaths == 100
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 0
    run_until_empty(redis_client, set(), proven=True, most=100)
    assert payloads(redis_client, NEXT) == names


def test_an_entry_that_is_all_there_is_and_kills_every_holder_is_given_up_on_at_last(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"poison"])

    deaths = run_until_empty(redis_client, {b"poison"}, proven=False, most=100)

    assert deaths == ENTRY_DEATHS.in_company + ENTRY_DEATHS.alone * PROVEN_WEIGHT
    assert redis_client.xlen(redis_keys.dead_letters(STREAM)) == 1


def test_a_holder_that_gives_an_entry_back_takes_back_what_was_counted(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    for _ in range(ENTRY_DEATHS.in_company + 1):
        Replica(redis_client, {b"any"}, proven=True).work_once()
    survivor = Replica(redis_client, set(), proven=True).consumer
    (entry,) = survivor.read(1, 0.01)
    assert entry.alone
    assert survivor.begin_alone(entry)
    assert redis_client.hgetall(redis_keys.lone_deliveries(STREAM)) == {
        entry.entry_id.encode(): str(2 * PROVEN_WEIGHT).encode()
    }

    survivor.release([entry])

    assert not redis_client.exists(redis_keys.lone_deliveries(STREAM))
    (again,) = Replica(redis_client, set(), proven=True).consumer.read(1, 0.01)
    assert (again.deliveries, again.alone) == (1, False)


def test_a_lone_entry_waits_until_no_other_thread_of_the_process_handles_any(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"suspect"])
    for _ in range(ENTRY_DEATHS.in_company):
        Replica(redis_client, {b"any"}, proven=True).work_once()
    holder, release, seen = StreamHolder(proven=True), threading.Event(), []
    first = Consumer(redis_client, STREAM, GROUP, "first", 0.0, holder=holder)
    (suspect,) = first.read(1, 0.01)
    publish(redis_client, STREAM, [b"slow"])
    second = Consumer(redis_client, STREAM, GROUP, "second", 60.0, holder=holder)
    slow = second.read(1, 0.01)

    def handle(consumer: Consumer, entries: list[Entry]) -> None:
        seen.append(entries[0].payload)
        if entries[0].payload == b"slow":
            release.wait(10)
        consumer.finish(entries)

    threads = [
        threading.Thread(target=deliver, args=(second, lambda entries: handle(second, entries), slow)),
        threading.Thread(target=deliver, args=(first, lambda entries: handle(first, entries), [suspect])),
    ]
    threads[0].start()
    wait_until(lambda: seen == [b"slow"], "the slow entry in hand", 5)
    threads[1].start()
    threads[1].join(0.3)
    assert seen == [b"slow"]
    assert not redis_client.exists(redis_keys.lone_deliveries(STREAM)), "nothing is counted before it is alone"
    release.set()
    for thread in threads:
        thread.join(10)

    assert seen == [b"slow", b"suspect"]
    assert redis_client.xlen(STREAM) == 0


def test_entries_of_a_dead_replica_behind_many_in_slow_hands_are_found(redis_client: redis.Redis) -> None:
    """200 entries are kept alive by a slow replica, the next 64 were those of one that died."""
    publish(redis_client, STREAM, [str(number).encode() for number in range(1200)])
    slow = Consumer(redis_client, STREAM, GROUP, "slow", 0.5, holder=StreamHolder(proven=True))
    dead = Consumer(redis_client, STREAM, GROUP, "dead", 0.5, holder=StreamHolder(proven=True))
    mine, lost = slow.read(200, 0.1), {entry.payload for entry in dead.read(64, 0.1)}
    for room in (1, 4, 16):
        found: set[bytes] = set()
        reader = Consumer(redis_client, STREAM, GROUP, f"room-{room}", 0.5, holder=StreamHolder(proven=True))

        def read(reader: Consumer = reader, found: set[bytes] = found, room: int = room) -> bool:
            slow.keep_alive(mine)
            found |= lost & {entry.payload for entry in reader.read(room, 0.01)}
            return len(found) >= 8

        wait_until(read, f"eight of the dead replica's entries, {room} at a time", 10, poll_seconds=0.05)


def test_a_paused_process_that_wakes_up_takes_nothing_back(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    paused = Replica(redis_client, set(), proven=True).consumer
    entries = paused.read(1, 0.01)
    other = Replica(redis_client, set(), proven=True).consumer
    other.read(1, 0.01)

    paused.keep_alive(entries)
    paused.release(entries)

    (pending,) = redis_client.xpending_range(STREAM, GROUP, "-", "+", 10)
    assert (pending["consumer"].decode(), pending["times_delivered"]) == (other.name, 2)


def test_an_entry_that_looked_silent_does_not_come_twice_to_who_has_it_still(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    slow = Consumer(redis_client, STREAM, GROUP, "slow", 0.1, holder=StreamHolder(proven=True))
    entries = slow.read(1, 0.01)
    time.sleep(0.2)

    assert slow.read(1, 0.01) == [], "it is being handled"
    slow.release(entries)
    assert [entry.payload for entry in slow.read(1, 0.01)] == [b"x"]


def test_names_of_dead_replicas_leave_the_group_once_they_hold_nothing(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"1", b"2"])
    gone, holds = (Consumer(redis_client, STREAM, GROUP, name, holder=StreamHolder()) for name in ("gone", "holds"))
    gone.finish(gone.read(1, 0.01))
    held = holds.read(1, 0.01)
    lives = Consumer(redis_client, STREAM, GROUP, "lives", 0.1, tidy_seconds=0.05, silent_seconds=0.3)

    def members() -> set[str]:
        holds.keep_alive(held)
        lives.read(1, 0.01)
        return {facts["name"].decode() for facts in redis_client.xinfo_consumers(STREAM, GROUP)}

    wait_until(lambda: members() == {"holds", "lives"}, "only the dead replica's name gone", 5)


def test_holders_that_are_asked_to_stop_with_an_entry_in_hand_bury_nothing(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"slow"])
    for number in range(2 * ENTRY_DEATHS.alone):
        replica = Replica(redis_client, {b"any"}, proven=True)
        assert not replica.work_once(), "it has the entry in hand, and is stopped"
        (pending,) = redis_client.xpending_range(STREAM, GROUP, "-", "+", 1)
        assert pending["times_delivered"] == 1, f"{number} holders that were stopped are no deaths"
        replica.consumer.holder.give_back()
    assert not redis_client.exists(redis_keys.lone_deliveries(STREAM))

    assert Replica(redis_client, set(), proven=True).work_once()
    assert payloads(redis_client, NEXT) == [b"slow"]
