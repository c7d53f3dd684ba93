"""The dispatcher: as much as the limiter admits, every prompt in its turn, across restarts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from services.orchestrator.job_records import CANCEL
from services.orchestrator.pipeline import groups_in_pipeline
from services.orchestrator.steps import act_on
from spo import redis_keys
from spo.messaging.streams.stage import Consumer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.replay_service_pb2 import SourceCount
from spo.v1.value_pb2 import PromptValue

PROMPTS = 6
SAMPLES = 4


def running(context: AppContext, document: dict[str, Any], successes: Callable[[int], int] = lambda index: 1) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for index, problem in enumerate(context.library.load(context.jobs.spec(job_id).tasks).train):
        value = PromptValue(prompt_id=problem.problem_id, samples=8, successes=successes(index))
        context.redis.hset(redis_keys.run_values(job_id), problem.problem_id, value.SerializeToString())
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def groups(context: AppContext, job_id: str) -> list[PromptGroup]:
    found: Any = context.redis.xrange(redis_keys.prompts(job_id))
    return [PromptGroup.FromString(fields[b"payload"]) for _, fields in found]


def drain(context: AppContext, job_id: str) -> None:
    """Plays the whole pipeline: every group arrives in the replay buffer."""
    reader = Consumer(context.redis, redis_keys.prompts(job_id), redis_keys.INFERENCE_GROUP, "r")
    reader.finish(reader.read(1000, 0.01))


def sample(context: AppContext, job_id: str, count: int) -> None:
    """Plays the inference replicas."""
    prompts = Consumer(context.redis, redis_keys.prompts(job_id), redis_keys.INFERENCE_GROUP, "i")
    for entry in prompts.read(count, 0.01):
        assert prompts.forward(entry, redis_keys.rollouts(), b"sampled", run_id=job_id)


def judge(context: AppContext, count: int) -> None:
    rollouts = Consumer(context.redis, redis_keys.rollouts(), redis_keys.JUDGE_GROUP, "j")
    for entry in rollouts.read(count, 0.01):
        assert rollouts.forward(entry, redis_keys.verdicts(), b"judged")


def test_only_what_the_limiter_admits_is_on_the_pipeline(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    peers.replay.admissible = 5 * SAMPLES + 3

    assert [context.dispatcher.dispatch(job_id) for _ in range(3)] == [5, 0, 0]
    assert len(groups(context, job_id)) == 5


def test_work_further_down_the_pipeline_counts_too(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    peers.replay.admissible = 3 * SAMPLES
    assert context.dispatcher.dispatch(job_id) == 3
    sample(context, job_id, 3)
    judge(context, 2)
    peers.replay.admissible = 5 * SAMPLES

    assert context.dispatcher.dispatch(job_id) == 2


def test_a_job_is_fed_whatever_another_one_has_in_the_pipeline(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    other, job_id = running(context, document), running(context, document)
    peers.replay.admissible = 40 * SAMPLES
    context.dispatcher.dispatch(other)
    sample(context, other, 40)
    judge(context, 20)
    peers.replay.admissible = 5 * SAMPLES

    assert context.dispatcher.dispatch(job_id) == 5
    assert context.dispatcher.dispatch(other) == 0


def test_groups_that_reached_the_buffer_or_were_given_up_on_make_room(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    peers.replay.admissible = 6 * SAMPLES
    context.dispatcher.dispatch(job_id)
    sample(context, job_id, 6)
    judge(context, 4)
    rollouts = Consumer(context.redis, redis_keys.rollouts(), redis_keys.JUDGE_GROUP, "j")
    verdicts = Consumer(context.redis, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "i")
    rollouts.dead_letter(rollouts.read(1, 0.01)[0], "poison")
    verdicts.finish(verdicts.read(3, 0.01))

    assert groups_in_pipeline(context.redis, job_id) == 2
    assert context.dispatcher.dispatch(job_id) == 4


def test_a_job_is_told_to_wait_for_its_own_groups_alone(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    other, job_id = running(context, document), running(context, document)
    peers.replay.admissible = 3 * SAMPLES
    context.dispatcher.dispatch(other)
    sample(context, other, 3)

    def said(job_id: str) -> str:
        return " ".join(job_document(context, job_id).waits)

    assert "3 groups wait at sandbox-judge" in said(other)
    assert "wait at sandbox-judge" not in said(job_id)


def test_a_group_carries_the_sampling_of_the_spec(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    peers.replay.admissible = SAMPLES
    context.dispatcher.dispatch(job_id)

    (group,) = groups(context, job_id)
    assert (group.group_id, group.source, group.sampling.samples) == (f"{job_id}-0", SOURCE_ONLINE, SAMPLES)
    assert (group.sampling.temperature_min, group.sampling.temperature_max) == (
        pytest.approx(0.1),
        pytest.approx(0.8),
    )
    assert not group.HasField("policy_version")


def test_every_epoch_holds_each_prompt_once_in_another_order(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    peers.replay.admissible = 2 * PROMPTS * SAMPLES
    context.dispatcher.dispatch(job_id)

    order = [group.prompt.prompt_id for group in groups(context, job_id)]
    first, second = order[:PROMPTS], order[PROMPTS:]
    assert len(set(first)) == PROMPTS
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_share_of_the_prompts_goes_to_those_that_were_never_solved_and_the_rest_take_their_turns(
    open_context: Callable[..., AppContext], peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["rollout"]["unsolved_share"] = 0.5
    context = open_context()
    job_id = running(context, document)
    in_turn = [problem.problem_id for problem in context.library.load(context.jobs.spec(job_id).tasks).train]
    unsolved = sorted(in_turn)[:2]
    context.redis.sadd(redis_keys.replay_unsolved(job_id), *unsolved, "not a training prompt")
    context.redis.hincrby(redis_keys.replay_counters(job_id), "unsolved", 3)
    fed: list[PromptGroup] = []
    for _ in range(24):
        # Each time another process, one group at a time: which prompts are chosen is decided by seed and place alone.
        context = open_context()
        peers.replay.admissible = 1 * SAMPLES
        assert context.dispatcher.dispatch(job_id) == 1
        fed += groups(context, job_id)
        drain(context, job_id)

    counts = Counter(group.prompt.prompt_id for group in fed)
    assert sum(counts[prompt_id] for prompt_id in unsolved) > 24 / 2 > sum(counts.values()) / PROMPTS * len(unsolved)
    # The others had the same number of turns, give or take the epoch under way.
    others = [counts[prompt_id] for prompt_id in in_turn if prompt_id not in unsolved]
    assert max(others) - min(others) <= 1

    outcomes = dict(zip(in_turn, ("4:0:4", "8:1:7", "8:2:0", "0:1:0"), strict=False))
    context.redis.hset(redis_keys.replay_outcomes(job_id), mapping=outcomes)
    solved = job_document(context, job_id).progress.solved
    assert solved is not None
    assert (solved.tried, solved.never, solved.once, solved.lately) == (3, 1, 1, 1)

    context.redis.srem(redis_keys.replay_unsolved(job_id), *unsolved)
    context.redis.hincrby(redis_keys.replay_counters(job_id), "unsolved", 2)
    peers.replay.admissible = PROMPTS * SAMPLES
    assert context.dispatcher.dispatch(job_id) == PROMPTS


def test_what_earlier_jobs_have_solved_costs_no_rollout_while_something_is_unsolved(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["rollout"]["unsolved_share"] = 1.0
    document["offline"] = {**document.get("offline", {}), "human_solutions": True}
    mix = [{"source": source, "share": share} for source, share in (("online", 0.5), ("memory", 0.25), ("human", 0.25))]
    document["replay"] = {**document.get("replay", {}), "mix": mix, "memory": {"also": ["human"]}}
    job_id = running(context, document)
    in_turn = [problem.problem_id for problem in context.library.load(context.jobs.spec(job_id).tasks).train]
    unknown = in_turn[:2]
    outcomes = redis_keys.replay_outcomes(job_id)
    context.redis.hset(outcomes, mapping=dict.fromkeys(in_turn[2:], "0:1:0"))

    def fed() -> set[str]:
        peers.replay.admissible = 2 * SAMPLES
        assert context.dispatcher.dispatch(job_id) == 2
        found = {group.prompt.prompt_id for group in groups(context, job_id)}
        drain(context, job_id)
        return found

    assert fed() == set(unknown)
    # One is solved at its first group, the other was tried in vain.
    context.redis.hset(outcomes, mapping={unknown[0]: "4:1:0", unknown[1]: "4:0:4"})
    context.redis.sadd(redis_keys.replay_unsolved(job_id), unknown[1])
    assert unknown[1] in fed()
    context.redis.hset(outcomes, unknown[1], "8:1:0")
    context.redis.srem(redis_keys.replay_unsolved(job_id), unknown[1])
    context.redis.hincrby(redis_keys.replay_counters(job_id), "unsolved", 1)
    assert fed() - set(unknown)


def test_a_restarted_dispatcher_neither_repeats_nor_skips(
    open_context: Callable[..., AppContext], peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(open_context(), document)
    fed: list[PromptGroup] = []
    for _ in range(8):
        context = open_context()
        peers.replay.admissible = 3 * SAMPLES
        context.dispatcher.dispatch(job_id)
        fed += groups(context, job_id)
        drain(context, job_id)

    straight = running(open_context(), document)
    peers.replay.admissible = 24 * SAMPLES
    context.dispatcher.dispatch(straight)
    assert [group.group_id for group in fed] == [f"{job_id}-{number}" for number in range(24)]
    assert [group.prompt.prompt_id for group in fed] == [group.prompt.prompt_id for group in groups(context, straight)]


def test_two_feeders_at_once_publish_each_position_once(
    open_context: Callable[..., AppContext], peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    desks = [open_context() for _ in range(4)]
    job_id = running(desks[0], document)
    peers.replay.admissible = 40 * SAMPLES
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda context: context.dispatcher.dispatch(job_id), desks))

    ids = [group.group_id for group in groups(desks[0], job_id)]
    assert len(ids) == len(set(ids))
    assert sorted(ids) == sorted(f"{job_id}-{number}" for number in range(len(ids)))


def test_a_cancelled_job_is_fed_nothing(context: AppContext, peers: ServiceDoubles, document: dict[str, Any]) -> None:
    job_id = running(context, document)
    peers.replay.admissible = 100
    act_on(context.jobs, job_id, CANCEL)

    assert context.dispatcher.dispatch(job_id) == 0
    assert groups(context, job_id) == []


def test_unsolved_prompts_are_left_out_where_the_spec_drops_them(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["value"] = {"unsolved": "drop"}
    job_id = running(context, document, successes=lambda index: index % 2)
    peers.replay.admissible = PROMPTS * SAMPLES
    context.dispatcher.dispatch(job_id)

    assert len({group.prompt.prompt_id for group in groups(context, job_id)}) == PROMPTS // 2


def test_untried_prompts_that_the_spec_drops_are_not_chosen_for_want_of_an_answer(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["value"] = {"unsolved": "drop"}
    document["rollout"]["unsolved_share"] = 1.0
    document["offline"] = {"human_solutions": True}
    mix = [{"source": source, "share": share} for source, share in (("online", 0.5), ("memory", 0.25), ("human", 0.25))]
    document["replay"] = {"mix": mix, "memory": {"also": ["human"]}}
    job_id = running(context, document, successes=lambda index: index % 2)
    peers.replay.admissible = PROMPTS * SAMPLES
    context.dispatcher.dispatch(job_id)

    assert len({group.prompt.prompt_id for group in groups(context, job_id)}) == PROMPTS // 2


def test_prompts_that_the_buffer_would_never_serve_are_not_fed(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["replay"] = {"mix": [{"source": "online", "share": 1, "min_value_spread": 0.2}]}
    job_id = running(context, document, successes=lambda index: index % 2)
    peers.replay.admissible = PROMPTS * SAMPLES
    context.dispatcher.dispatch(job_id)

    assert len({group.prompt.prompt_id for group in groups(context, job_id)}) == PROMPTS // 2


def test_a_job_with_nothing_to_feed_fails_and_says_so(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    document["value"] = {"unsolved": "drop"}
    job_id = running(context, document, successes=lambda index: 0)
    peers.replay.admissible = 100
    loop = threading.Thread(target=context.dispatcher.run, args=(context.stop,))
    loop.start()
    wait_until(lambda: context.jobs.state(job_id) is JobState.FAILED, "the job fails")
    context.stop.set()
    loop.join(10)

    assert context.jobs.record(job_id).failure_code == "no_prompts"


def test_a_policy_that_finds_nothing_correct_is_not_fed_for_ever_where_only_correct_rollouts_are_served(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    mix = [{"source": "online", "share": 1, "correct_only": True}]
    replay = {"mix": mix, "online_capacity": 100, "error_buffer": 10, "min_online": 10, "samples_per_insert": 1}
    job_id = running(context, document | {"replay": replay})
    spec = context.jobs.spec(job_id)
    slack = 10 + spec.trainer.batch_size + 10
    published = 0

    def play(windows: float, sampled: int = 0) -> None:
        """As the limiter answers: what a batch lacks is admissible, whatever was inserted before."""
        inserted = int(slack + windows * 100) + sampled
        peers.replay.admissible = spec.trainer.batch_size
        peers.replay.counts = [SourceCount(source=SOURCE_ONLINE, inserted=inserted, sampled=sampled, correct=1)]
        context.dispatcher._dispatch_or_fail(job_id)
        drain(context, job_id)

    def is_fed() -> bool:
        nonlocal published
        before, published = published, context.redis.xinfo_stream(redis_keys.prompts(job_id))["entries-added"]
        return published > before

    def said() -> bool:
        return any("rollouts are correct" in wait for wait in context.monitor.waits(job_id, JobState.RUNNING))

    play(windows=-0.1, sampled=5000)
    assert (is_fed(), said(), context.jobs.state(job_id)) == (True, False, JobState.RUNNING)
    play(windows=3.9, sampled=5000)
    assert (is_fed(), said(), context.jobs.state(job_id)) == (True, True, JobState.RUNNING)
    play(windows=4, sampled=5000)
    assert (is_fed(), context.jobs.state(job_id)) == (False, JobState.FAILED)
    record = context.jobs.record(job_id)
    assert record.failure_code == "too_few_correct"
    assert record.failure_message.startswith("1 of 5")
