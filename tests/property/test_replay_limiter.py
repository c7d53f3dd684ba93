"""The limiter can slow a run down but never stop it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import given, strategies as st

from services.replay_buffer.windows import Limiter, LiveCounts, groups_kept
from spo.testing.runs import toy_spec

SPECS = st.builds(
    lambda share, **fields: toy_spec(
        {
            "model": {"path": "/pi0"},
            # Four groups' worth keeps the online part of every share a whole number of groups.
            "trainer": {"batch_size": fields["batch_size"] * (4 * fields["group"] if fields["unit"] == "group" else 1)},
            "rollout": {"samples_per_prompt": fields["group"]},
            "replay": {
                "mix": [{"source": "online", "share": share}, {"source": "human", "share": 1 - share}],
                **{name: fields[name] for name in ("samples_per_insert", "error_buffer", "min_online")},
                **{name: fields[name] for name in ("max_staleness", "unit", "max_times_sampled")},
                # Where turns are counted the window must fill a batch.
                "online_capacity": fields["online_capacity"]
                + (4 * fields["group"] * fields["batch_size"] if fields["max_times_sampled"] else 0),
            },
        }
    ),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    batch_size=st.integers(1, 100),
    group=st.integers(1, 40),
    samples_per_insert=st.sampled_from([0.01, 0.5, 1.0, 2.5, 30.0]),
    error_buffer=st.integers(1, 400),
    min_online=st.integers(0, 200),
    online_capacity=st.integers(1, 300),
    max_staleness=st.integers(0, 3),
    unit=st.sampled_from(["trajectory", "group"]),
    max_times_sampled=st.sampled_from([None, None, 1, 3]),
)


@given(spec=SPECS, steps_per_version=st.integers(1, 5), eager=st.booleans(), seed=st.integers(0, 2**32))
def test_a_run_under_any_spec_can_always_go_on(spec: Any, steps_per_version: int, eager: bool, seed: int) -> None:
    luck = random.Random(seed)
    limiter, group = Limiter.of(spec, replicas=luck.choice([0, 1, 1, 4, 16])), spec.rollout.samples_per_prompt
    whole = spec.replay.unit == "group"
    # Version, whether right, turns left.
    window: deque[list[int]] = deque(maxlen=groups_kept(spec) * group if whole else spec.replay.online_capacity)
    turns = spec.replay.max_times_sampled or 10**6
    inserted = sampled = steps = version = 0
    correct_only = luck.random() < 0.3 and not whole
    for _ in range(80):
        oldest = version - spec.replay.max_staleness
        available = [
            candidate
            for candidate in window
            if candidate[0] >= oldest and (candidate[1] or not correct_only) and candidate[2]
        ]
        online = LiveCounts(inserted, sampled, len(available))
        may_sample = limiter.may_sample(online, limiter.per_batch)
        may_insert = limiter.admissible_inserts(online) >= group
        assert may_sample or may_insert or limiter.per_batch == 0, online
        if may_sample and (eager or not may_insert):
            steps += 1
            sampled += limiter.per_batch
            for candidate in available[: limiter.per_batch]:
                candidate[2] -= 1
            version = steps // steps_per_version
        elif may_insert:
            inserted += group
            # Some groups were begun under older weights; a group with a poisonous sample never gets whole.
            if whole and luck.random() < 0.8:
                born = version - luck.choice([0, 0, 1])
                window.extend([born, False, turns] for _ in range(group))
            elif not whole:
                window.extend([version - luck.choice([0, 0, 1]), luck.random() < 0.2, turns] for _ in range(group))


@given(spec=SPECS, inserted=st.integers(0, 10_000), sampled=st.integers(0, 10_000), replicas=st.integers(2, 64))
def test_more_replicas_only_let_more_be_inserted_and_no_more_than_can_be_served(
    spec: Any, inserted: int, sampled: int, replicas: int
) -> None:
    alone, many = Limiter.of(spec), Limiter.of(spec, replicas=replicas)
    online = LiveCounts(inserted, sampled, available=10_000)
    assert many.admissible_inserts(online) >= alone.admissible_inserts(online)
    assert many.may_sample(online, many.per_batch) == alone.may_sample(online, alone.per_batch)
    ahead = many.insert_buffer / many.samples_per_insert
    assert ahead <= max(alone.error_buffer / alone.samples_per_insert, many.capacity) + 1e-6
    versions = many.insert_buffer / max(1, many.per_batch) / spec.trainer.update_interval
    assert versions <= spec.replay.max_staleness + 1e-6 or many.insert_buffer == alone.error_buffer


def test_each_of_several_replicas_has_in_hand_what_one_has_alone() -> None:
    spec = toy_spec({"model": {"path": "/pi0"}, "replay": {"online_capacity": 100_000}})
    waiting = {
        replicas: Limiter.of(spec, replicas=replicas).admissible_inserts(LiveCounts(10_000, 20_256, 0))
        for replicas in (1, 2, 8, 16)
    }
    assert waiting == {replicas: replicas * waiting[1] for replicas in waiting}
    group = spec.rollout.samples_per_prompt
    share = {replicas: Limiter.of(spec, replicas=replicas).groups_per_replica(replicas) for replicas in waiting}
    assert set(share.values()) == {waiting[1] // group}


@given(spec=SPECS, inserted=st.integers(0, 10_000), sampled=st.integers(0, 10_000))
def test_what_is_admissible_keeps_both_inequalities(spec: Any, inserted: int, sampled: int) -> None:
    limiter = Limiter.of(spec)
    online = LiveCounts(inserted, sampled, available=10_000)
    admissible = limiter.admissible_inserts(online)
    ahead = (inserted + admissible) * limiter.samples_per_insert - sampled

    missing = limiter.min_online - inserted
    assert ahead <= limiter.error_buffer + 1e-6 or admissible <= max(0, missing + limiter.group - 1)
    if limiter.may_sample(online, limiter.per_batch):
        assert inserted >= limiter.min_online
        assert inserted * limiter.samples_per_insert - sampled - limiter.per_batch >= -limiter.error_buffer


def test_online_experience_that_is_too_stale_is_replaced_whatever_the_ratio_says() -> None:
    spec = toy_spec({"model": {"path": "/pi0"}, "replay": {"samples_per_insert": 8}})
    limiter = Limiter.of(spec)
    full = LiveCounts(inserted=200, sampled=0, available=200)
    stale = LiveCounts(inserted=200, sampled=0, available=0)

    assert limiter.admissible_inserts(full) == 0
    assert limiter.admissible_inserts(stale) == limiter.per_batch == 32
    assert limiter.may_sample(full, 32)
    assert not limiter.may_sample(stale, 32)


def test_a_run_without_online_share_asks_for_no_online_trajectories() -> None:
    spec = toy_spec({"model": {"path": "/pi0"}, "replay": {"mix": [{"source": "human", "share": 1}]}})

    assert Limiter.of(spec).admissible_inserts(LiveCounts(0, 0, 0)) == 0
