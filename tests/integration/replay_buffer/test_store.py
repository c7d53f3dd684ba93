"""The replay buffer's promises, on a real server."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import Conflict, InvalidInput, NotFound, NotReady, PreconditionFailed
from spo.rpc.client import MAX_MESSAGE_BYTES
from spo.testing.runs import PROMPTS, RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, SOURCE_HUMAN, SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.replay_service_pb2 import (
    GetReplayStatusRequest,
    ListTrajectoriesRequest,
    SampleBatchRequest,
    SourceShare,
)
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_INTERNAL_ERROR, Verdict

BETA = 0.217
REPLAY = {"min_online": 8, "max_staleness": 2, "offline_per_prompt": 3}


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    start_run(redis_client, algorithm={"beta": BETA}, trainer={"batch_size": 16}, replay=REPLAY)
    return ReplayStore(redis_client)


@pytest.fixture
def sampler(store: ReplayStore) -> BatchSampler:
    return BatchSampler(store)


def counter(store: ReplayStore, name: str) -> int:
    stored: Any = store.client.hget(redis_keys.replay_counters(RUN), name)
    return int(stored or 0)


def fill(store: ReplayStore, online: int = 100) -> None:
    store.append(RUN, [trajectory(index, right=index % 2 == 0, version=index // 100) for index in range(online)])
    store.append(RUN, [trajectory(number, SOURCE_REFERENCE, right=number % 3 == 0) for number in range(30)])
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])


def batch_of(sampler: BatchSampler, step: int, **fields: int) -> list[Trajectory]:
    request = SampleBatchRequest(run_id=RUN, batch_size=16, step=step, **fields)  # type: ignore[arg-type]
    return [sampled.trajectory for sampled in sampler.sample(request)]


def test_a_trajectory_delivered_twice_and_out_of_order_is_present_once(store: ReplayStore) -> None:
    deliveries = [trajectory(number % 20) for number in range(60)]
    random.Random(1).shuffle(deliveries)

    results = [store.append(RUN, deliveries[start : start + 7]) for start in range(0, 60, 7)]

    assert sum(inserted for inserted, _ in results) == 20
    assert sum(duplicates for _, duplicates in results) == 40
    assert store.client.zcard(redis_keys.replay_ids(RUN)) == 20
    assert counter(store, "inserted:online") == 20


def test_offline_programs_that_differ_only_in_spelling_are_kept_once_and_counted(store: ReplayStore) -> None:
    spelled = [trajectory(0, SOURCE_HUMAN, text="print( 1+1 ) # two"), trajectory(4, SOURCE_HUMAN, text="print(1 + 1)")]

    assert store.append(RUN, spelled) == (1, 1)
    assert store.append(RUN, spelled) == (0, 2), "delivered again"
    assert store.duplicates(RUN) == 1
    assert store.get(RUN, [spelled[1].trajectory_id]) == [None]
    assert store.one(RUN, spelled[1].trajectory_id).trajectory_id == spelled[0].trajectory_id


def test_equal_online_samples_are_two_draws_of_the_policy(store: ReplayStore) -> None:
    assert store.append(RUN, [trajectory(0, text="print(1)"), trajectory(4, text="print(1)")]) == (2, 0)


def test_fenced_programs_are_compared_without_the_words_around_them(store: ReplayStore) -> None:
    texts = ["Let me think.\n```python\nprint(1)\n```", "Simple:\n```python\nprint( 1 )  # one\n```", "no program \\d"]
    sent = [trajectory(4 * index, SOURCE_REFERENCE, text=text) for index, text in enumerate(texts)]

    assert store.append(RUN, sent) == (2, 1)


def test_a_right_and_a_wrong_verdict_on_one_program_are_both_kept(store: ReplayStore) -> None:
    flaky = [trajectory(4 * index, SOURCE_REFERENCE, text="print(1)", right=index == 1) for index in range(2)]

    assert store.append(RUN, flaky) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"reference_logprobs": [math.nan, 0.0, 0.0]}, "/reference_logprobs"),
        ({"reference_logprobs": [-1.0]}, "/reference_logprobs"),
        ({"sampling_logprobs": [-1.0]}, "/sampling_logprobs"),
        ({"reward": math.inf}, "/reward"),
        ({"reward": 0.5}, "/reward"),
        ({"run_id": "job_OTHER"}, "/run_id"),
        ({"source": 0}, "/source"),
        ({"sampling_logprobs": []}, "/sampling_logprobs"),
        ({"prompt_id": "a:b"}, "/prompt_id"),
        ({"response_token_ids": [1] * 45}, "/response_token_ids"),
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


def test_a_batch_has_the_exact_shares_and_only_right_reference_samples(
    store: ReplayStore, sampler: BatchSampler
) -> None:
    fill(store)

    batch = batch_of(sampler, 0)

    assert Counter(sample.source for sample in batch) == {SOURCE_ONLINE: 8, SOURCE_REFERENCE: 4, SOURCE_HUMAN: 4}
    assert all(sample.reward == 0 for sample in batch if sample.source == SOURCE_REFERENCE)
    assert len({sample.trajectory_id for sample in batch}) == 16


def test_a_repeated_request_gets_the_same_batch_and_is_counted_once(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    first = [sample.trajectory_id for sample in batch_of(sampler, 3)]
    store.append(RUN, [trajectory(number) for number in range(200, 240)])

    again = [sample.trajectory_id for sample in batch_of(sampler, 3)]

    assert again == first
    assert counter(store, "sampled:online") == 8
    assert [sample.trajectory_id for sample in batch_of(sampler, 4)] != first


def test_stale_online_trajectories_are_not_served(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store, online=400)  # versions 0 to 3
    store.append(RUN, [trajectory(number, version=2) for number in range(400, 440)])  # late, from older weights

    batch = batch_of(sampler, 0, policy_version=5)

    assert {sample.policy_version_first for sample in batch if sample.source == SOURCE_ONLINE} == {3}


def test_a_buffer_whose_online_experience_went_stale_asks_for_new(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store, online=140)  # as many as the ratio admits
    status = lambda: ReplayService(sampler).GetReplayStatus(GetReplayStatusRequest(run_id=RUN), None)  # noqa: E731
    assert status().admissible_inserts == 0

    with pytest.raises(NotReady, match="source online: 140 inserted, 70 correct"):
        batch_of(sampler, 0, policy_version=9)

    assert status().admissible_inserts == 8


def test_a_source_that_stays_empty_ends_the_wait_for_it(store: ReplayStore, sampler: BatchSampler) -> None:
    store.append(RUN, [trajectory(number) for number in range(100)])
    store.append(RUN, [trajectory(number, SOURCE_REFERENCE, right=False) for number in range(8)])
    store.client.set(redis_keys.run_state(RUN), "running")

    with pytest.raises(
        PreconditionFailed, match=r"source reference: 8 inserted, 0 correct, .* nothing more will come"
    ) as caught:
        batch_of(sampler, 0)
    assert "take reference out of replay.mix, or raise value.samples" in caught.value.message


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([(SOURCE_ONLINE, 0.5)], "sum to 1"),
        ([(SOURCE_ONLINE, 1.5), (SOURCE_HUMAN, -0.5)], "sum to 1"),
        ([(SOURCE_ONLINE, 0.5), (SOURCE_ONLINE, 0.5)], "each source once"),
        ([(0, 1.0)], "known sources"),
        ([(77, 1.0)], "known sources"),
    ],
)
def test_an_impossible_mix_is_refused(sampler: BatchSampler, mix: list[tuple[Any, float]], message: str) -> None:
    shares = [SourceShare(source=source, share=share) for source, share in mix]

    with pytest.raises(InvalidInput, match=message):
        sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=16, mix=shares))


def test_a_batch_may_ask_for_another_mix_than_the_specs(store: ReplayStore, sampler: BatchSampler) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])
    store.append(RUN, [trajectory(number, SOURCE_ANNOTATED) for number in range(8)])
    shares = [SourceShare(source=SOURCE_HUMAN, share=0.75), SourceShare(source=SOURCE_ANNOTATED, share=0.25)]

    batch = sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=8, mix=shares))

    assert Counter(sample.trajectory.source for sample in batch) == {SOURCE_HUMAN: 6, SOURCE_ANNOTATED: 2}


def test_another_batch_size_for_a_step_already_served_is_a_conflict(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    batch_of(sampler, 0)

    with pytest.raises(Conflict, match="step 0 was given 16"):
        sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=32, step=0))


@pytest.mark.parametrize(("unsolved", "qhat_0"), [("keep", -0.929), ("floor", -1.0), ("drop", None)])
def test_prompts_nothing_solved_follow_the_specs_policy(
    redis_client: redis.Redis, unsolved: str, qhat_0: float | None
) -> None:
    value = {"unsolved": unsolved}
    start_run(redis_client, algorithm={"beta": BETA}, trainer={"batch_size": 16}, replay=REPLAY, value=value)
    store = ReplayStore(redis_client)
    fill(store)

    batch = BatchSampler(store).sample(SampleBatchRequest(run_id=RUN, batch_size=16, step=1))

    served = sorted({sample.qhat_0 for sample in batch if sample.trajectory.prompt_id == PROMPTS[0]})
    assert served == pytest.approx([] if qhat_0 is None else [qhat_0], abs=1e-3)


def test_a_prompt_whose_estimate_was_given_up_is_not_served(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    store.client.hdel(redis_keys.run_values(RUN), PROMPTS[3])

    assert {sample.prompt_id for step in range(4) for sample in batch_of(sampler, step)} == set(PROMPTS[:3])


def test_a_restarted_buffer_serves_a_repeated_step_with_its_values(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    request = SampleBatchRequest(run_id=RUN, batch_size=16, step=0)

    assert BatchSampler(ReplayStore(store.client)).sample(request) == sampler.sample(request)
    assert BatchSampler(ReplayStore(store.client)).sample(request) == sampler.sample(request)


def test_a_buffer_that_lost_its_redis_does_not_serve_from_memory(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    batch_of(sampler, 0)
    store.client.flushall()
    start_run(store.client, trainer={"batch_size": 16}, replay=REPLAY)

    with pytest.raises(NotReady, match="source online: 0 inserted"):
        batch_of(sampler, 0)


def test_waiting_for_experience_ends_with_the_source_and_its_counts(store: ReplayStore, sampler: BatchSampler) -> None:
    store.append(RUN, [trajectory(number) for number in range(3)])

    with pytest.raises(NotReady, match="3 inserted"):
        batch_of(sampler, 0)
    store.append(RUN, [trajectory(number) for number in range(3, 100)])
    with pytest.raises(NotReady, match="source reference: 0 inserted, 0 correct"):
        batch_of(sampler, 0)


def test_qhat_0_is_derived_with_the_beta_of_the_spec(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)

    sampled = sampler.sample(SampleBatchRequest(run_id=RUN, batch_size=16, step=0))

    for sample in sampled:
        rate = int(sample.trajectory.prompt_id[-1]) / 10
        solved = BETA * math.log(rate + (1 - rate) * math.exp(-1 / BETA))
        # Nothing solved: the mean of Q under the posterior of its rate, Beta(1/2, 100 1/2), integrated by hand.
        assert sample.qhat_0 == pytest.approx(solved if rate else -0.929, abs=1e-3 if not rate else 1e-9)


def test_at_most_the_allowed_number_of_offline_trajectories_per_prompt_is_served(
    store: ReplayStore, sampler: BatchSampler
) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(40)])
    index = sampler.index(RUN)
    index.refresh(["human"])

    assert Counter(sample.prompt_id for sample in index.servable(index.rule("human"))) == dict.fromkeys(PROMPTS, 3)
    assert store.client.zcard(redis_keys.replay_ids(RUN)) == 40, "the ledger keeps all of them"


def test_the_ledger_is_listed_newest_first_page_by_page(store: ReplayStore) -> None:
    store.append(RUN, [trajectory(number) for number in range(5)])

    first, cursor = store.newest_first(RUN, "", "", 3)
    second, end = store.newest_first(RUN, "", cursor, 3)

    assert [sample.trajectory_id[-1] for sample in first + second] == ["4", "3", "2", "1", "0"]
    assert end == ""


@pytest.mark.parametrize("characters", [1 << 20, 9 << 20, 17 << 20, 30 << 20])
def test_a_page_of_long_trajectories_is_one_message_and_nothing_is_passed_over(
    store: ReplayStore, sampler: BatchSampler, characters: int
) -> None:
    service, request = ReplayService(sampler), ListTrajectoriesRequest(run_id=RUN, limit=50)
    rows = [trajectory(number) for number in range(5)]
    for row in rows:
        row.response_text = "x" * characters
    store.append(RUN, rows)
    found: list[str] = []
    while True:
        page = service.ListTrajectories(request, None)
        assert page.ByteSize() < MAX_MESSAGE_BYTES
        found += [each.trajectory_id[-1] for each in page.trajectories]
        if not page.next_cursor:
            break
        request.cursor = page.next_cursor
    assert found == ["4", "3", "2", "1", "0"]


def test_trajectories_are_listed_by_prompt_and_source(store: ReplayStore, sampler: BatchSampler) -> None:
    fill(store)
    service = ReplayService(sampler)
    request = ListTrajectoriesRequest(run_id=RUN, prompt_id=PROMPTS[1], source=SOURCE_ONLINE, limit=10)
    numbers: list[int] = []
    while True:
        page = service.ListTrajectories(request, None)
        numbers += [int(sample.trajectory_id.rsplit("_", 1)[1]) for sample in page.trajectories]
        if not page.next_cursor:
            break
        request.cursor = page.next_cursor

    assert numbers == list(range(97, 0, -4))
    request.cursor = "1; drop"
    with pytest.raises(InvalidInput, match="cursor"):
        service.ListTrajectories(request, None)
