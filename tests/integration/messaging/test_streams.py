"""What the streams promise, on a real server."""

from __future__ import annotations

import random

import redis

from spo.messaging.streams.entries import Entry, counted_append_words, entries_of_run, publish
from spo.messaging.streams.stage import Consumer
from spo.redis_keys import entries_in_flight

STREAM, NEXT = "spo:test:rollouts", "spo:test:verdicts"
RUNS = ("job_a", "job_b")


def consumer(client: redis.Redis, name: str, **settings: float) -> Consumer:
    return Consumer(client, STREAM, "judges", name, **settings)  # type: ignore[arg-type]


def payloads(client: redis.Redis, stream: str) -> list[bytes]:
    return [fields[b"payload"] for _, fields in client.xrange(stream)]


def test_what_is_published_is_read_in_order_once(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"1", b"2", b"3"])
    first, second = consumer(redis_client, "a"), consumer(redis_client, "b")

    read = [*first.read(2, 0.1), *second.read(2, 0.1)]

    assert [entry.payload for entry in read] == [b"1", b"2", b"3"]
    assert first.read(2, 0.01) == []


def test_handing_on_moves_an_entry_atomically_and_only_once(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"group"])
    dead, alive = consumer(redis_client, "dead"), consumer(redis_client, "alive", reclaim_after_seconds=0.0)
    (entry,) = dead.read(1, 0.1)
    (again,) = alive.read(1, 0.1)

    assert alive.forward(again, NEXT, b"judged")
    assert not dead.forward(entry, NEXT, b"judged"), "the first delivery woke up late: its result must not appear twice"

    assert payloads(redis_client, NEXT) == [b"judged"]
    assert redis_client.xlen(STREAM) == 0


def test_an_entry_of_a_silent_consumer_is_given_to_another(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    consumer(redis_client, "killed").read(1, 0.1)

    (entry,) = consumer(redis_client, "survivor", reclaim_after_seconds=0.0).read(1, 0.1)

    assert (entry.payload, entry.deliveries) == (b"x", 2)


def test_keep_alive_protects_an_entry_in_slow_hands(redis_client: redis.Redis) -> None:
    publish(redis_client, STREAM, [b"x"])
    slow = consumer(redis_client, "slow")
    entries = slow.read(1, 0.1)
    redis_client.xclaim(STREAM, "judges", "slow", 0, [entries[0].entry_id], idle=60_000, justid=True)

    slow.keep_alive(entries)

    assert consumer(redis_client, "other", reclaim_after_seconds=30).read(1, 0.01) == []


def counts(client: redis.Redis) -> dict[str, dict[str, int]]:
    return {run: entries_of_run(client, run, f"spo:{run}:prompts", [STREAM, NEXT]) for run in RUNS}


def on_the_streams(client: redis.Redis) -> dict[str, dict[str, int]]:
    def held(run: str, stream: str) -> int:
        return sum(fields.get(b"run", run.encode()) == run.encode() for _, fields in client.xrange(stream))

    return {run: {stream: held(run, stream) for stream in (f"spo:{run}:prompts", STREAM, NEXT)} for run in RUNS}


def test_entries_of_a_run_are_counted_exactly_whatever_is_killed_or_redelivered(redis_client: redis.Redis) -> None:
    """Deliveries die or come back late at random; the counts are those of the entries after each step."""
    chance = random.Random(0)
    for run in RUNS:
        publish(redis_client, f"spo:{run}:prompts", [b"group"] * 30)
    stages = [
        *(
            (run, Consumer(redis_client, f"spo:{run}:prompts", "inference", "i", reclaim_after_seconds=0))
            for run in RUNS
        ),
        ("", Consumer(redis_client, STREAM, "judges", "j", reclaim_after_seconds=0)),
        ("", Consumer(redis_client, NEXT, "replay", "r", reclaim_after_seconds=0)),
    ]
    late: list[tuple[str, Consumer, Entry]] = []
    for _ in range(400):
        run, stage = chance.choice(stages)
        late += [(run, stage, entry) for entry in stage.read(4, 0.001)]
        # One of the deliveries so far ends, whether or not another of the same entry has ended before.
        if late:
            run, stage, entry = late[chance.randrange(len(late))]
            way = chance.random()
            if way < 0.1:
                stage.dead_letter(entry, "poison")
            elif stage.stream == NEXT:
                stage.finish([entry])
            else:
                stage.forward(entry, STREAM if run else NEXT, b"group", run_id=run)
        assert counts(redis_client) == on_the_streams(redis_client)
    assert any(sum(stages.values()) < 30 for stages in counts(redis_client).values())


def test_the_end_of_an_entry_after_its_run_was_deleted_leaves_no_count(redis_client: redis.Redis) -> None:
    first, second = counted_append_words(STREAM, b"1", "gone"), counted_append_words(STREAM, b"2", "gone")
    for command in (*first, *second):
        redis_client.execute_command(*command)
    member = consumer(redis_client, "a")
    entries = member.read(2, 0.1)
    redis_client.delete(entries_in_flight("gone"))

    member.finish(entries[:1])
    member.forward(entries[1], NEXT, b"2")
    replay = Consumer(redis_client, NEXT, "replay", "r")
    replay.finish(replay.read(1, 0.1))

    assert not redis_client.exists(entries_in_flight("gone"))
