"""The replay buffer's promises, on a real server."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import redis

from services.replay_buffer.batches import BatchDrawer
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.values import PromptValues
from spo import redis_keys
from spo.errors import InvalidInput, NotFound, NotReady
from spo.job_spec import parse_job_spec, spec_to_json
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_ONLINE, SOURCE_REFERENCE, Source
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, OUTCOME_WRONG_ANSWER, Verdict

RUN = "job_TEST"
BETA = 0.217


def trajectory(number: int, source: Source = SOURCE_ONLINE, *, right: bool = True, text: str = "") -> Trajectory:
    return Trajectory(
        trajectory_id=f"traj_{Source.Name(source)}_{number}",
        run_id=RUN,
        prompt_id=f"prompt-{number % 4}",
        source=source,
        prompt_token_ids=[1, 2],
        response_token_ids=[3, 4, 5],
        sampling_logprobs=[-0.1, -0.2, -0.3],
        reference_logprobs=[-0.1, -0.2, -0.4],
        response_text=text or f"print({number})",
        verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER),
        reward=0.0 if right else -1.0,
        policy_version_first=number // 100,
        policy_version_last=number // 100,
    )


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    spec = parse_job_spec(
        {
            "model": {"path": "/pi0"},
            "algorithm": {"beta": BETA},
            "trainer": {"batch_size": 16},
            "replay": {"min_online": 8, "max_staleness": 2, "offline_per_prompt": 3},
        }
    )
    redis_client.set(redis_keys.run_spec(RUN), spec_to_json(spec))
    for prompt in range(4):
        value = PromptValue(prompt_id=f"prompt-{prompt}", samples=100, successes=10 * prompt)
        redis_client.hset(redis_keys.run_values(RUN), value.prompt_id, value.SerializeToString())
    return ReplayStore(redis_client)


@pytest.fixture
def drawer(store: ReplayStore) -> BatchDrawer:
    return BatchDrawer(store, PromptValues(store.client))


def fill(store: ReplayStore, online: int = 100) -> None:
    store.append(RUN, [trajectory(number, right=number % 2 == 0) for number in range(online)])
    store.append(RUN, [trajectory(number, SOURCE_REFERENCE, right=number % 3 == 0) for number in range(30)])
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])


def batch_of(drawer: BatchDrawer, step: int, **fields: int) -> list[Trajectory]:
    request = SampleBatchRequest(run_id=RUN, batch_size=16, step=step, **fields)  # type: ignore[arg-type]
    return [sampled.trajectory for sampled in drawer.sample(request)]


def test_a_trajectory_delivered_twice_and_out_of_order_is_present_once(store: ReplayStore) -> None:
    deliveries = [trajectory(number % 20) for number in range(60)]
    random.Random(1).shuffle(deliveries)

    results = [store.append(RUN, deliveries[start : start + 7]) for start in range(0, 60, 7)]

    assert sum(inserted for inserted, _ in results) == 20
    assert sum(duplicates for _, duplicates in results) == 40
    assert store.client.zcard(redis_keys.replay_ids(RUN)) == 20
    assert store.counts(RUN).inserted["online"] == 20


def test_offline_programs_that_differ_only_in_spelling_are_kept_once_and_counted(store: ReplayStore) -> None:
    spelled = [trajectory(0, SOURCE_HUMAN, text="print( 1+1 ) # two"), trajectory(4, SOURCE_HUMAN, text="print(1 + 1)")]

    assert store.append(RUN, spelled) == (1, 1)
    assert store.counts(RUN).duplicates == 1
    assert store.get(RUN, [spelled[1].trajectory_id]) == [None]


def test_equal_online_samples_are_two_draws_of_the_policy(store: ReplayStore) -> None:
    assert store.append(RUN, [trajectory(0, text="print(1)"), trajectory(4, text="print(1)")]) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"reference_logprobs": [math.nan, 0.0, 0.0]}, "/reference_logprobs"),
        ({"reference_logprobs": [-1.0]}, "/reference_logprobs"),
        ({"sampling_logprobs": [-1.0]}, "/sampling_logprobs"),
        ({"reward": math.inf}, "/reward"),
        ({"verdict": Verdict(outcome=OUTCOME_INTERNAL_ERROR)}, "/verdict"),
        ({"response_token_ids": []}, "/response_token_ids"),
    ],
)
def test_an_unusable_trajectory_is_refused_by_field(
    store: ReplayStore, fields: dict[str, object], pointer: str
) -> None:
    broken = trajectory(1)
    for name in fields:
        broken.ClearField(name)  # type: ignore[arg-type]
    broken.MergeFrom(Trajectory(**fields))  # type: ignore[arg-type]

    with pytest.raises(InvalidInput) as caught:
        store.append(RUN, [trajectory(0), broken])

    assert pointer in [violation.pointer for violation in caught.value.violations]
    assert store.client.zcard(redis_keys.replay_ids(RUN)) == 0, "all or none"


def test_a_run_nobody_started_is_not_found(store: ReplayStore) -> None:
    with pytest.raises(NotFound, match="job_OTHER"):
        store.append("job_OTHER", [trajectory(1)])


def test_a_batch_has_the_exact_shares_and_only_right_reference_samples(store: ReplayStore, drawer: BatchDrawer) -> None:
    fill(store)

    batch = batch_of(drawer, 0)

    assert Counter(each.source for each in batch) == {SOURCE_ONLINE: 8, SOURCE_REFERENCE: 4, SOURCE_HUMAN: 4}
    assert all(each.reward == 0 for each in batch if each.source == SOURCE_REFERENCE)
    assert len({each.trajectory_id for each in batch}) == 16


def test_a_repeated_request_gets_the_same_batch_and_is_counted_once(store: ReplayStore, drawer: BatchDrawer) -> None:
    fill(store)
    first = [each.trajectory_id for each in batch_of(drawer, 3)]
    store.append(RUN, [trajectory(number) for number in range(200, 240)])

    again = [each.trajectory_id for each in batch_of(drawer, 3)]

    assert again == first
    assert store.counts(RUN).sampled["online"] == 8
    assert [each.trajectory_id for each in batch_of(drawer, 4)] != first


def test_stale_online_trajectories_are_not_served(store: ReplayStore, drawer: BatchDrawer) -> None:
    fill(store, online=400)  # versions 0 to 3

    batch = batch_of(drawer, 0, policy_version=5)

    assert {each.policy_version_first for each in batch if each.source == SOURCE_ONLINE} == {3}


def test_waiting_for_experience_ends_with_the_source_and_its_counts(store: ReplayStore, drawer: BatchDrawer) -> None:
    store.append(RUN, [trajectory(number) for number in range(3)])

    with pytest.raises(NotReady, match="3 inserted"):
        batch_of(drawer, 0)
    store.append(RUN, [trajectory(number) for number in range(3, 100)])
    with pytest.raises(NotReady, match="source reference has nothing to serve"):
        batch_of(drawer, 0)


def test_qhat_0_is_derived_with_the_beta_of_the_spec(store: ReplayStore, drawer: BatchDrawer) -> None:
    fill(store)

    sampled = drawer.sample(SampleBatchRequest(run_id=RUN, batch_size=16, step=0))

    for each in sampled:
        rate = int(each.trajectory.prompt_id[-1]) / 10 or 0.5 / 101
        assert each.qhat_0 == pytest.approx(BETA * math.log(rate + (1 - rate) * math.exp(-1 / BETA)))


def test_at_most_the_allowed_number_of_offline_trajectories_per_prompt_is_served(store: ReplayStore) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(40)])

    assert store.client.zcard(redis_keys.replay_source(RUN, "human")) == 4 * 3
    assert store.client.zcard(redis_keys.replay_ids(RUN)) == 40, "the ledger keeps all of them"


def test_the_ledger_is_listed_newest_first_page_by_page(store: ReplayStore) -> None:
    store.append(RUN, [trajectory(number) for number in range(5)])

    first, cursor = store.newest_first(RUN, "", 3)
    second, end = store.newest_first(RUN, cursor, 3)

    assert [each.trajectory_id[-1] for each in first + second] == ["4", "3", "2", "1", "0"]
    assert end == ""


def test_the_limiter_never_blocks_inserting_and_sampling_at_once() -> None:
    chance = random.Random(7)
    for _ in range(300):
        spec = parse_job_spec(
            {
                "model": {"path": "/pi0"},
                "trainer": {"batch_size": chance.randint(1, 300)},
                "rollout": {"samples_per_prompt": chance.randint(1, 64)},
                "replay": {
                    "samples_per_insert": chance.choice([0.1, 0.5, 1.0, 2.5, 8.0]),
                    "error_buffer": chance.randint(1, 400),
                    "min_online": chance.randint(0, 500),
                },
            }
        )
        limiter, group, inserted, sampled = Limiter.of(spec), spec.rollout.samples_per_prompt, 0, 0
        wanted = math.ceil(spec.trainer.batch_size * 0.5)
        for _ in range(200):
            can_insert = limiter.admissible_inserts(inserted, sampled) >= group
            can_sample = limiter.may_sample(inserted, sampled, wanted)
            assert can_insert or can_sample, (spec, inserted, sampled)
            if can_insert and (not can_sample or chance.random() < 0.5):
                inserted += group
            else:
                sampled += wanted
