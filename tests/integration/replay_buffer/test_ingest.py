"""From the stream `verdicts` into the ledger: nothing lost, nothing twice, poison named."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from services.replay_buffer import store as store_module
from services.replay_buffer.ingest import IngestWorker, ReferenceScores
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import IntegrityError
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import counted_append_words, publish as append_entries
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import MAX_MESSAGE_BYTES, RpcClient
from spo.testing.peers import wait_until
from spo.testing.runs import FOREIGN_TOKEN, RUN, ScorerDouble, judged_group, served_scorer, start_run
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_REFERENCE, SOURCE_SHARED
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.value_service_pb2 import ComputeReferenceLogprobsRequest
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
    consumer = Consumer(
        redis_client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest-1", reclaim_after_seconds=0.4
    )
    yield IngestWorker(ReplayStore(redis_client), consumer, ReferenceScores(values, 5.0), 16)
    values.close()


def publish(client: redis.Redis, *groups: RolloutGroup) -> None:
    append_entries(client, redis_keys.verdicts(), [group.SerializeToString() for group in groups])


def ledger(client: redis.Redis) -> list[str]:
    ids: Any = client.zrange(redis_keys.replay_ids(RUN), 0, -1)
    return sorted(name.decode() for name in ids)


def expected(count: int) -> list[str]:
    return sorted(f"traj_SOURCE_ONLINE_{number}" for number in range(count))


def run_until(worker: IngestWorker, condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        wait_until(condition, what, seconds)
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def dead(client: redis.Redis) -> list[tuple[RolloutGroup, str]]:
    """Letters of groups that name no run on the stream itself, as those of these tests do."""
    stream = redis_keys.verdicts()
    found = [recovery.find(client, stream, each.letter_id, "") for each in recovery.newest(client, stream, "")]
    return [(RolloutGroup.FromString(payload), letter.reason) for letter, payload in found]


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


def test_what_pi0_sampled_as_it_is_keeps_the_samplers_log_probs_where_a_job_asks_for_it(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    start_run(redis_client, trainer={"reference": "sampler"})
    group = judged_group([0, 1, 2, 3])
    for sample in group.trajectories:
        sample.temperature = sample.top_p = 1.0
    group.trajectories[1].temperature = 0.7
    group.trajectories[2].policy_version_last = 1
    group.trajectories[3].top_p = 0.9
    publish(redis_client, group)

    run_until(worker, lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    stored = [worker.store.one(RUN, name) for name in expected(4)]
    assert [list(each.reference_logprobs) for each in stored] == [pytest.approx([-0.1, -0.2, -0.3])] + [[-0.5] * 3] * 3
    assert [each.reference_hash for each in stored] == ["", "pi0", "pi0", "pi0"]
    assert scorer.scored == 3


def test_an_absent_value_service_delays_groups_and_loses_none(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    scorer.away.set()
    publish(redis_client, *[judged_group([number]) for number in range(8)])

    def outlasts_every_delivery() -> bool:
        if scorer.refused > 7:
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
    append_entries(redis_client, redis_keys.verdicts(), [b"\xff\xff not protobuf"])

    run_until(worker, lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    sound = [f"traj_SOURCE_ONLINE_{number}" for number in (0, 1, 2, 3, 7)]
    assert ledger(redis_client) == sound, "the sound trajectory beside the poison is kept"
    letters: Any = redis_client.xrange(redis_keys.dead_letters(redis_keys.verdicts()))
    reasons = " ".join(fields[b"reason"].decode() for _, fields in letters)
    assert len(letters) == 3
    assert "/sampling_logprobs: must be finite" in reasons
    assert redis_client.keys("spo:job_GONE*") == [], "an entry of a deleted run is dropped and brings no key back"
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


def giants(count: int, tokens: int, run_id: str) -> list[RolloutGroup]:
    groups = [judged_group([number], run_id=run_id) for number in range(count)]
    for group in groups:
        (trajectory,) = group.trajectories
        trajectory.response_token_ids[:] = [7] * tokens
        trajectory.sampling_logprobs[:] = [-0.1] * tokens
    return groups


def publish_counted(client: redis.Redis, run_id: str, groups: Sequence[RolloutGroup]) -> None:
    """As judges forward them: named by their run on the stream."""
    for group in groups:
        for words in counted_append_words(redis_keys.verdicts(), group.SerializeToString(), run_id):
            client.execute_command(*words)


def test_a_run_whose_trajectories_fill_messages_is_scored_in_parts_and_keeps_no_other_waiting(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    tokens = 250_000
    start_run(redis_client, "job_GIANT", model={"path": "/pi0", "max_response_tokens": tokens})
    # 70 MB of log-probs, more than a message may have.
    publish_counted(redis_client, "job_GIANT", giants(70, tokens, "job_GIANT"))
    publish_counted(redis_client, RUN, [judged_group([number]) for number in range(5)])
    healthy_is_in = threading.Event()
    calls: list[str] = []
    in_time: list[bool] = []

    def wait_for_the_other(request: ComputeReferenceLogprobsRequest) -> None:
        calls.append(request.run_id)
        if request.run_id == "job_GIANT":
            in_time.append(healthy_is_in.wait(60))

    scorer.before = wait_for_the_other

    def all_is_in() -> bool:
        if ledger(redis_client) == expected(5):
            healthy_is_in.set()
        return redis_client.xlen(redis_keys.verdicts()) == 0

    run_until(worker, all_is_in, "an empty stream", 100)

    assert all(in_time), "the healthy run was stored while the other had not got anywhere"
    assert redis_client.zcard(redis_keys.replay_ids("job_GIANT")) == 70
    assert calls.count("job_GIANT") > 70 * 4 * tokens // MAX_MESSAGE_BYTES
    assert dead(redis_client) == []


def test_a_trajectory_that_no_message_can_hold_is_a_dead_letter_that_says_how_large_it_is(
    worker: IngestWorker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_TRAJECTORY_BYTES", 10_000)
    start_run(redis_client, model={"path": "/pi0", "max_response_tokens": 5000})
    publish(redis_client, judged_group([0]), *[judged_group([1])])
    publish(redis_client, *giants(1, 5000, RUN))

    run_until(worker, lambda: redis_client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    ((_, reason),) = dead(redis_client)
    assert re.search(r"has \d{5} bytes, more than the 10000 .*\[trajectory_too_large\]", reason)


def test_a_run_whose_reference_fails_backs_off_alone(
    worker: IngestWorker, scorer: ScorerDouble, redis_client: redis.Redis
) -> None:
    start_run(redis_client, "job_BROKEN")
    is_broken = threading.Event()
    is_broken.set()

    def fail(request: ComputeReferenceLogprobsRequest) -> None:
        if request.run_id == "job_BROKEN" and is_broken.is_set():
            raise IntegrityError("its model folder is damaged")

    scorer.before = fail
    publish_counted(redis_client, "job_BROKEN", [judged_group([n], run_id="job_BROKEN") for n in range(20)])
    publish_counted(redis_client, RUN, [judged_group([number]) for number in range(40)])

    def all_is_in() -> bool:
        if ledger(redis_client) == expected(40):
            is_broken.clear()
        return redis_client.xlen(redis_keys.verdicts()) == 0

    run_until(worker, all_is_in, "an empty stream", 60)

    assert redis_client.zcard(redis_keys.replay_ids("job_BROKEN")) == 20
    assert dead(redis_client) == []


def vary(**fields: Any) -> Callable[[Trajectory], None]:
    """Set fields of a trajectory; of repeated ones the first element."""

    def change(trajectory: Trajectory) -> None:
        for name, value in fields.items():
            if name.endswith(("logprobs", "token_ids")):
                getattr(trajectory, name)[0] = value
            else:
                setattr(trajectory, name, value)

    return change


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/sampling_logprobs", vary(sampling_logprobs=50.0)),
        ("/sampling_logprobs", vary(sampling_logprobs=0.01)),
        ("/sampling_logprobs", vary(sampling_logprobs=-1e30)),
        ("/sampling_logprobs", vary(sampling_logprobs=-20_000.0)),
        ("/sampling_logprobs", vary(sampling_logprobs=math.inf)),
        ("/policy_version_last", vary(policy_version_last=10**12)),
        ("/policy_version_first", vary(policy_version_first=-1)),
        ("/policy_version_last", vary(policy_version_first=3, policy_version_last=2)),
        ("/prompt_id", vary(prompt_id="unheard_of")),
        ("/source", vary(source=SOURCE_HUMAN)),
        ("/source", vary(source=SOURCE_REFERENCE)),
        ("/source", vary(source=SOURCE_SHARED)),
        ("/reward", vary(reward=-1e30)),
        ("/response_token_ids", vary(response_token_ids=-7)),
    ],
)
def test_what_no_policy_of_the_run_can_have_sampled_is_refused_by_name_and_harms_no_group_mate(
    pointer: str, change: Callable[[Trajectory], None], worker: IngestWorker, redis_client: redis.Redis
) -> None:
    group = judged_group([0, 1, 2])
    change(group.trajectories[1])
    publish(redis_client, group)

    run_until(worker, lambda: dead(redis_client), "the dead letter")

    ((_, reason),) = dead(redis_client)
    assert "unusable_trajectory" in reason
    assert pointer in reason
    assert ledger(redis_client) == ["traj_SOURCE_ONLINE_0", "traj_SOURCE_ONLINE_2"]


def test_log_probs_that_rounding_lifted_above_0_and_those_of_rare_tokens_are_taken(
    worker: IngestWorker, redis_client: redis.Redis
) -> None:
    group = judged_group([0])
    group.trajectories[0].sampling_logprobs[:2] = [1e-6, -300.0]
    publish(redis_client, group)

    run_until(worker, lambda: ledger(redis_client), "the trajectory")

    assert dead(redis_client) == []
