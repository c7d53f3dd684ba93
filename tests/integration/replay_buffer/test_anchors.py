"""What a rollout brings of its own anchor: log-probs of the version that sampled it, and the rewards of its group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from services.replay_buffer.ingest import IngestWorker, ReferenceScores, forget_anchor
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.messaging.streams.entries import publish
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import RpcClient
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, ScorerDouble, served_scorer, start_run, trajectory
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.value_service_pb2_grpc import ValueServiceStub

ANCHORED = {
    "algorithm": {"reference_refresh": {"interval_steps": 10, "values": "rollouts"}},
    "trainer": {"update_interval": 10},
    "rollout": {"temperature": 1.0, "top_p": 1.0},
    "replay": {"mix": [{"source": "online", "share": 1.0}]},
}


@pytest.fixture
def scorer() -> Iterator[tuple[ScorerDouble, RpcClient]]:
    double = ScorerDouble()  # type: ignore[abstract]
    with served_scorer(double) as address:
        client = RpcClient("value-estimation", address, ValueServiceStub)
        yield double, client
        client.close()


def entered(
    client: redis.Redis, scorer: RpcClient, sections: dict[str, Any], versions: list[int]
) -> dict[int, Trajectory]:
    """Judged samples of one group, the first of them right, as they stand in the buffer; by number."""
    start_run(client, **sections)
    samples = [
        trajectory(number, right=number == 0, version=version, scored=False, group_size=8)
        for number, version in enumerate(versions)
    ]
    group = RolloutGroup(request=PromptGroup(group_id="group-0", run_id=RUN), trajectories=samples)
    publish(client, redis_keys.verdicts(), [group.SerializeToString()])
    consumer = Consumer(client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest-1")
    worker = IngestWorker(ReplayStore(client), consumer, ReferenceScores(scorer, 5.0), 16)
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: client.xlen(redis_keys.verdicts()) == 0, "an empty stream", 20)
    finally:
        stop.set()
        thread.join(20)
    found = worker.store.get(RUN, [sample.trajectory_id for sample in samples])
    return {number: sample for number, sample in enumerate(found) if sample is not None}


def test_a_group_of_a_later_version_brings_its_own_numbers_and_nobody_computes_more(
    redis_client: redis.Redis, scorer: tuple[ScorerDouble, RpcClient]
) -> None:
    found = entered(redis_client, scorer[1], ANCHORED, [3, 3, 3, 4])

    assert scorer[0].scored == 0
    assert [found[number].anchor.policy_version for number in range(4)] == [3, 3, 3, 4]
    # The samples of one version are valued together, and not with another's.
    assert [list(found[number].anchor.rewards) for number in (1, 3)] == [[0.0, -1.0, -1.0], [-1.0]]
    assert list(found[0].reference_logprobs) == list(found[0].sampling_logprobs)
    assert found[0].reference_hash == ""


@pytest.mark.parametrize("value", ["estimated", "of the group"])
def test_rollouts_of_pi0_keep_its_log_probs_and_its_better_value(
    redis_client: redis.Redis, scorer: tuple[ScorerDouble, RpcClient], value: str
) -> None:
    sections = ANCHORED if value == "estimated" else {**ANCHORED, "value": None}
    found = entered(redis_client, scorer[1], sections, [0, 0])

    assert scorer[0].scored == 2
    assert list(found[0].reference_logprobs) == [-0.5, -0.5, -0.5]
    assert found[0].reference_hash == "pi0"
    assert found[0].HasField("anchor") == (value == "of the group")
    assert list(found[0].anchor.rewards) == ([] if value == "estimated" else [0.0, -1.0])


def test_a_job_without_moving_anchors_has_none(
    redis_client: redis.Redis, scorer: tuple[ScorerDouble, RpcClient]
) -> None:
    found = entered(redis_client, scorer[1], {}, [3, 3])

    assert not found[0].HasField("anchor")
    assert list(found[0].reference_logprobs) == [-0.5, -0.5, -0.5]


def test_a_copy_for_another_run_knows_of_no_anchor() -> None:
    anchored = trajectory(0, version=3)
    anchored.anchor.policy_version = 3

    forget_anchor(anchored)

    assert not anchored.HasField("anchor")
    assert not anchored.reference_logprobs
