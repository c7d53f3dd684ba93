"""From the stream `verdicts` into the ledger: nothing lost, nothing twice, poison named."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from services.replay_buffer.ingest_worker import IngestWorker
from services.replay_buffer.reference_scores import ReferenceScores
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.messaging import streams
from spo.rpc.client import RpcClient
from spo.testing.replay import (
    FOREIGN_TOKEN,
    RUN,
    ScorerDouble,
    judged_group,
    served_scorer,
    start_run,
)
from spo.testing.waiting import wait_until
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.value_service_pb2_grpc import ValueServiceStub


@pytest.fixture
def scorer() -> ScorerDouble:
    return ScorerDouble()  # type: ignore[abstract]


@pytest.fixture
def scorer_address(scorer: ScorerDouble) -> Iterator[str]:
    with served_scorer(scorer) as address:
        yield address


@pytest.fixture
def worker(redis_client: redis.Redis, scorer_address: str) -> Iterator[IngestWorker]:
    start_run(redis_client)
    values = RpcClient("value-estimation", scorer_address, ValueServiceStub)
    consumer = streams.Consumer(
        redis_client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest-1", reclaim_after_seconds=0.4
    )
    yield IngestWorker(ReplayStore(redis_client), consumer, ReferenceScores(values, 5.0), 16)
    values.close()


def publish(client: redis.Redis, *groups: RolloutGroup) -> None:
    streams.publish(client, redis_keys.verdicts(), [group.SerializeToString() for group in groups])


def ledger(client: redis.Redis) -> list[str]:
    ids: Any = client.zrange(redis_keys.replay_ids(RUN), 0, -1)
    return sorted(name.decode() for name in ids)


def expected(count: int) -> list[str]:
    return sorted(f"traj_SOURCE_ONLINE_{number}" for number in range(count))


def run_until(worker: IngestWorker, condition: Callable[[], object], what: str) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        wait_until(condition, what)
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()


def dead(client: redis.Redis) -> list[tuple[RolloutGroup, str]]:
    letters: Any = client.xrange(redis_keys.dead_letters(redis_keys.verdicts()))
    return [(RolloutGroup.FromString(fields[b"payload"]), fields[b"reason"].decode()) for _, fields in letters]


def test_judged_groups_are_scored_in_one_call_entered_and_taken_off_the_pipeline(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    publish(redis_client, judged_group([0, 1]), judged_group([2, 3]))

    run_until(worker, lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    assert ledger(redis_client) == expected(4)
    stored = worker.store.one(RUN, "traj_SOURCE_ONLINE_2")
    assert list(stored.reference_logprobs) == [-0.5, -0.5, -0.5]
    assert stored.reference_hash == "pi0"
    assert stored.hops[-1].service == "replay-buffer"


def test_an_absent_value_service_delays_groups_and_loses_none(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    scorer.away.set()
    publish(redis_client, *[judged_group([number]) for number in range(8)])

    def outlasts_every_delivery() -> bool:
        if scorer.refused > streams.MAX_DELIVERIES + 2:
            scorer.away.clear()
        return redis_client.xlen(redis_keys.verdicts()) == 0

    run_until(worker, outlasts_every_delivery, "an empty stream")

    assert ledger(redis_client) == expected(8)
    assert dead(redis_client) == []


def test_poison_goes_to_the_dead_letters_with_its_reason_and_harms_no_other(
    worker: IngestWorker, redis_client: redis.Redis
) -> None:
    poison = judged_group([6, 7])
    poison.trajectories[0].sampling_logprobs[1] = math.nan
    unknown_run = judged_group([8], run_id="job_GONE")
    foreign = judged_group([9])
    foreign.trajectories[0].response_token_ids[0] = FOREIGN_TOKEN
    publish(redis_client, judged_group([0, 1]), poison, unknown_run, foreign, judged_group([2, 3]))
    streams.publish(redis_client, redis_keys.verdicts(), [b"\xff\xff not protobuf"])

    run_until(worker, lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    sound = [f"traj_SOURCE_ONLINE_{number}" for number in (0, 1, 2, 3, 7)]
    assert ledger(redis_client) == sound, "the sound trajectory beside the poison is kept"
    letters: Any = redis_client.xrange(redis_keys.dead_letters(redis_keys.verdicts()))
    reasons = " ".join(fields[b"reason"].decode() for _, fields in letters)
    assert len(letters) == 4
    assert "/sampling_logprobs: must be finite" in reasons
    assert "there is no run job_GONE" in reasons
    assert "outside the vocabulary" in reasons
    assert "not a RolloutGroup" in reasons


def ingest_process(redis_url: str, scorer_address: str) -> subprocess.Popen[bytes]:
    environment = {
        "SPO_REDIS_URL": redis_url,
        "SPO_VALUE_ESTIMATION_ADDRESS": scorer_address,
        "SPO_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "SPO_REPLAY_BUFFER_PORT": "0",
        "SPO_REPLAY_BUFFER_RECLAIM_SECONDS": "1",
        "SPO_REPLAY_BUFFER_GROUPS_PER_READ": "4",
    }
    command = [sys.executable, "-m", "services.replay_buffer"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_ingest_loses_nothing_and_enters_nothing_twice(
    redis_client: redis.Redis, redis_server: str, scorer_address: str
) -> None:
    start_run(redis_client)
    groups = [judged_group([number, number + 1]) for number in range(0, 600, 2)]
    # Some entries are in the pipeline twice: their first delivery's acknowledgement was lost.
    deliveries = groups + groups[::5]
    random.Random(1).shuffle(deliveries)
    kills = 0
    process = ingest_process(redis_server, scorer_address)
    try:
        for start in range(0, len(deliveries), 90):
            before = len(ledger(redis_client))
            publish(redis_client, *deliveries[start : start + 90])
            wait_until(lambda: len(ledger(redis_client)) > before, "some progress")  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            kills += 1
            process = ingest_process(redis_server, scorer_address)
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)

    assert kills == 4
    assert ledger(redis_client) == expected(600)
    assert redis_client.hget(redis_keys.replay_counters(RUN), "inserted:online") == b"600"
    assert dead(redis_client) == []
