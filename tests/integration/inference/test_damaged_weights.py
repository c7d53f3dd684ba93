"""A replica that joins while the newest weights are damaged."""

from __future__ import annotations

from pathlib import Path

import redis

from spo import redis_keys
from spo.messaging.streams.entries import publish, read_after
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1.trajectory_pb2 import RolloutGroup
from tests.integration.inference.replica_stage import (
    RUN,
    WAIT_SECONDS,
    Platform,
    announce,
    announcement,
    prompt_group,
    write_run,
    write_version,
)


def test_a_replica_that_joins_serves_the_newest_intact_version_says_so_and_takes_the_repaired_one(
    tmp_path: Path, redis_server: str, redis_client: redis.Redis
) -> None:
    write_random_llama(tmp_path / "model", seed=0)
    write_run(redis_client, RUN, tmp_path / "model")
    platform = Platform(tmp_path, redis_server)
    for version in (1, 2):
        announce(redis_client, write_version(platform.store, version))
    damaged = write_version(platform.store, 3)
    content = damaged.files[0].read_bytes()
    damaged.files[0].write_bytes(content[:-1])
    announce(redis_client, damaged)
    publish(redis_client, redis_keys.prompts(RUN), [prompt_group(1).SerializeToString()])
    try:
        platform.assign(RUN)
        platform.orchestrator.response.weights.CopyFrom(announcement(damaged))
        replica = platform.start_replica()
        wait_until(lambda: redis_client.xlen(redis_keys.rollouts()), "the rollouts", WAIT_SECONDS)
        (entry,) = read_after(redis_client, redis_keys.rollouts(), "0-0", 1)
        made = RolloutGroup.FromString(entry.payload).trajectories
        assert {(each.policy_version_first, each.policy_version_last) for each in made} == {(2, 2)}
        wait_until(lambda: platform.beat(replica).policy_version == 2, "version 2 to be told", WAIT_SECONDS)
        said = platform.beat(replica).problem
        assert "version 3" in said
        assert "version 2 is served in its place" in said

        damaged.files[0].write_bytes(content)
        wait_until(lambda: platform.beat(replica).policy_version == 3, "the repaired version 3", WAIT_SECONDS)
        wait_until(lambda: platform.beat(replica).problem == "", "no problem any more", WAIT_SECONDS)
    finally:
        platform.close()
