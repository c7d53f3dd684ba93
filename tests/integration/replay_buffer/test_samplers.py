"""Every sampler and filter of a source, on a real server."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import Limiter
from spo.errors import NotReady, PreconditionFailed
from spo.testing.runs import PROMPTS, RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory

BATCH = 16


def sampler_of(client: redis.Redis, source: str = "online", replay: Any = None, **part: Any) -> BatchSampler:
    fields = {"min_online": 0, "online_capacity": 64, "offline_per_prompt": 4, **(replay or {})}
    mix = [{"source": source, "share": 1, **part}]
    start_run(client, trainer={"batch_size": BATCH}, replay=fields | {"mix": mix})
    return BatchSampler(ReplayStore(client))


def draw(sampler: BatchSampler, step: int, version: int = 0, seed: int = 0) -> list[Trajectory]:
    request = SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step, policy_version=version, seed=seed)
    return [sample.trajectory for sample in sampler.sample(request)]


def number(sample: Trajectory) -> int:
    return int(sample.trajectory_id.rsplit("_", 1)[1])


def enter(sampler: BatchSampler, numbers: range, source: Any = SOURCE_ONLINE, **fields: Any) -> None:
    sampler.store.append(RUN, [trajectory(index, source, **fields) for index in numbers])


def test_uniform_fifo_draws_from_the_window_alone(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client)
    enter(sampler, range(200))

    drawn = {number(sample) for step in range(40) for sample in draw(sampler, step)}

    assert drawn == set(range(136, 200))


def test_uniform_draws_from_everything_and_nothing_leaves(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, sampler="uniform", replay={"online_capacity": 4, "samples_per_insert": 100})
    enter(sampler, range(100))

    drawn = {number(sample) for step in range(60) for sample in draw(sampler, step)}
    after_restart = {
        number(sample) for step in range(60, 120) for sample in draw(BatchSampler(ReplayStore(redis_client)), step)
    }

    assert drawn == after_restart == set(range(100))


def test_uniform_over_an_offline_source_ignores_the_cap_per_prompt(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, "human", sampler="uniform")
    enter(sampler, range(40), SOURCE_HUMAN)

    assert {number(sample) for step in range(30) for sample in draw(sampler, step)} == set(range(40))


def test_prioritised_draws_surprises_more_often_and_old_ones_less(redis_client: redis.Redis) -> None:
    # All on prompt 3, whose soft value is near 0: wrong ones surprise most.
    turns = {"samples_per_insert": 1000}
    sampler = sampler_of(redis_client, sampler="prioritised", replay=turns, priority_half_life=1.0)
    enter(sampler, range(3, 83, 4), version=4)
    enter(sampler, range(83, 163, 4), version=0)
    enter(sampler, range(163, 243, 4), version=4, right=False)

    drawn = Counter(
        (sample.reward, sample.policy_version_first) for step in range(60) for sample in draw(sampler, step, 4)
    )

    young_right, old_right, young_wrong = drawn[0.0, 4], drawn[0.0, 0], drawn[-1.0, 4]
    assert young_wrong > 2 * young_right > 0
    assert young_right > 4 * old_right, "16 times the priority"


def test_prioritised_by_value_spread_prefers_prompts_that_are_solved_half_of_the_time(
    redis_client: redis.Redis,
) -> None:
    sampler = sampler_of(
        redis_client, sampler="prioritised", priority="value_spread", replay={"samples_per_insert": 1000}
    )
    enter(sampler, range(64))

    drawn = Counter(sample.prompt_id for step in range(30) for sample in draw(sampler, step))

    # Success rates .0, .1, .2, .3: prompt 0 has no spread and comes last.
    assert drawn[PROMPTS[0]] == 0
    assert drawn[PROMPTS[3]] > drawn[PROMPTS[2]] > drawn[PROMPTS[1]] > 0


def test_per_prompt_draws_every_prompt_equally_often(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, sampler="per_prompt")
    # 40 of prompt 1, but 6 of the others together.
    sampler.store.append(RUN, [trajectory(index) for index in range(1, 161, 4)])
    sampler.store.append(RUN, [trajectory(index) for index in (0, 2, 3, 4, 6, 7)])

    drawn = Counter(sample.prompt_id for sample in draw(sampler, 0))

    assert drawn == {PROMPTS[0]: 2, PROMPTS[1]: 10, PROMPTS[2]: 2, PROMPTS[3]: 2}
    assert len({sample.trajectory_id for sample in draw(sampler, 1)}) == BATCH, (
        "nobody is drawn twice for balance's sake"
    )


@pytest.mark.parametrize(("rights", "expected"), [(20, 8), (3, 3), (0, 0)])
def test_outcome_balanced_draws_right_and_wrong_alike_as_far_as_they_last(
    redis_client: redis.Redis, rights: int, expected: int
) -> None:
    sampler = sampler_of(redis_client, sampler="outcome_balanced")
    enter(sampler, range(44), right=False)
    enter(sampler, range(44, 44 + rights))

    assert sum(sample.reward == 0 for sample in draw(sampler, 0)) == expected


def test_outcome_balanced_finds_the_right_ones_of_an_offline_source_behind_many_wrong(
    redis_client: redis.Redis,
) -> None:
    sampler = sampler_of(redis_client, "human", sampler="outcome_balanced")
    enter(sampler, range(80), SOURCE_HUMAN, right=False)
    enter(sampler, range(80, 96), SOURCE_HUMAN)

    assert sum(sample.reward == 0 for sample in draw(sampler, 0)) == 8


def test_prompts_whose_outcome_is_nearly_certain_are_left_out_by_the_value_spread(redis_client: redis.Redis) -> None:
    # sqrt(.1 * .9) = .3, sqrt(.2 * .8) = .4
    sampler = sampler_of(redis_client, min_value_spread=0.35)
    enter(sampler, range(60))

    assert {sample.prompt_id for sample in draw(sampler, 0)} == {PROMPTS[2], PROMPTS[3]}


def test_a_filter_that_leaves_nothing_is_an_error_with_the_source_and_its_counts(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, "human", min_value_spread=0.5)
    enter(sampler, range(8), SOURCE_HUMAN)
    redis_client.set(f"spo:{RUN}:orchestrator:state", "running")

    with pytest.raises(PreconditionFailed, match="source human: 8 inserted, 8 correct, 0 servable, 16 wanted"):
        draw(sampler, 0)


def test_online_trajectories_beyond_their_age_are_not_drawn_and_replaced(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, max_age_versions=1, replay={"max_staleness": 10})
    enter(sampler, range(32), version=0)
    enter(sampler, range(32, 64), version=2)

    assert {sample.policy_version_first for sample in draw(sampler, 0, version=3)} == {2}
    with pytest.raises(NotReady, match="source online: 64 inserted, 64 correct, 0 servable"):
        draw(sampler, 1, version=4)


@pytest.mark.parametrize("unit", ["trajectory", "group"])
def test_no_online_trajectory_is_served_more_often_than_allowed(redis_client: redis.Redis, unit: str) -> None:
    replay = {"max_times_sampled": 2, "samples_per_insert": 100, "unit": unit}
    sampler = sampler_of(redis_client, sampler="prioritised", replay=replay)
    other = BatchSampler(ReplayStore(redis_client))
    enter(sampler, range(40), group_size=4)

    # Two processes take turns; neither knows what the other drew but from Redis.
    drawn = [draw(other if step % 2 else sampler, step) for step in range(3)]
    with contextlib.suppress(NotReady):
        drawn += [draw(other, 3), draw(sampler, 4)]
    with pytest.raises(NotReady, match="16 wanted"):
        draw(BatchSampler(ReplayStore(redis_client)), 6)

    times = Counter(sample.trajectory_id for batch in drawn for sample in batch)
    assert max(times.values()) == 2
    enter(sampler, range(40, 56), group_size=4)
    assert len(draw(sampler, 6)) == BATCH


@pytest.mark.parametrize("sampler", ["uniform_fifo", "uniform", "prioritised", "per_prompt", "outcome_balanced"])
def test_equal_ledgers_steps_and_seeds_make_equal_batches(redis_client: redis.Redis, sampler: str) -> None:
    batches: list[list[int]] = []
    for seed in (7, 7, 8):
        redis_client.flushall()
        batch_sampler = sampler_of(redis_client, sampler=sampler)
        for start in range(0, 60, 20 if batches else 60):
            batch_sampler.store.append(
                RUN, [trajectory(index, right=index % 3 == 0) for index in range(start, min(60, start + 60))]
            )
        batches.append([number(sample) for step in range(3) for sample in draw(batch_sampler, step, seed=seed)])

    assert batches[0] == batches[1]
    assert batches[0] != batches[2]


def test_what_is_older_is_drawn_less_often_with_a_half_life(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, age_half_life=2.0, replay={"samples_per_insert": 1000, "max_staleness": 50})
    enter(sampler, range(32), version=0)
    enter(sampler, range(32, 64), version=8)

    batches = [draw(sampler, step, version=8) for step in range(60)]

    # Sixteen to one: without replacement in a batch of 16 of 32 the old ones get a little more than a seventeenth.
    old = sum(sample.policy_version_first == 0 for batch in batches for sample in batch) / (60 * BATCH)
    assert 0.03 < old < 0.15
    again = BatchSampler(ReplayStore(redis_client))
    assert [number(sample) for sample in draw(again, 7, version=8)] == [number(sample) for sample in batches[7]]


def test_pairs_are_drawn_from_prompts_that_have_both(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, "human", sampler="pairs")
    enter(sampler, range(40), SOURCE_HUMAN, right=False)
    # Right ones for the prompts of even number alone.
    sampler.store.append(RUN, [trajectory(index, SOURCE_HUMAN) for index in range(40, 80) if index % 2 == 0])

    drawn = draw(sampler, 0)

    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    assert all((right.reward, wrong.reward) == (0.0, -1.0) for right, wrong in pairs)
    assert all(right.prompt_id == wrong.prompt_id for right, wrong in pairs)
    assert {right.prompt_id for right, _ in pairs} == {PROMPTS[0], PROMPTS[2]}
    assert draw(BatchSampler(ReplayStore(redis_client)), 0) == drawn


def test_without_any_pair_a_source_of_pairs_says_so(redis_client: redis.Redis) -> None:
    sampler = sampler_of(redis_client, "human", sampler="pairs")
    enter(sampler, range(40), SOURCE_HUMAN, right=False)
    redis_client.set(f"spo:{RUN}:orchestrator:state", "running")

    with pytest.raises(PreconditionFailed, match="source human: 40 inserted, 0 correct, 0 servable"):
        draw(sampler, 0)


def test_groups_without_contrast_are_left_out_and_admit_others_in_their_place(redis_client: redis.Redis) -> None:
    replay = {"unit": "group", "samples_per_insert": 1, "error_buffer": 1, "max_times_sampled": 1}
    sampler = sampler_of(redis_client, contrast_only=True, replay=replay)

    def group(first: int, rewards: tuple[float, ...]) -> list[Trajectory]:
        found = [trajectory(first + index, group_size=4) for index in range(4)]
        for sample, reward in zip(found, rewards, strict=True):
            sample.reward = reward
        return found

    def admissible() -> int:
        index = sampler.index(RUN)
        index.refresh(["online"])
        return Limiter.of(index.spec).admissible_inserts(index.live(index.rule("online")))

    for first in range(0, 40, 4):
        sampler.store.append(RUN, group(first, (-1.0,) * 4))
    before = admissible()
    with pytest.raises(NotReady, match="0 fresh enough"):
        draw(sampler, 0)
    for first in range(40, 60, 4):
        sampler.store.append(RUN, group(first, (-1.0, -1.0, 0.0, -1.0)))

    assert before == Limiter.of(sampler.index(RUN).spec).error_buffer
    assert {number(sample) for sample in draw(sampler, 0)} <= set(range(40, 60))
