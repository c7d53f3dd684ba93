"""A dead letter is a number of its own job; an outage is a wait reason; a deleted run stays deleted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_waits
from services.orchestrator.pipeline import check_groups, groups_in_pipeline
from services.replay_buffer.ingest import IngestWorker, ReferenceScores
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import InternalError
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import counted_append_words
from spo.messaging.streams.recovery import StreamHolder
from spo.messaging.streams.stage import Consumer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.testing.runs import judged_group

RUNNING = (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING)
# Entries of 100 KB: what a group of long responses is.
PAYLOAD = b"x" * 100_000


def running(context: AppContext, document: dict[str, Any]) -> str:
    online = {"replay": {"mix": [{"source": "online", "share": 1}]}, "trainer": {"reference": "in_trainer"}}
    job_id = context.jobs.submit(parse_job_spec({**document, **online}))
    for state in RUNNING:
        context.jobs.transition(job_id, state, "test")
    return job_id


def give_up(client: redis.Redis, stream: str, run_id: str, payloads: list[bytes], reason: str = "no group") -> None:
    """Publish entries, counted for a run where one is named, and give them up."""
    for payload in payloads:
        if run_id:
            for words in counted_append_words(stream, payload, run_id):
                client.execute_command(*words)
        else:
            client.xadd(stream, {"payload": payload})
    consumer = Consumer(client, stream, redis_keys.INGEST_GROUP, "i", holder=StreamHolder())
    for entry in consumer.read(len(payloads), 0.1):
        consumer.dead_letter(entry, reason)


def test_a_malformed_entry_of_nobody_ends_no_job(context: AppContext, document: dict[str, Any]) -> None:
    before = running(context, document)
    give_up(context.redis, redis_keys.verdicts(), "", [b"\xff\xff\xff not a group"] * 5)
    after = running(context, document)

    for job_id in (before, after):
        context.runner._advance(job_id)
        assert context.jobs.state(job_id) is JobState.RUNNING


def test_only_the_job_that_lost_too_many_entries_fails_and_says_why(
    context: AppContext, document: dict[str, Any]
) -> None:
    bad, healthy = running(context, document), running(context, document)
    for job_id in (bad, healthy):
        context.redis.hset(redis_keys.dispatch_cursor(job_id), "position", 10)
    give_up(context.redis, redis_keys.verdicts(), bad, [b"\xff"] * 3, "not a RolloutGroup")

    for job_id in (bad, healthy):
        context.runner._advance(job_id)

    assert context.jobs.record(bad).failure_code == "too_many_dead_letters"
    assert "3 of 10 entries of the stream verdicts" in context.jobs.record(bad).failure_message
    assert "not a RolloutGroup" in context.jobs.record(bad).failure_message
    assert context.jobs.state(healthy) is JobState.RUNNING
    told = [event.body for event in context.jobs.events(bad) if event.kind == "dead_letters"]
    assert told == [{"stream": "verdicts", "count": 3, "reason": "not a RolloutGroup"}]


def test_looking_at_dead_letters_costs_a_job_the_same_however_many_there_are(
    context: AppContext, document: dict[str, Any]
) -> None:
    gone, job_id = running(context, document), running(context, document)
    give_up(context.redis, redis_keys.rollouts(), gone, [PAYLOAD] * 1000)

    context.redis.config_resetstat()
    began = time.monotonic()
    for _ in range(20):
        check_groups(context.jobs, job_id, 10_000, max_share=0.05)

    assert time.monotonic() - began < 2.0
    commands = set(context.redis.info("commandstats"))
    assert not commands & {"cmdstat_xrange", "cmdstat_xrevrange", "cmdstat_xread"}, "no letter is read"


def test_dead_letters_are_capped_and_the_count_of_their_run_is_not(
    context: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "MAX_LETTERS", 10)
    job_id, stream = running(context, document), redis_keys.verdicts()
    give_up(context.redis, stream, job_id, [str(number).encode() for number in range(25)])

    kept = list(recovery.newest(context.redis, stream, job_id))

    assert [recovery.find(context.redis, stream, each.letter_id, job_id)[1] for each in kept] == [
        str(number).encode() for number in range(24, 14, -1)
    ]
    assert recovery.gone_of(context.redis, stream) == 15
    assert recovery.counts_of(context.redis, job_id)[stream].count == 25
    assert context.redis.hlen(redis_keys.dead_letter_payloads(stream)) == 10


def test_dead_letters_are_capped_by_their_bytes_too(
    context: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "MAX_BYTES", 250_000)
    job_id, stream = running(context, document), redis_keys.verdicts()
    give_up(context.redis, stream, job_id, [PAYLOAD] * 5)

    assert len(list(recovery.newest(context.redis, stream, job_id))) == 2
    assert recovery.gone_of(context.redis, stream) == 3
    assert context.redis.hget(redis_keys.dead_letter_totals(stream), "bytes") == b"200000"


def test_a_redriven_letter_is_on_its_stream_once_and_counted_for_its_run(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id, stream = running(context, document), redis_keys.verdicts()
    give_up(context.redis, stream, job_id, [b"group"])
    (letter,) = recovery.newest(context.redis, stream, job_id)
    assert groups_in_pipeline(context.redis, job_id) == 0

    assert recovery.redrive(context.redis, letter)
    assert not recovery.redrive(context.redis, letter)

    assert groups_in_pipeline(context.redis, job_id) == 1
    assert stream not in recovery.counts_of(context.redis, job_id)
    consumer = Consumer(context.redis, stream, redis_keys.INGEST_GROUP, "i", holder=StreamHolder())
    (entry,) = consumer.read(5, 0.1)
    assert (entry.payload, entry.run_id) == (b"group", job_id)


def test_an_outage_of_the_replay_buffer_is_a_wait_reason_and_no_end_of_the_job(
    context: AppContext, document: dict[str, Any], peers: ServiceDoubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = running(context, document)

    class Sick:
        def call(self, *_: object, **__: object) -> None:
            raise InternalError("MemoryError: ")

    monkeypatch.setattr(context.dispatcher, "replay", Sick())
    context.dispatcher._dispatch_or_fail(job_id)

    assert context.jobs.state(job_id) is JobState.RUNNING
    assert "dispatcher: MemoryError: [internal]" in context.monitor.waits(job_id, JobState.RUNNING)
    time.sleep(0.1)
    told = [wait.meaning for wait in job_waits(context, job_id, JobState.RUNNING) if wait.who == "the dispatcher"]
    assert told == ["MemoryError: [internal]"]


def test_a_full_redis_is_a_wait_reason(context: AppContext, document: dict[str, Any], peers: ServiceDoubles) -> None:
    job_id = running(context, document)
    peers.replay.backpressure = "Redis holds 9 of at most 10 bytes"

    context.dispatcher.dispatch(job_id)

    waits = context.monitor.waits(job_id, JobState.RUNNING)
    assert "dispatcher: no prompts are dispatched: Redis holds 9 of at most 10 bytes" in waits


def test_what_was_on_its_way_when_its_run_was_deleted_is_dropped_and_brings_no_key_back(
    context: AppContext, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    job_id = running(context, document)
    store = ReplayStore(redis_client)
    consumer = Consumer(redis_client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "i", 20.0, holder=StreamHolder())
    worker = IngestWorker(store, consumer, ReferenceScores.at("127.0.0.1:1", 1.0), 4)
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,), daemon=True)
    thread.start()
    try:
        send(redis_client, job_id, [0, 1])
        wait_until(lambda: redis_client.zcard(redis_keys.replay_ids(job_id)) == 2, "the first group is stored", 20)
        context.jobs.transition(job_id, JobState.CANCELLING, "test")
        context.jobs.transition(job_id, JobState.CANCELLED, "test")
        redis_client.hset(redis_keys.replay_stored(job_id), "written", 2)
        context.deletion.delete(job_id)
        send(redis_client, job_id, [2, 3])
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "the late group is dropped", 20)
        context.deletion.sweep()
        send(redis_client, job_id, [4, 5])
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "the later group is dropped", 20)
    finally:
        stop.set()
        thread.join(20)

    assert redis_client.keys(f"*{job_id}*") == []
    assert redis_client.xlen(redis_keys.dead_letters(redis_keys.verdicts())) == 0


def send(client: redis.Redis, run_id: str, numbers: list[int]) -> None:
    group = judged_group(numbers, run_id=run_id).SerializeToString()
    with client.pipeline(transaction=True) as pipe:
        for words in counted_append_words(redis_keys.verdicts(), group, run_id):
            pipe.execute_command(*words)
        pipe.execute()


def test_the_dead_letters_of_a_deleted_job_go_with_it(
    context: AppContext, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    gone, stays = running(context, document), running(context, document)
    for job_id in (gone, stays):
        give_up(redis_client, redis_keys.verdicts(), job_id, [b"\xff"])
    context.jobs.transition(gone, JobState.CANCELLING, "test")
    context.jobs.transition(gone, JobState.CANCELLED, "test")
    context.deletion.delete(gone)
    context.deletion.sweep()

    assert list(recovery.newest(redis_client, redis_keys.verdicts(), gone)) == []
    assert len(list(recovery.newest(redis_client, redis_keys.verdicts(), stays))) == 1
