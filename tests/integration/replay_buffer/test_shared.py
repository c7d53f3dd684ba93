"""A run that follows another reads the other's rollouts into a view of its own: all of them, once, as they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from services.replay_buffer.ingest import ReferenceScores, SharedRolloutIngest
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore, StorageMonitor
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.model.chat import keep_sampled_logprobs
from spo.testing.peers import wait_until
from spo.testing.runs import PROMPTS, RUN, ScorerDouble, served_scorer, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_SHARED
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory

FOLLOWER = "job_FOLLOWER"
MIX = [{"source": "shared", "share": 1.0}]
AMPLE = {"mix": MIX, "min_online": 8, "samples_per_insert": 0.01, "error_buffer": 10_000}


@pytest.fixture
def scorer() -> ScorerDouble:
    return ScorerDouble()  # type: ignore[abstract]


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    start_run(redis_client)
    redis_client.set(redis_keys.run_state(RUN), "running")
    return ReplayStore(redis_client)


@pytest.fixture
def following(store: ReplayStore, scorer: ScorerDouble) -> Iterator[SharedRolloutIngest]:
    with served_scorer(scorer) as address:
        scores = ReferenceScores.at(address, 5.0)
        yield SharedRolloutIngest(BatchSampler(store), scores, StorageMonitor(store.client, 0.9))
        scores.values.close()


def follow(client: redis.Redis, run_id: str = FOLLOWER, **replay: Any) -> None:
    replay = {**AMPLE, **replay}
    start_run(client, run_id, rollout={"follow": RUN}, replay=replay, trainer={"batch_size": 8})
    client.set(redis_keys.run_state(run_id), "running")
    client.zadd(redis_keys.jobs_in_state("running"), {run_id: 1})


def copy_new(following: SharedRolloutIngest, run_id: str = FOLLOWER) -> int:
    return following.copy_new(run_id, threading.Event())


def view(store: ReplayStore, run_id: str = FOLLOWER) -> list[Trajectory]:
    ids: Any = store.client.zrange(redis_keys.replay_ids(run_id), 0, -1)
    return [sample for sample in store.get(run_id, [raw.decode() for raw in ids]) if sample is not None]


def batch(following: SharedRolloutIngest, step: int, run_id: str = FOLLOWER, version: int = 0) -> list[Trajectory]:
    request = SampleBatchRequest(run_id=run_id, batch_size=8, step=step, policy_version=version)
    return [sampled.trajectory for sampled in following.sampler.sample(request)]


def test_a_follower_sees_every_online_rollout_once_with_what_its_sampler_said(
    store: ReplayStore, following: SharedRolloutIngest, scorer: ScorerDouble
) -> None:
    follow(store.client)
    sampled = [trajectory(number, version=3) for number in range(20)]
    store.append(RUN, [*sampled, trajectory(50, SOURCE_HUMAN)])

    assert copy_new(following) == 20
    assert copy_new(following) == 0

    for ours, theirs in zip(view(store), sampled, strict=True):
        assert (ours.run_id, ours.source, ours.origin_run_id) == (FOLLOWER, SOURCE_SHARED, RUN)
        assert list(ours.parents) == [theirs.trajectory_id]
        assert ours.trajectory_id != theirs.trajectory_id
        same = (
            "sampling_logprobs",
            "reference_logprobs",
            "policy_version_first",
            "reward",
            "response_text",
            "group_id",
        )
        assert all(getattr(ours, name) == getattr(theirs, name) for name in same)
    assert scorer.scored == 0, "log-probs of the same pi0 hold"
    assert {sample.source for sample in batch(following, 0)} == {SOURCE_SHARED}
    assert len(view(store, RUN)) == 21, "the followed run's ledger is as it was"


def test_rollouts_without_log_probs_of_the_reference_are_scored(
    store: ReplayStore, following: SharedRolloutIngest, scorer: ScorerDouble
) -> None:
    start_run(store.client, trainer={"reference": "in_trainer"})
    follow(store.client)
    rollouts = [trajectory(number, scored=False) for number in range(4)]
    assert keep_sampled_logprobs(rollouts[0]) is False
    rollouts[1].temperature = rollouts[1].top_p = 1.0
    assert keep_sampled_logprobs(rollouts[1]), "the sampler's are another engine's"
    ReplayStore(store.client).append(RUN, rollouts)

    assert copy_new(following) == 4

    assert scorer.scored == 4
    assert all(list(sample.reference_logprobs) == [-0.5] * 3 for sample in view(store))


def test_each_follower_reads_as_much_as_its_own_limiter_admits(
    store: ReplayStore, following: SharedRolloutIngest
) -> None:
    follow(store.client)
    follow(store.client, "job_SLOW", samples_per_insert=2.0, error_buffer=16)
    store.append(RUN, [trajectory(number) for number in range(200)])

    assert (copy_new(following), copy_new(following, "job_SLOW")) == (200, 8)
    for step in range(3):
        batch(following, step, "job_SLOW")

    assert copy_new(following, "job_SLOW") == 12, "24 samples make room for 12 inserts"
    assert [sample.parents[0] for sample in view(store, "job_SLOW")] == [
        f"traj_SOURCE_ONLINE_{number}" for number in range(20)
    ]
    assert copy_new(following) == 0


def test_rollouts_age_in_the_versions_of_the_run_that_samples(
    store: ReplayStore, following: SharedRolloutIngest
) -> None:
    follow(store.client, max_staleness=2)
    store.append(RUN, [trajectory(number, version=number // 10) for number in range(40)])
    store.note_policy_version(RUN, 3)

    assert copy_new(following) == 30, "version 0 is three behind"
    assert {sample.policy_version_first for sample in batch(following, 0, version=100)} <= {1, 2, 3}

    store.note_policy_version(RUN, 5)
    served = [sample for step in range(1, 9) for sample in batch(following, step, version=100)]
    assert {sample.policy_version_first for sample in served} == {3}
    counters: Any = store.client.hgetall(redis_keys.replay_counters(FOLLOWER))
    assert (counters[b"followed"], counters[b"left_out"]) == (b"40", b"10")


def test_a_follower_serves_prompts_by_its_own_values(store: ReplayStore, following: SharedRolloutIngest) -> None:
    follow(store.client)
    store.client.hdel(redis_keys.run_values(FOLLOWER), PROMPTS[0])
    store.append(RUN, [trajectory(number) for number in range(40)])
    copy_new(following)

    served = Counter(sample.prompt_id for step in range(20) for sample in batch(following, step))

    assert set(served) == set(PROMPTS[1:])


def test_a_follower_waits_for_a_run_under_way_and_uses_up_one_that_has_ended(
    store: ReplayStore, following: SharedRolloutIngest
) -> None:
    follow(store.client, samples_per_insert=1.0, error_buffer=1)
    store.append(RUN, [trajectory(number) for number in range(16)])
    with pytest.raises(NotReady, match="source shared: 0 inserted"):
        batch(following, 0)
    for step in range(3):
        copy_new(following)
        batch(following, step)
    with pytest.raises(NotReady, match="24 served"):
        batch(following, 3)

    store.client.set(redis_keys.run_state(RUN), "succeeded")

    assert [len(batch(following, step)) for step in range(3, 9)] == [8] * 6


@pytest.mark.parametrize("state", ["failed", None])
def test_a_followed_run_that_ended_or_was_deleted_without_a_rollout_is_an_error(
    store: ReplayStore, following: SharedRolloutIngest, state: str | None
) -> None:
    follow(store.client)
    if state:
        store.client.set(redis_keys.run_state(RUN), state)
    else:
        store.client.delete(redis_keys.run_state(RUN))
    copy_new(following)

    with pytest.raises(PreconditionFailed, match=f"source shared: 0 inserted.*{RUN} has ended; nothing more") as caught:
        batch(following, 0)
    assert caught.value.code == "source_empty"


def test_nothing_is_taken_over_while_redis_is_nearly_full(store: ReplayStore, following: SharedRolloutIngest) -> None:
    follow(store.client)
    store.append(RUN, [trajectory(number) for number in range(4)])
    full = SharedRolloutIngest(BatchSampler(store), following.scores, StorageMonitor(store.client, 0.9))
    store.client.config_set("maxmemory", int(store.client.info("memory")["used_memory"]))
    try:
        assert copy_new(full) == 0
    finally:
        store.client.config_set("maxmemory", 0)
    assert copy_new(following) == 4


def service_process(redis_url: str) -> subprocess.Popen[bytes]:
    environment = {
        "SPO_REDIS_URL": redis_url,
        "SPO_VALUE_ESTIMATION_ADDRESS": "127.0.0.1:1",
        "SPO_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "SPO_REPLAY_BUFFER_PORT": "0",
        "SPO_REPLAY_BUFFER_STORE_EXPERIENCE": "false",
    }
    command = [sys.executable, "-m", "services.replay_buffer"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_services_take_over_every_rollout_once(store: ReplayStore, redis_server: str) -> None:
    # All of it fits into the follower's window; what it has read may leave the followed run's.
    follow(store.client, samples_per_insert=0.0001, online_capacity=10_000)
    total, kills = 0, 0
    processes = [service_process(redis_server) for _ in range(2)]
    try:
        for _ in range(4):
            store.append(RUN, [trajectory(number) for number in range(total, total + 1500)])
            total += 1500
            before = len(view(store))
            wait_until(lambda: len(view(store)) > before, "some progress", poll_seconds=0.005)  # noqa: B023
            for index, process in enumerate(processes):
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                kills += 1
                processes[index] = service_process(redis_server)
        wait_until(lambda: store.client.zcard(redis_keys.replay_ids(FOLLOWER)) >= total, "all rollouts")
        wait_until(lambda: store.client.hget(redis_keys.replay_counters(FOLLOWER), "followed") == b"6000", "the end")
    finally:
        for process in processes:
            process.kill()
            process.wait(10)

    assert kills == 8
    found = sorted(sample.parents[0] for sample in view(store))
    assert found == sorted(trajectory(number).trajectory_id for number in range(total))
    counters: Any = store.client.hgetall(redis_keys.replay_counters(FOLLOWER))
    assert (counters[b"inserted:shared"], counters.get(b"left_out", b"0")) == (b"6000", b"0")
