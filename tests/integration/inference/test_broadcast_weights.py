"""Two real replicas and a trainer's sender: new weights by broadcast, and by files where that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from spo import redis_keys
from spo.local.warm_parent import WarmProcess
from spo.messaging.streams.entries import publish as append_entries
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1 import inference_service_pb2 as inference
from spo.weights.broadcast import Broadcaster
from spo.weights.store import StoredVersion
from tests.integration.inference.replica_stage import (
    RUN,
    WAIT_SECONDS,
    Platform,
    announcement,
    prompt_group,
    write_run,
    write_version,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BROADCAST = {"SPO_INFERENCE_WEIGHT_TRANSFER": "broadcast"}


def publish(client: redis.Redis, stored: StoredVersion, broadcaster: Broadcaster, replicas: int) -> None:
    """As rank 0 and the orchestrator do together."""
    offer = broadcaster.offer()
    assert offer
    announced = announcement(stored)
    announced.broadcast.CopyFrom(offer)
    append_entries(client, redis_keys.weights(RUN), [announced.SerializeToString()])
    broadcaster.send(stored, offer, replicas)


def test_replicas_take_a_broadcast_and_the_files_when_one_of_them_dies_in_it(
    tmp_path: Path, redis_server: str, redis_client: redis.Redis
) -> None:
    write_random_llama(tmp_path / "model", seed=0)
    write_run(redis_client, RUN, tmp_path / "model")
    platform = Platform(tmp_path, redis_server)
    broadcaster = Broadcaster("127.0.0.1", 0, window_seconds=30, transfer_seconds=20)
    try:
        platform.assign(RUN)
        replicas = [
            platform.start_replica(**BROADCAST),
            platform.start_replica("tests.integration.inference.dying_replica", **BROADCAST),
        ]
        stays, dies = replicas
        for replica in replicas:
            wait_until(lambda replica=replica: platform.beat(replica).run_id == RUN, "a replica", WAIT_SECONDS)
        # Forks of the warm parent may serve before the sender, a process of its own, has loaded its libraries.
        wait_until(lambda: broadcaster.offer() is not None, "the sender", WAIT_SECONDS)
        publish(redis_client, write_version(platform.store, 1), broadcaster, 2)
        for replica in replicas:
            wait_until(lambda r=replica: platform.beat(r).policy_version == 1, "version 1", WAIT_SECONDS)
            assert _source(platform, replica) == "broadcast"

        wait_until(lambda: broadcaster.offer() is not None, "the sender to be free", WAIT_SECONDS)
        publish(redis_client, write_version(platform.store, 2), broadcaster, 2)
        dies.wait(WAIT_SECONDS)
        wait_until(lambda: platform.beat(stays).policy_version == 2, "version 2 all the same", WAIT_SECONDS)
        wait_until(lambda: broadcaster.offer() is not None, "the sender to be free", WAIT_SECONDS)

        publish(redis_client, write_version(platform.store, 3), broadcaster, 1)
        wait_until(lambda: platform.beat(stays).policy_version == 3, "version 3 from a new group", WAIT_SECONDS)
        assert _source(platform, stays) == "broadcast"

        # The same bits sample the same: by broadcast, and from the files after another version was loaded.
        received, _, read = (_sampled(platform, stays, version) for version in (None, 1, 3))
        assert received == read
    finally:
        broadcaster.close()
        platform.close()


def _sampled(platform: Platform, replica: WarmProcess, version: int | None) -> list[list[float]]:
    request = inference.GenerateRequest(group=prompt_group(1, version=version))
    group = platform.client(replica).call("Generate", request, WAIT_SECONDS).group
    return [list(trajectory.sampling_logprobs) for trajectory in group.trajectories]


def _source(platform: Platform, replica: WarmProcess) -> str:
    """Where the last loaded version came from."""
    lines = [line for line in platform.log_of(replica).splitlines() if '"weights loaded"' in line]
    return str(json.loads(lines[-1])["source"])
