"""A real replica process between a real Redis-protocol server and a test orchestrator: assigned, killed, drained."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from spo import redis_keys
from spo.errors import IntegrityError, InvalidInput, NotReady, PreconditionFailed
from spo.messaging.streams.entries import StreamDepth, depth, publish
from spo.rpc.client import is_healthy
from spo.rpc.healthcheck import why_not_serving
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from spo.v1 import inference_service_pb2 as inference
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, RolloutGroup
from tests.integration.inference.replica_stage import (
    RUN,
    STATEMENT,
    WAIT_SECONDS,
    Platform,
    announce,
    announcement,
    prompt_group,
    write_run,
    write_version,
)

# A replica needs about 15 s of CPU to start: on a busy machine that is minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference-service")
    write_random_llama(folder / "model", seed=0)
    return folder


@pytest.fixture(scope="module")
def platform(folder: Path, redis_server: str) -> Iterator[Platform]:
    """A platform with one replica that serves RUN; its tests leave it serving."""
    client = redis.Redis.from_url(redis_server)
    client.flushall()
    write_run(client, RUN, folder / "model")
    client.close()
    platform = Platform(folder, redis_server)
    platform.assign(RUN)
    replica = platform.start_replica()
    wait_until(lambda: platform.beat(replica).run_id == RUN, "the replica to serve the run", WAIT_SECONDS)
    yield platform
    platform.close()


@pytest.fixture
def connection(redis_server: str) -> Iterator[redis.Redis]:
    """A client that leaves the database as it is: the module's replica lives on it."""
    client = redis.Redis.from_url(redis_server)
    yield client
    client.close()


def rollouts(client: redis.Redis) -> list[RolloutGroup]:
    return [RolloutGroup.FromString(fields[b"payload"]) for _, fields in client.xrange(redis_keys.rollouts())]


def test_generate_answers_with_whole_trajectories(platform: Platform) -> None:
    call = platform.client(platform.replicas[0])
    request = inference.GenerateRequest(group=prompt_group(1, samples=16, version=0))
    group = call.call("Generate", request, deadline_seconds=WAIT_SECONDS).group

    assert group.request == request.group
    assert len({trajectory.trajectory_id for trajectory in group.trajectories}) == 16
    for index, trajectory in enumerate(group.trajectories):
        assert (trajectory.sample_index, trajectory.run_id, trajectory.prompt_id) == (index, RUN, "prompt")
        assert trajectory.trajectory_id == redis_keys.trajectory_id(RUN, "group-1", index, 0, 0)
        assert 0.1 <= trajectory.temperature <= 0.8
        assert len(trajectory.sampling_logprobs) == len(trajectory.response_token_ids) > 0
        assert (trajectory.finish_reason == FINISH_REASON_STOP) == (len(trajectory.response_token_ids) < 40)
        assert trajectory.sampler.startswith("vllm-")
        assert trajectory.sampler.endswith("/float32")
        assert [hop.service for hop in trajectory.hops] == ["inference"]
    again = call.call("Generate", request, deadline_seconds=WAIT_SECONDS).group
    assert [t.response_token_ids for t in again.trajectories] == [t.response_token_ids for t in group.trajectories]


def test_a_response_goes_on_from_the_tokens_it_was_given(platform: Platform) -> None:
    call = platform.client(platform.replicas[0])
    request = inference.GenerateRequest(group=prompt_group(1, samples=1, version=0))
    # Greedy, so that both must say the same.
    request.group.sampling.temperature_min = request.group.sampling.temperature_max = 0
    (whole,) = call.call("Generate", request, deadline_seconds=WAIT_SECONDS).group.trajectories
    request.group.response_prefix_token_ids.extend(whole.response_token_ids[:7])
    (continued,) = call.call("Generate", request, deadline_seconds=WAIT_SECONDS).group.trajectories

    assert continued.response_token_ids == whole.response_token_ids
    assert continued.prompt_token_ids == whole.prompt_token_ids
    assert continued.response_text == whole.response_text
    assert not continued.sampling_logprobs
    request.group.response_prefix_token_ids.extend([5] * 40)
    with pytest.raises(InvalidInput, match="leaves no room"):
        call.call("Generate", request)


def test_a_replica_describes_itself_and_is_healthy(platform: Platform) -> None:
    replica = platform.replicas[0]
    answer = platform.client(replica).call("DescribeReplica", inference.DescribeReplicaRequest())
    assert (answer.run_id, answer.policy_version) == (RUN, 0)
    assert answer.model_hash
    assert is_healthy(platform.beat(replica).address)


def test_generate_refuses_another_run_and_impossible_requests(platform: Platform) -> None:
    call = platform.client(platform.replicas[0])
    other = prompt_group(1)
    other.run_id = "job_other"
    with pytest.raises(PreconditionFailed, match="serves another run"):
        call.call("Generate", inference.GenerateRequest(group=other))
    with pytest.raises(InvalidInput, match="more than max_prompt_tokens"):
        call.call("Generate", inference.GenerateRequest(group=prompt_group(1, text=STATEMENT * 40)))
    with pytest.raises(InvalidInput, match="samples"):
        call.call("Generate", inference.GenerateRequest(group=prompt_group(1, samples=0)))


def test_prompts_become_rollouts_and_those_that_never_can_dead_letters(
    platform: Platform, connection: redis.Redis
) -> None:
    before = len(rollouts(connection))
    groups = [prompt_group(number) for number in range(100, 130)] + [prompt_group(130, text=STATEMENT * 40)]
    stream = redis_keys.prompts(RUN)
    payloads = [group.SerializeToString() for group in groups] + [b"\xff no message"]
    publish(connection, stream, payloads)

    wait_until(lambda: len(rollouts(connection)) - before >= 30, "30 rollout groups", WAIT_SECONDS)
    wait_until(lambda: connection.xlen(redis_keys.dead_letters(stream)) == 2, "two dead letters", WAIT_SECONDS)
    reasons = [fields[b"reason"] for _, fields in connection.xrange(redis_keys.dead_letters(stream))]
    # They are handled side by side.
    assert sum(b"max_prompt_tokens" in reason for reason in reasons) == 1
    assert sum(b"not a PromptGroup" in reason and b"malformed_entry" in reason for reason in reasons) == 1
    assert {group.request.group_id for group in rollouts(connection)[before:]} == {
        f"group-{n}" for n in range(100, 130)
    }
    assert depth(connection, stream, redis_keys.INFERENCE_GROUP) == StreamDepth(0, 0)
    connection.delete(redis_keys.dead_letters(stream))


def test_a_consumer_group_that_was_lost_is_made_again(platform: Platform, connection: redis.Redis) -> None:
    before = len(rollouts(connection))
    connection.xgroup_destroy(redis_keys.prompts(RUN), redis_keys.INFERENCE_GROUP)
    publish(connection, redis_keys.prompts(RUN), [prompt_group(200).SerializeToString()])
    wait_until(lambda: len(rollouts(connection)) > before, "the rollouts", WAIT_SECONDS)
    assert rollouts(connection)[-1].request.group_id == "group-200"


def test_a_replica_follows_announced_versions_and_refuses_a_damaged_one(
    platform: Platform, connection: redis.Redis
) -> None:
    replica = platform.replicas[0]
    announce(connection, write_version(platform.store, 1))
    wait_until(lambda: platform.beat(replica).policy_version == 1, "version 1 to be applied", WAIT_SECONDS)

    damaged = write_version(platform.store, 2)
    content = bytearray(damaged.files[0].read_bytes())
    content[len(content) // 2] ^= 1
    damaged.files[0].write_bytes(bytes(content))
    announce(connection, damaged)
    wait_until(lambda: "version 2" in platform.beat(replica).problem, "the damage to be reported", WAIT_SECONDS)
    call = platform.client(replica)
    newest = call.call("Generate", inference.GenerateRequest(group=prompt_group(2)), WAIT_SECONDS).group
    kept = call.call("Generate", inference.GenerateRequest(group=prompt_group(2, version=0)), WAIT_SECONDS).group
    with pytest.raises(IntegrityError):
        call.call("Generate", inference.GenerateRequest(group=prompt_group(2, version=2)))

    assert {trajectory.policy_version_first for trajectory in newest.trajectories} == {1}
    assert {trajectory.policy_version_last for trajectory in kept.trajectories} == {0}
    announce(connection, write_version(platform.store, 4))
    wait_until(lambda: platform.beat(replica).policy_version == 4, "version 4 to be applied", WAIT_SECONDS)
    assert platform.beat(replica).problem == ""


def test_many_callers_at_once_are_all_answered(platform: Platform) -> None:
    call = platform.client(platform.replicas[0])
    answers: list[RolloutGroup] = []

    def ask(number: int) -> None:
        request = inference.GenerateRequest(group=prompt_group(number, samples=8, version=number % 2))
        answers.append(call.call("Generate", request, deadline_seconds=WAIT_SECONDS).group)

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for principal in callers:
        principal.start()
    assert is_healthy(platform.beat(platform.replicas[0]).address, deadline_seconds=WAIT_SECONDS)
    for principal in callers:
        principal.join(WAIT_SECONDS)
    assert len(answers) == 40
    for group in answers:
        assert {t.policy_version_first for t in group.trajectories} == {group.request.policy_version}


def test_a_killed_replica_loses_nothing_and_a_stopped_one_ends_cleanly(
    platform: Platform, connection: redis.Redis
) -> None:
    """Kill -9 with groups in hand, then SIGTERM its successor: every group's rollouts are there exactly once."""
    before = len(rollouts(connection))
    stream = redis_keys.prompts(RUN)
    groups = [prompt_group(number, samples=16) for number in range(1000, 1060)]
    publish(connection, stream, [group.SerializeToString() for group in groups])
    wait_until(lambda: len(rollouts(connection)) > before + 3, "the first rollouts", WAIT_SECONDS)
    victim = platform.replicas[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait(WAIT_SECONDS)
    assert depth(connection, stream, redis_keys.INFERENCE_GROUP).pending > 0

    successor = platform.start_replica()
    wait_until(lambda: len(rollouts(connection)) - before >= len(groups), "all groups", WAIT_SECONDS)
    done = [group.request.group_id for group in rollouts(connection)[before:]]
    assert sorted(done) == sorted(group.group_id for group in groups)
    ids = [t.trajectory_id for group in rollouts(connection)[before:] for t in group.trajectories]
    assert len(set(ids)) == len(ids) == 16 * len(groups)

    publish(connection, stream, [group.SerializeToString() for group in groups])
    wait_until(
        lambda: depth(connection, stream, redis_keys.INFERENCE_GROUP).pending > 0,
        "a group being sampled",
        WAIT_SECONDS,
    )
    successor.send_signal(signal.SIGTERM)
    assert successor.wait(WAIT_SECONDS) == 0, platform.log_of(successor)
    left = connection.xpending_range(stream, redis_keys.INFERENCE_GROUP, "-", "+", 100)
    assert [each["times_delivered"] for each in left] == [0] * len(left), "what it had not begun is given back"
    finished = len(rollouts(connection)) - before - len(groups)
    assert connection.xlen(stream) == len(groups) - finished, "and what it had begun is finished"
    assert platform.orchestrator.beats[successor.pid].draining


def test_an_idle_replica_is_ready_and_a_model_that_runs_code_is_refused(
    folder: Path, redis_server: str, redis_client: redis.Redis
) -> None:
    model = folder / "with_code"
    write_random_llama(model, seed=0)
    (model / "modeling_evil.py").write_text("not loaded")
    write_run(redis_client, "job_with_code", model)
    platform = Platform(folder, redis_server)
    try:
        replica = platform.start_replica()
        address = wait_until(lambda: platform.beat(replica).address, "a heartbeat", WAIT_SECONDS)
        assert is_healthy(address, deadline_seconds=10)
        platform.assign("job_with_code", model)
        wait_until(lambda: "modeling_evil.py" in platform.beat(replica).problem, "the refusal", WAIT_SECONDS)
        with pytest.raises(NotReady):
            platform.client(replica).call("Generate", inference.GenerateRequest(group=prompt_group(1)))
        assert not is_healthy(address)
        assert "modeling_evil.py" in why_not_serving(address)
        replica.terminate()
        assert replica.wait(WAIT_SECONDS) == 0, platform.log_of(replica)
    finally:
        platform.close()


def test_a_late_replica_is_ready_with_the_current_weights_only_and_says_what_is_wrong_with_them(
    folder: Path, redis_server: str, redis_client: redis.Redis
) -> None:
    write_run(redis_client, RUN, folder / "model")
    platform = Platform(folder, redis_server)
    damaged = write_version(platform.store, 11)
    damaged.files[0].write_bytes(damaged.files[0].read_bytes()[:-1])
    try:
        platform.assign(RUN)
        platform.orchestrator.response.weights.CopyFrom(announcement(damaged))
        replica = platform.start_replica()
        address = wait_until(lambda: platform.beat(replica).address, "a heartbeat", WAIT_SECONDS)
        wait_until(lambda: "version 11" in platform.beat(replica).problem, "the refusal", WAIT_SECONDS)
        assert not is_healthy(address)
        assert "version 11" in why_not_serving(address)
        assert "its manifest says" in why_not_serving(address)
        assert "announced weights refused" in platform.log_of(replica)

        announce(redis_client, write_version(platform.store, 12))
        wait_until(lambda: why_not_serving(address) == "", "the replica to be ready", WAIT_SECONDS)
        wait_until(lambda: platform.beat(replica).policy_version == 12, "version 12 to be applied", WAIT_SECONDS)
    finally:
        platform.close()


def test_a_replica_keeps_its_engine_for_runs_of_one_model_and_ends_for_another(
    folder: Path, redis_server: str, redis_client: redis.Redis
) -> None:
    write_random_llama(folder / "other", seed=9)
    write_run(redis_client, RUN, folder / "model")
    write_run(redis_client, "job_02", folder / "model")
    write_run(redis_client, "job_03", folder / "other")
    platform = Platform(folder, redis_server)
    try:
        platform.assign(RUN)
        replica = platform.start_replica()
        wait_until(lambda: platform.beat(replica).run_id == RUN, "the first run", WAIT_SECONDS)
        announce(redis_client, write_version(platform.store, 7))
        wait_until(lambda: platform.beat(replica).policy_version == 7, "version 7 of the first run", WAIT_SECONDS)

        platform.assign("job_02")
        wait_until(lambda: platform.beat(replica).run_id == "job_02", "the second run", WAIT_SECONDS)
        group = prompt_group(1)
        group.run_id = "job_02"
        answer = platform.client(replica).call("Generate", inference.GenerateRequest(group=group), WAIT_SECONDS).group
        assert {trajectory.policy_version_first for trajectory in answer.trajectories} == {0}
        assert platform.log_of(replica).count("building the engine") == 1

        platform.assign("")
        wait_until(lambda: platform.beat(replica).run_id == "", "the replica to be idle", WAIT_SECONDS)
        platform.assign("job_03", folder / "other")
        assert replica.wait(WAIT_SECONDS) == 0, platform.log_of(replica)
        assert "another model is wanted" in platform.log_of(replica)
    finally:
        platform.close()
