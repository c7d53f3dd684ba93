"""Redis ends at the window: what is stored, outside it and in no batch to come leaves, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from services.replay_buffer.archive import BATCHES_KEPT, ArchivedTrajectories, ExperienceArchiver, WindowTrimmer
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import NotFound
from spo.experience.store import ExperienceStore
from spo.testing.runs import RUN, start_run, trajectory
from spo.v1 import replay_service_pb2 as replay
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE, SOURCE_UNSPECIFIED

WINDOW = 50
ONLINE = {"mix": [{"source": "online", "share": 1}], "min_online": 4, "samples_per_insert": 1000}


class Buffer:
    """One run with its archiver, trimmer and service, as a replay-buffer process has them."""

    def __init__(self, client: redis.Redis, folder: Path, *, ledger: int = 100_000, **settings: Any) -> None:
        self.client: Any = client
        self.store = ReplayStore(self.client)
        experience = ExperienceStore(str(folder / "experience"))
        self.archiver = ExperienceArchiver(self.store, experience, 32, every_seconds=60)
        chosen = Settings(**{"ended_seconds": 0, "ledger_trajectories": max(1000, ledger), **settings})
        self.trimmer = WindowTrimmer(BatchSampler(self.store), chosen)
        self.service = ReplayService(self.trimmer.sampler, archived=ArchivedTrajectories(experience))

    def insert(self, numbers: range, **facts: Any) -> tuple[int, int]:
        return self.store.append(RUN, [trajectory(number, **facts) for number in numbers])

    def settle(self) -> int:
        self.archiver.archive(RUN)
        return self.trimmer.trim(RUN)

    def payloads(self) -> set[int]:
        """Numbers of the online trajectories whose payloads are in Redis."""
        prefix = redis_keys.replay_trajectory(RUN, "traj_SOURCE_ONLINE_")
        return {int(key.decode().removeprefix(prefix)) for key in self.client.keys(f"{prefix}*")}

    def batch(self, step: int, size: int = 8) -> list[str]:
        request = replay.SampleBatchRequest(run_id=RUN, batch_size=size, step=step)
        return [sample.trajectory.trajectory_id for sample in self.service.sampler.sample(request)]

    def listed(self, source: Any = SOURCE_UNSPECIFIED, prompt_id: str = "") -> list[str]:
        found, cursor = [], ""
        for _ in range(1000):
            request = replay.ListTrajectoriesRequest(
                run_id=RUN, limit=17, cursor=cursor, source=source, prompt_id=prompt_id
            )
            page = self.service.ListTrajectories(request, None)
            found += [sample.trajectory_id for sample in page.trajectories]
            cursor = page.next_cursor
            if not cursor:
                return found
        raise AssertionError("the pages never end")


@pytest.fixture
def start(redis_client: redis.Redis, tmp_path: Path) -> Callable[..., Buffer]:
    def build(settings: dict[str, Any] | None = None, sections: dict[str, Any] | None = None, **spec: Any) -> Buffer:
        chosen = {**ONLINE, "online_capacity": WINDOW, **spec}
        start_run(redis_client, replay=chosen, **(sections or {"trainer": {"batch_size": 8}}))
        redis_client.set(redis_keys.run_state(RUN), "running")
        return Buffer(redis_client, tmp_path, **(settings or {}))

    return build


def checkpoint(buffer: Buffer, *steps: int) -> None:
    """What the orchestrator records of the checkpoints that are kept."""
    buffer.client.delete(redis_keys.job_checkpoints(RUN))
    for step in steps:
        buffer.client.hset(redis_keys.job_checkpoints(RUN), step, json.dumps({"step": step, "weight_version": 0}))


def names(*numbers: int) -> list[str]:
    return [f"traj_SOURCE_ONLINE_{number}" for number in numbers]


def test_the_memory_of_a_run_is_flat_over_ten_windows(start: Callable[..., Buffer]) -> None:
    buffer = start({"ledger": 1000}, online_capacity=200)
    used = []
    for turn in range(12):
        buffer.insert(range(turn * 200, (turn + 1) * 200), text="x" * 20_000)
        buffer.settle()
        facts: Any = buffer.client.info("memory")
        used.append(int(facts["used_memory"]))

    assert len(buffer.payloads()) == 200
    # A window is 4 MB: without trimming it would be eleven times that.
    assert max(used[6:]) < 1.1 * used[6]
    assert buffer.client.zcard(redis_keys.replay_ids(RUN)) == 1000
    for key in (redis_keys.replay_source(RUN, "online"), redis_keys.replay_prompts(RUN)):
        assert buffer.client.zcard(key) == 200
    assert buffer.client.hlen(redis_keys.replay_facts(RUN)) == 200


def test_nothing_leaves_before_it_is_stored(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(200))

    assert buffer.trimmer.trim(RUN) == 0
    assert len(buffer.payloads()) == 200
    assert buffer.settle() == 150
    assert buffer.payloads() == set(range(150, 200))


def test_where_experience_is_not_stored_the_window_is_all_that_is_kept(start: Callable[..., Buffer]) -> None:
    buffer = start({"store_experience": False})
    buffer.insert(range(200))

    assert buffer.trimmer.trim(RUN) == 150
    assert buffer.payloads() == set(range(150, 200))


def test_a_late_redelivery_of_what_left_redis_changes_nothing(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(200))
    buffer.settle()

    assert buffer.insert(range(200)) == (0, 200)
    assert buffer.payloads() == set(range(150, 200))
    assert int(buffer.client.hget(redis_keys.replay_counters(RUN), "inserted:online")) == 200


def test_the_ledger_forgets_beyond_its_horizon_and_never_what_is_in_redis(start: Callable[..., Buffer]) -> None:
    buffer = start({"ledger": 1000})
    buffer.insert(range(100))
    held = buffer.batch(1)
    buffer.insert(range(100, 1500))
    buffer.settle()

    ledger = {raw.decode() for raw in buffer.client.zrange(redis_keys.replay_ids(RUN), 0, -1)}
    assert ledger == {*held, *names(*range(500, 1500))}
    # The batch is of before the oldest checkpoint now: it leaves, and its ids with it.
    checkpoint(buffer, 1)
    buffer.settle()
    assert buffer.client.zcard(redis_keys.replay_ids(RUN)) == 1000


def test_a_batch_that_a_trainer_may_ask_for_again_stays_whole(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(WINDOW))
    first, second = buffer.batch(1), buffer.batch(2)
    buffer.insert(range(WINDOW, 10 * WINDOW))
    buffer.settle()

    assert buffer.batch(1) == first, "no checkpoint yet: a trainer begins anew at step 1"
    checkpoint(buffer, 1, 2)
    buffer.settle()
    again = Buffer(buffer.client, Path("/nonexistent")).batch(2)
    assert again == second
    kept = buffer.payloads()
    assert kept == {*range(9 * WINDOW, 10 * WINDOW), *(int(name.rsplit("_", 1)[1]) for name in second)}


def test_a_draw_that_meets_a_trajectory_on_its_way_out_is_made_again(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(WINDOW))
    left, there = names(0, 1)
    buffer.client.delete(redis_keys.replay_trajectory(RUN, left))

    assert buffer.store.record_batch(RUN, 1, [there, left], {"online": 2}) == []
    assert buffer.store.batch(RUN, 1) == []
    assert buffer.store.record_batch(RUN, 1, [there], {"online": 1}) == [there]


def test_a_batch_recorded_during_a_pass_is_spared(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(WINDOW))
    buffer.insert(range(WINDOW, 2 * WINDOW))
    buffer.archiver.archive(RUN)
    trim = buffer.trimmer._trim
    meanwhile: list[str] = []

    def slow(keys: Any, args: Any) -> int:
        # Between the look at the batches and the step that removes, another process records one.
        if not meanwhile:
            meanwhile.extend(buffer.store.record_batch(RUN, 7, names(3, 4), {"online": 2}))
        return trim(keys=keys, args=args)

    buffer.trimmer._trim = slow

    assert buffer.trimmer.trim(RUN) == WINDOW - 2
    assert buffer.payloads() == {3, 4, *range(WINDOW, 2 * WINDOW)}


def test_people_page_through_everything_once_and_find_what_left(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])
    buffer.insert(range(300))
    buffer.settle()

    listed = buffer.listed()
    human = [f"traj_SOURCE_HUMAN_{number}" for number in range(8)]
    assert sorted(listed) == sorted([*names(*range(300)), *human])
    assert listed[:WINDOW] == names(*range(299, 249, -1)), "what is in Redis comes first, newest first"
    assert sorted(buffer.listed(SOURCE_HUMAN)) == sorted(human)
    assert sorted(buffer.listed(SOURCE_ONLINE)) == sorted(names(*range(300)))
    assert sorted(buffer.listed(SOURCE_ONLINE, "prompt-1")) == sorted(names(*range(1, 300, 4)))

    old = buffer.service.GetTrajectory(replay.GetTrajectoryRequest(run_id=RUN, trajectory_id=names(7)[0]), None)
    assert old.trajectory == trajectory(7)
    with pytest.raises(NotFound, match="no trajectory traj_NONE"):
        buffer.service.GetTrajectory(replay.GetTrajectoryRequest(run_id=RUN, trajectory_id="traj_NONE"), None)


def test_a_window_of_groups_keeps_whole_groups(start: Callable[..., Buffer]) -> None:
    sections = {"rollout": {"samples_per_prompt": 4}, "trainer": {"batch_size": 8}}
    buffer = start(sections=sections, unit="group")
    # Every third group lacks a member.
    complete = [number for number in range(400) if not (number // 4 % 3 == 0 and number % 4 == 0)]
    buffer.store.append(RUN, [trajectory(number, group_size=4) for number in complete])
    buffer.settle()

    groups = [group for group in range(100) if group % 3][-(WINDOW // 4) :]
    assert {4 * group + member for group in groups for member in range(4)} <= buffer.payloads()
    assert min(buffer.payloads()) == 4 * groups[0]
    fresh = Buffer(buffer.client, Path("/nonexistent")).service
    status = fresh.GetReplayStatus(replay.GetReplayStatusRequest(run_id=RUN), None)
    assert status.counts[0].available == 4 * len(groups)


def test_without_a_window_the_oldest_version_that_may_be_served_ends_it(start: Callable[..., Buffer]) -> None:
    mix = [{"source": "online", "share": 1, "sampler": "uniform"}]
    buffer = start(mix=mix, max_staleness=2)
    for version in range(10):
        buffer.insert(range(20 * version, 20 * version + 20), version=version)
    buffer.store.note_policy_version(RUN, 9)
    buffer.settle()
    assert len(buffer.payloads()) == 200, "a trainer may begin anew with version 0"

    buffer.client.hset(redis_keys.job_checkpoints(RUN), 5, json.dumps({"step": 5, "weight_version": 6}))
    buffer.settle()
    assert buffer.payloads() == set(range(80, 200)), "versions 4 and later"


def test_what_a_follower_would_still_take_stays(start: Callable[..., Buffer], redis_client: redis.Redis) -> None:
    buffer = start()
    mix = [{"source": "shared", "share": 1}]
    follow = {"rollout": {"follow": RUN}, "replay": {"mix": mix, "max_staleness": 1}}
    start_run(redis_client, "job_FOLLOWER", **follow)
    redis_client.zadd(redis_keys.jobs_in_state("queued"), {"job_FOLLOWER": 1})
    for version in range(4):
        buffer.insert(range(100 * version, 100 * version + 100), version=version)
    buffer.store.note_policy_version(RUN, 3)
    redis_client.hset(redis_keys.replay_counters("job_FOLLOWER"), "followed", 250)
    buffer.settle()
    assert min(buffer.payloads()) == 250, "it has read 250, and takes nothing older than version 2"

    redis_client.hset(redis_keys.replay_counters("job_FOLLOWER"), "followed", 400)
    buffer.settle()
    assert buffer.payloads() == set(range(350, 400))


def test_an_ended_run_keeps_its_offline_trajectories_only(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])
    buffer.insert(range(200))
    buffer.batch(1)
    buffer.settle()
    buffer.client.set(redis_keys.run_state(RUN), "succeeded")
    buffer.trimmer.trim_when_due(RUN)

    assert buffer.payloads() == set()
    with structlog.testing.capture_logs() as logs:
        buffer.service.GetReplayStatus(replay.GetReplayStatusRequest(run_id=RUN), None)
    assert [line for line in logs if line["log_level"] == "error"] == [], "nothing was lost"
    assert len(buffer.listed()) == 208
    assert buffer.store.get(RUN, ["traj_SOURCE_HUMAN_3"]) != [None]
    assert buffer.client.zcard(redis_keys.replay_ids(RUN)) == 8
    assert not buffer.client.sismember(redis_keys.replay_untrimmed(), RUN)


def test_a_deleted_run_is_not_looked_at_for_ever(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.insert(range(10))
    assert buffer.client.sismember(redis_keys.replay_untrimmed(), RUN)
    for key in buffer.client.keys(f"spo:{RUN}:*"):
        buffer.client.delete(key)

    buffer.trimmer.trim_when_due(RUN)

    assert buffer.client.smembers(redis_keys.replay_untrimmed()) == set()
    assert buffer.client.keys(f"spo:{RUN}:*") == []


def test_old_batch_records_go_and_the_counts_of_what_may_be_sampled_stay(start: Callable[..., Buffer]) -> None:
    buffer = start(max_times_sampled=3, sections={"trainer": {"batch_size": 2}})
    buffer.insert(range(10))
    twice = names(8, 9)
    for step in (1, 2):
        buffer.store.record_batch(RUN, step, twice, {"online": 2})
    for step in range(3, BATCHES_KEPT + 50):
        # Offline trajectories: they do not count.
        buffer.store.record_batch(RUN, step, names(0), {"human": 1})
    buffer.client.zrem(redis_keys.replay_source(RUN, "online"), *names(0))
    checkpoint(buffer, BATCHES_KEPT + 40)
    buffer.settle()

    assert buffer.client.zcard(redis_keys.replay_batch_log(RUN)) == BATCHES_KEPT + 2
    assert buffer.store.batch(RUN, 3) == []
    assert buffer.store.batch(RUN, 1) == twice
    fresh = BatchSampler(ReplayStore(buffer.client)).index(RUN)
    fresh.refresh(["online"])
    assert [fresh.sample_counts.times(name) for name in names(7, 8)] == [0, 2]
    with pytest.raises(NotFound, match="on record"):
        buffer.service.GetBatch(replay.GetBatchRequest(run_id=RUN, step=3), None)
