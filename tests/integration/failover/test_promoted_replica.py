"""A replica that lacks the last seconds is promoted: what was told as durable is there, the rest is drawn anew."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from services.orchestrator.commit import Durability
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import JobFiles
from services.orchestrator.recovery import JobManifests, JobRebuild, PlatformIdentity, RecoveryWatch
from services.orchestrator.settings import Settings
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import NotReady
from spo.local.launcher import server_command
from spo.messaging.streams.entries import publish
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.service.state import StateFolder
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, start_run, toy_spec, trajectory
from spo.v1.replay_service_pb2 import SampleBatchRequest
from tests.conftest import free_port

LIMITED = {"min_online": 4, "max_times_sampled": 4, "mix": [{"source": "online", "share": 1}]}


def answers(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port).ping())
    except redis.RedisError:
        return False


@dataclass
class RedisPair:
    """A primary and its replica; after `fail_over` what the replica had serves under the primary's address."""

    folder: Path
    port: int
    replica_port: int

    def __post_init__(self) -> None:
        self.primary = self._start(self.port, "primary")
        self.replica = self._start(self.replica_port, "replica")
        self.replicate("127.0.0.1", self.port)
        link = redis.Redis(port=self.replica_port)
        wait_until(lambda: link.info("replication")["master_link_status"] == "up", "the replica follows", 20)

    def _start(self, port: int, name: str) -> subprocess.Popen[bytes]:
        command = server_command(port, self.folder / name)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: answers(port), f"the {name} answers", 20)
        return process

    def replicate(self, *of: str | int) -> None:
        redis.Redis(port=self.replica_port).replicaof(*map(str, of))

    def cut(self) -> None:
        """From now on the replica gets nothing."""
        self.replicate("NO", "ONE")

    def fail_over(self) -> None:
        """The primary dies, and the replica's data is served at its address."""
        self.primary.kill()
        self.primary.wait(20)
        self.replica.terminate()
        self.replica.wait(20)
        self.primary = self._start(self.port, "replica")

    def stop(self) -> None:
        for process in (self.primary, self.replica):
            process.kill()
            process.wait(20)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RedisPair]:
    started = RedisPair(tmp_path, free_port(), free_port())
    yield started
    started.stop()


@pytest.fixture
def client(pair: RedisPair) -> Iterator[Any]:
    with redis.Redis(port=pair.port) as connected:
        yield connected


def test_the_replay_buffer_goes_on_when_the_last_draws_were_lost(pair: RedisPair, client: redis.Redis) -> None:
    start_run(client, replay=LIMITED, trainer={"batch_size": 8})
    sampler = BatchSampler(ReplayStore(client))
    sampler.store.append(RUN, [trajectory(number) for number in range(400)])

    def batch_of(step: int) -> int:
        return len(sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=8, step=step, wait_seconds=0)))

    for step in range(1, 11):
        assert batch_of(step) == 8
    assert client.wait(1, 5000) == 1
    pair.cut()
    assert [batch_of(step) for step in (11, 12)] == [8, 8]
    pair.fail_over()

    # The trainer has its batches of 11 and 12 and goes on; nobody has to be restarted for it.
    assert [batch_of(step) for step in range(13, 40)] == [8] * 27
    times = sampler.index(RUN).sample_counts
    assert max(times.times(f"traj_SOURCE_ONLINE_{number}") for number in range(400)) <= 4


def test_a_durable_commit_is_on_the_replica_or_is_not_acknowledged(pair: RedisPair, client: redis.Redis) -> None:
    store = JobStore(client, durable=Durability(replicas=1))
    job_id = store.submit(toy_spec({"model": {"path": "/pi0"}}))
    assert store.transition(job_id, JobState.VALIDATING, "test")
    pair.cut()
    with pytest.raises(NotReady, match="0 of 1 replicas of Redis had the change in time") as refused:
        store.transition(job_id, JobState.ESTIMATING, "test")
    assert refused.value.code == "not_durable"
    pair.fail_over()

    assert store.state(job_id) is JobState.VALIDATING
    assert store.refold(job_id) is JobState.VALIDATING


def test_what_a_failover_lost_is_told(pair: RedisPair, client: redis.Redis, tmp_path: Path) -> None:
    store = JobStore(client)
    identity = PlatformIdentity(client, StateFolder(tmp_path / "state"), str(tmp_path / "weights"))
    rebuild = JobRebuild(store, JobFiles.of(Settings(state_path=tmp_path / "state")))
    watch = RecoveryWatch(store, identity, JobManifests(store, StateFolder(tmp_path / "state")), rebuild.mend)
    watch.look()
    early = store.submit(toy_spec({"model": {"path": "/pi0"}}))
    watch.look()
    assert client.wait(1, 5000) == 1
    pair.cut()
    late = store.submit(toy_spec({"model": {"path": "/pi0"}}))
    assert store.transition(early, JobState.VALIDATING, "test")
    watch.look()
    pair.fail_over()
    watch.look()

    assert store.state(early) is JobState.QUEUED
    assert [loss.kind for loss in identity.losses()] == ["redis_behind"]
    assert [manifest.id for manifest in watch.lost()] == [late]
    assert watch.absent(late).code == "job_records_lost"


def test_a_consumer_reads_on_from_the_promoted_replica(pair: RedisPair, client: redis.Redis) -> None:
    consumer = Consumer(client, redis_keys.rollouts(), redis_keys.JUDGE_GROUP, "judge", 20.0)
    seen: list[bytes] = []
    stop = threading.Event()

    def handle(entries: list[Any]) -> None:
        seen.extend(entry.payload for entry in entries)
        consumer.finish(entries)

    # Before the consumer's group exists on the replica.
    pair.cut()
    thread = threading.Thread(target=StageRunner(consumer, handle, count=16).run, args=(stop,))
    thread.start()
    try:
        publish(client, redis_keys.rollouts(), [b"before"])
        wait_until(lambda: seen == [b"before"], "the first entry is handled", 20)
        pair.fail_over()
        wait_until(lambda: answers(pair.port), "the promoted replica answers", 20)
        publish(client, redis_keys.rollouts(), [b"after"])
        wait_until(lambda: seen == [b"before", b"after"], "the entry after the failover is handled", 30)
    finally:
        stop.set()
        thread.join(20)
