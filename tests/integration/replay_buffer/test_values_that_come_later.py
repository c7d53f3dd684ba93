"""Values that come, and are refined, while batches are sampled: each batch has what is known when it is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from services.replay_buffer import sampling_index
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.spec.section import JobState
from spo.testing.runs import PROMPTS, RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.value_pb2 import PromptValue

BATCH = 16


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read at every draw, however long the reading took."""
    monkeypatch.setattr(sampling_index, "PAUSE_PER_SECOND", 0.0)


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    return started(redis_client)


def started(client: redis.Redis, **sections: Any) -> ReplayStore:
    """A run that trains; none of its prompts has a value yet."""
    mix = [{"source": "online", "share": 1}]
    start_run(client, **{"trainer": {"batch_size": BATCH}, "replay": {"mix": mix, "min_online": 8}, **sections})
    client.delete(redis_keys.run_values(RUN))
    store = ReplayStore(client)
    store.append(RUN, [trajectory(number, right=number % 2 == 0) for number in range(64)])
    return store


def give(store: ReplayStore, prompt: int, samples: int, successes: int, *, provisional: bool = False) -> None:
    """Plays value-estimation."""
    prompt_id = PROMPTS[prompt]
    value = PromptValue(prompt_id=prompt_id, samples=samples, successes=successes, provisional=provisional)
    value.prior_successes = value.prior_failures = 0.5
    if provisional:
        store.client.hset(redis_keys.provisional_values(RUN), prompt_id, value.SerializeToString())
        return
    store.client.hset(redis_keys.run_values(RUN), prompt_id, value.SerializeToString())
    store.client.hdel(redis_keys.provisional_values(RUN), prompt_id)


def drawn(sampler: BatchSampler, step: int) -> dict[str, tuple[float, float]]:
    """Prompt -> Qhat_0 and its standard error, of one batch."""
    batch = sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step))
    return {sampled.trajectory.prompt_id: (sampled.qhat_0, sampled.error) for sampled in batch}


def test_prompts_are_served_once_they_have_a_value(store: ReplayStore) -> None:
    sampler = BatchSampler(store)
    with pytest.raises(NotReady):
        drawn(sampler, 1)
    give(store, 1, 8, 2, provisional=True)

    assert set(drawn(sampler, 1)) == {PROMPTS[1]}
    give(store, 2, 8, 2)
    assert set(drawn(sampler, 2)) == {PROMPTS[1], PROMPTS[2]}


def test_a_trajectory_has_the_value_that_is_known_when_it_is_sampled(store: ReplayStore) -> None:
    sampler = BatchSampler(store)
    give(store, 1, 8, 2, provisional=True)
    first, error = drawn(sampler, 1)[PROMPTS[1]]
    give(store, 1, 16, 8, provisional=True)
    second, finer = drawn(sampler, 2)[PROMPTS[1]]
    give(store, 1, 64, 32)
    final, finest = drawn(sampler, 3)[PROMPTS[1]]

    assert first < second < 0
    assert second == pytest.approx(final, abs=0.05)
    assert error > finer > finest > 0
    assert drawn(sampler, 1)[PROMPTS[1]][0] == final, "the same trajectories again, with what is known by now"


def test_another_replica_serves_a_recorded_batch_whose_values_it_has_not_read(store: ReplayStore) -> None:
    give(store, 1, 8, 2)
    first, other = BatchSampler(store), BatchSampler(ReplayStore(store.client))
    drawn(other, 1)
    give(store, 2, 8, 2)
    other.index(RUN)._read_values_at = float("inf")
    served = drawn(first, 7)

    assert drawn(other, 7) == served


def test_no_success_so_far_is_no_floor_until_the_value_is_final(redis_client: redis.Redis) -> None:
    store = started(redis_client, value={"unsolved": "floor"})
    sampler = BatchSampler(store)
    give(store, 1, 8, 0, provisional=True)
    assert drawn(sampler, 1)[PROMPTS[1]][0] > -0.95
    give(store, 1, 64, 0)
    assert drawn(sampler, 2)[PROMPTS[1]][0] == -1


def test_an_offline_source_may_still_fill_while_estimates_are_pending(redis_client: redis.Redis) -> None:
    mix = [{"source": "online", "share": 0.5}, {"source": "reference", "share": 0.5, "correct_only": True}]
    store = started(redis_client, replay={"mix": mix, "min_online": 8})
    give(store, 1, 8, 2)
    redis_client.set(redis_keys.run_state(RUN), JobState.RUNNING)
    redis_client.hset(redis_keys.job_record(RUN), "estimates_pending", 1)
    with pytest.raises(NotReady):
        drawn(BatchSampler(store), 1)
    store.append(RUN, [trajectory(number, SOURCE_REFERENCE, right=False) for number in range(8)])
    redis_client.hdel(redis_keys.job_record(RUN), "estimates_pending")

    with pytest.raises(PreconditionFailed, match="nothing more will come"):
        drawn(BatchSampler(store), 1)


def test_objectives_that_read_no_value_are_served_before_there_is_one(redis_client: redis.Redis) -> None:
    store = started(
        redis_client,
        algorithm={"losses": [{"objective": "group_centred_squared"}]},
        replay={"mix": [{"source": "online", "share": 1}], "min_online": 8, "unit": "group"},
        rollout={"samples_per_prompt": 2},
    )
    store.append(RUN, [trajectory(number, group_size=2) for number in range(100, 164)])

    assert set(drawn(BatchSampler(store), 1).values()) == {(0.0, 0.0)}


def test_what_is_merely_imitated_is_served_before_its_prompt_has_a_value(redis_client: redis.Redis) -> None:
    store = started(
        redis_client,
        algorithm={
            "losses": [
                {"objective": "terminal_squared", "sources": ["online"]},
                {"objective": "supervised", "sources": ["human"]},
            ]
        },
        replay={"mix": [{"source": "online", "share": 0.5}, {"source": "human", "share": 0.5}], "min_online": 8},
    )
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(64)])
    sampler = BatchSampler(store)
    with pytest.raises(NotReady, match="online"):
        drawn(sampler, 1)
    give(store, 1, 8, 2)

    batch = sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=1))

    prompts = {
        source: {sampled.trajectory.prompt_id for sampled in batch if sampled.trajectory.source == source}
        for source in (SOURCE_ONLINE, SOURCE_HUMAN)
    }
    assert prompts[SOURCE_ONLINE] == {PROMPTS[1]}
    assert prompts[SOURCE_HUMAN] > {PROMPTS[1]}
    assert all((sampled.qhat_0 < 0) == (sampled.trajectory.prompt_id == PROMPTS[1]) for sampled in batch)
