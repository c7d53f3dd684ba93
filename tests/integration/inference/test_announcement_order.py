"""Which announcement of weights is the newer one is said by the run's stream, whatever the clocks say."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from services.inference import replica as replica_module
from services.inference.replica import Assignment, ServingReplica
from services.inference.settings import Settings
from services.inference.weights import PolicyVersions, Weights
from services.orchestrator.versions import announcement_of
from spo import redis_keys
from spo.messaging.streams.entries import publish
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as orchestrator
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.store import WeightStore
from tests.support.s3_server import S3Server

RUN = "job"


class Follower:
    """A replica whose engine notes what it is told to load."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.loaded: list[int] = []
        self.replica = ServingReplica(Settings(), client, lambda *_: None, lambda: None)
        self.assignment = cast(Assignment, SimpleNamespace(run_id=RUN, versions=self, engine=self))
        self.position = "0-0"

    def resolve(self, run_id: str, version: int, digest: str) -> int:
        return version

    def announce(self, run_id: str, version: int) -> None:
        self.loaded.append(version)

    def take_missing(self) -> None:
        """Nothing comes by broadcast here."""

    def follow(self) -> None:
        self.position = self.replica._follow_weights(self.assignment, self.position, threading.Event())

    def hear(self, announcement: WeightAnnouncement) -> None:
        """From the answer to a heartbeat."""
        self.replica.on_heartbeat(orchestrator.HeartbeatResponse(run_id=RUN, weights=announcement))


def tell(client: redis.Redis, version: int, at_unix_ms: int) -> None:
    said = WeightAnnouncement(run_id=RUN, version=version, announced_unix_ms=at_unix_ms)
    publish(client, redis_keys.weights(RUN), [said.SerializeToString()])


def newest(client: redis.Redis) -> WeightAnnouncement:
    (entry,) = cast(Any, client.xrevrange(redis_keys.weights(RUN), count=1))
    return announcement_of(entry)


@pytest.fixture
def follower(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.setattr(replica_module, "FOLLOW_SECONDS", 0.05)
    return Follower(redis_client)


def test_versions_of_an_orchestrator_whose_clock_is_behind_are_loaded_and_so_is_a_roll_back(
    follower: Follower, redis_client: redis.Redis
) -> None:
    now = int(time.time() * 1000)
    for version, at in ((1, now), (2, now + 1000), (3, now - 60_000), (4, now - 50_000), (2, now - 40_000)):
        tell(redis_client, version, at)
        follower.follow()

    assert follower.loaded == [1, 2, 3, 4, 2]


def test_the_answer_to_a_heartbeat_is_older_than_what_the_stream_told_since(
    follower: Follower, redis_client: redis.Redis
) -> None:
    now = int(time.time() * 1000)
    tell(redis_client, 1, now + 60_000)
    late = newest(redis_client)
    tell(redis_client, 2, now)
    follower.hear(newest(redis_client))
    follower.follow()
    follower.hear(late)
    follower.follow()

    assert follower.loaded == [2]


def test_a_redis_that_does_not_answer_while_a_run_is_assigned_is_waited_for_and_ends_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "RETRY_SECONDS", 0.05)
    said: list[str] = []
    stop = threading.Event()

    def note(ready: bool, reason: str) -> None:
        said.append(reason)
        if len(said) == 4:
            stop.set()

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        away = redis.Redis(port=reserved.getsockname()[1], retry=None)
        replica = ServingReplica(Settings(), away, note, lambda: None)
        replica.on_heartbeat(orchestrator.HeartbeatResponse(run_id=RUN))

        replica.follow(stop)

    assert "Redis did not answer" in said[-1]


def test_a_bucket_that_stands_still_is_what_a_replica_says_it_waits_for(
    redis_client: redis.Redis, s3_server: S3Server, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "LASTS_TELL_SECONDS", 0.2)
    reference = Weights("run", 0, (), "")
    versions = PolicyVersions(WeightStore(f"{bucket_url}/weights"), reference)
    serving = ServingReplica(Settings(), redis_client, lambda *_: None, lambda: None)
    engine = SimpleNamespace(problem="", announce=lambda *_: None)
    assignment = cast(Assignment, SimpleNamespace(run_id="run", versions=versions, engine=engine))
    serving._assignment = assignment

    def said() -> str:
        beaten = orchestrator.HeartbeatRequest()
        with suppress(AttributeError):
            serving.report(beaten)
        return beaten.problem

    announced = WeightAnnouncement(run_id="run", version=7, manifest_digest="d" * 64)
    thread = threading.Thread(target=serving._apply, args=(assignment, announced, threading.Event()), daemon=True)
    os.kill(s3_server.pid, signal.SIGSTOP)
    try:
        thread.start()
        wait_until(lambda: "to fetch the weights of version 7 has taken" in said(), "the replica says so", 20)
    finally:
        os.kill(s3_server.pid, signal.SIGCONT)
    wait_until(lambda: "is served in its place" in said(), "it says that there is none", 90)
