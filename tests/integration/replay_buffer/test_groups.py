"""Whole groups: all samples of a prompt are drawn together or not at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis

from services.replay_buffer.archive import WindowTrimmer
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import LiveCounts
from services.trainer.batches import ReplayClient
from spo import redis_keys
from spo.errors import InvalidInput, NotReady
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.runs import RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, SampleBatchRequest
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory

GROUP = 4
# By agents.
PLAYED: dict[str, Any] = {
    "tasks": {"train_problems": 6, "evaluation_problems": 0, "harness": {"name": "guess"}},
    "value": None,
    "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
}
MIX = [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}]


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    replay = {"unit": "group", "mix": MIX, "min_online": 8, "max_staleness": 2, "online_capacity": 33}
    start_run(redis_client, trainer={"batch_size": 16}, rollout={"samples_per_prompt": GROUP}, replay=replay)
    return ReplayStore(redis_client)


@pytest.fixture
def sampler(store: ReplayStore) -> BatchSampler:
    return BatchSampler(store)


def online(numbers: range, version: int = 0) -> list[Trajectory]:
    return [trajectory(number, group_size=GROUP, right=number % 3 == 0, version=version) for number in numbers]


def groups_of(sampler: BatchSampler, step: int, policy_version: int = 0) -> Counter[str]:
    request = SampleBatchRequest(run_id=RUN, batch_size=16, step=step, policy_version=policy_version)
    batch = [sample.trajectory for sample in sampler.sample(request)]
    assert Counter(sample.source for sample in batch) == {SOURCE_ONLINE: 12, SOURCE_HUMAN: 4}
    return Counter(sample.group_id for sample in batch if sample.source == SOURCE_ONLINE)


def human(store: ReplayStore) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])


def test_every_group_of_a_batch_is_whole(store: ReplayStore, sampler: BatchSampler) -> None:
    human(store)
    store.append(RUN, online(range(40)))

    for step in range(5):
        assert list(groups_of(sampler, step).values()) == [GROUP] * 3


def test_groups_outside_the_window_or_too_stale_are_not_drawn(store: ReplayStore, sampler: BatchSampler) -> None:
    human(store)
    store.append(RUN, online(range(40), version=1))
    # One member that old weights began makes its group stale.
    late = online(range(40, 52), version=3)
    late[0].policy_version_first = 0
    store.append(RUN, late)

    drawn = {group for step in range(20) for group in groups_of(sampler, step, policy_version=3)}

    assert drawn == {f"group-{number}" for number in range(5, 13)} - {"group-10"}


def test_a_group_with_a_missing_member_is_listed_but_not_drawn(store: ReplayStore, sampler: BatchSampler) -> None:
    human(store)
    store.append(RUN, online(range(11)))

    with pytest.raises(NotReady, match=r"11 inserted, 4 correct, 8 servable in groups of 4, 3 in incomplete groups"):
        groups_of(sampler, 0)
    status = ReplayService(sampler).GetReplayStatus(GetReplayStatusRequest(run_id=RUN), None)
    assert next(count.available for count in status.counts if count.source == SOURCE_ONLINE) == 8
    assert status.admissible_inserts >= GROUP, "another group is asked for"

    store.append(RUN, online(range(11, 12)))
    assert set(groups_of(sampler, 0)) == {"group-0", "group-1", "group-2"}


def test_a_restarted_buffer_knows_which_groups_are_whole(store: ReplayStore) -> None:
    human(store)
    store.append(RUN, online(range(38)))

    drawn = {group for step in range(20) for group in groups_of(BatchSampler(ReplayStore(store.client)), step)}

    assert drawn == {f"group-{number}" for number in range(1, 9)}


def test_a_batch_that_would_cut_a_group_is_refused(sampler: BatchSampler) -> None:
    with pytest.raises(InvalidInput, match="6 online trajectories, no whole number of groups of 4"):
        sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=8))


def test_an_online_trajectory_without_a_group_is_refused(store: ReplayStore) -> None:
    loose = trajectory(0)
    loose.group_id = ""

    with pytest.raises(InvalidInput, match="/group_id"):
        store.append(RUN, [loose])


def test_a_group_of_which_samples_are_lost_is_drawn_by_the_trainer_with_those_that_are_left(
    redis_client: redis.Redis,
) -> None:
    sampler = only_online(redis_client, played=True)
    trajectories = online(range(16))
    # Of group 1 two are lost, of group 2 one, of group 3 all but one: that has nothing to be compared with.
    kept = [*trajectories[:4], *trajectories[4:6], *trajectories[8:11], trajectories[12], *online(range(16, 20))]
    for each in kept:
        left = sum(other.group_id == each.group_id for other in kept)
        each.group_samples = 0 if left == GROUP else left
    # An episode that was begun anew is of its group.
    kept[5].attempt = 2
    sampler.store.append(RUN, kept)

    spec = sampler.store.spec(RUN)
    server = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(ReplayService(sampler), server.server)
    server.start()
    try:
        for outlines in (False, True):
            client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
            rows = ReplayClient(client, RUN, spec, outlines=outlines).sample(0, 0, 1.0, None)
            drawn = Counter(row.trajectory.group_id for row in rows)
            assert drawn == {"group-0": 4, "group-1": 2, "group-2": 3, "group-4": 4}
            client.close()
    finally:
        server.stop(1)


def only_online(client: redis.Redis, *, played: bool = False, **part: bool) -> BatchSampler:
    """played: by agents."""
    harness = PLAYED if played else {}
    replay = {"unit": "group", "min_online": 0, "online_capacity": 16, "samples_per_insert": 1000}
    mix = [{"source": "online", "share": 1, **part}]
    start_run(
        client,
        trainer={"batch_size": 16},
        rollout={"samples_per_prompt": GROUP},
        replay=replay | {"mix": mix},
        **harness,
    )
    client.set(redis_keys.run_state(RUN), "running")
    return BatchSampler(ReplayStore(client))


def trim(sampler: BatchSampler) -> int:
    return WindowTrimmer(sampler, Settings(store_experience=False)).trim(RUN)


def test_a_group_whose_members_came_apart_is_drawn_whole_after_older_ones_left(redis_client: redis.Redis) -> None:
    sampler = only_online(redis_client)
    # The first of group 3 was inserted, then its ingest was killed; the others came with the redelivery.
    for numbers in (range(4), range(12, 13), range(4, 12), range(13, 20)):
        sampler.store.append(RUN, online(numbers))

    assert trim(sampler) == GROUP
    for step, process in enumerate((sampler, BatchSampler(ReplayStore(redis_client)))):
        request = SampleBatchRequest(run_id=RUN, batch_size=16, step=step)
        drawn = Counter(sample.trajectory.group_id for sample in process.sample(request))
        assert drawn == {f"group-{number}": GROUP for number in (1, 2, 3, 4)}


def test_a_group_that_is_completed_after_its_first_members_left_holds_up_no_batch(redis_client: redis.Redis) -> None:
    sampler = only_online(redis_client)
    for numbers in (range(1), range(4, 24)):
        sampler.store.append(RUN, online(numbers))
    assert trim(sampler) == 1 + GROUP
    sampler.store.append(RUN, online(range(1, 4)))

    for step in range(4):
        request = SampleBatchRequest(run_id=RUN, batch_size=12, step=step, wait_seconds=5)
        drawn = {sample.trajectory.group_id for sample in sampler.sample(request)}
        assert drawn == {"group-3", "group-4", "group-5"}


def test_groups_without_contrast_stay_out_of_the_limits_after_they_left_and_a_restart(
    redis_client: redis.Redis,
) -> None:
    sampler = only_online(redis_client, contrast_only=True)

    def counts(process: BatchSampler) -> LiveCounts:
        index = process.index(RUN)
        index.refresh(["online"])
        return index.live(index.rule("online"))

    for turn in range(10):
        groups = [trajectory(number, group_size=GROUP, right=False) for number in range(20 * turn, 20 * turn + 20)]
        groups[0].reward = 0.0
        sampler.store.append(RUN, groups)
        trim(sampler)

    restarted = counts(BatchSampler(ReplayStore(redis_client)))
    assert restarted == counts(sampler)
    assert restarted.inserted == 10 * GROUP


def test_a_window_of_groups_with_contrast_fills_however_rare_they_are(redis_client: redis.Redis) -> None:
    sampler = only_online(redis_client, contrast_only=True)
    # One group in ten has a right sample: the newest four groups never hold more than one of those.
    for group in range(100):
        members = [trajectory(GROUP * group + place, group_size=GROUP, right=False) for place in range(GROUP)]
        members[0].reward = -float(bool(group % 10))
        sampler.store.append(RUN, members)
        trim(sampler)

    for step, process in enumerate((sampler, BatchSampler(ReplayStore(redis_client)))):
        request = SampleBatchRequest(run_id=RUN, batch_size=16, step=step)
        drawn = {sample.trajectory.group_id for sample in process.sample(request)}
        assert drawn == {f"group-{group}" for group in (60, 70, 80, 90)}
    # What is left out leaves Redis as before.
    assert redis_client.zcard(redis_keys.replay_source(RUN, "online")) <= 2 * 4 * GROUP
