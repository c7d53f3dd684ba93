"""The judge as a whole: real sandbox, real server, real gRPC, real stream."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService, JudgeWorker
from spo import redis_keys
from spo.errors import InvalidInput, NotFound, ResourceExhausted
from spo.messaging.streams.entries import publish
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec, spec_to_json
from spo.testing.peers import wait_until
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import DescribeJudgeRequest, JudgeRequest, Priority, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import Limits, Outcome

DOUBLES = verdict_pb2.TestSet(
    tests=[verdict_pb2.TestCase(stdin=b"%d\n" % n, stdout=b"%d\n" % (2 * n)) for n in range(12)]
)
RIGHT = "print(2 * int(input()))"
WRONG = "print(0)"


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings()


@pytest.fixture(scope="module")
def tier(settings: Settings) -> str:
    return choose_tier(settings)


@pytest.fixture
def scheduler(redis_client: redis.Redis, settings: Settings, tier: str) -> Iterator[JudgeScheduler]:
    scheduler = JudgeScheduler(redis_client, settings, tier, workers=2)
    yield scheduler
    scheduler.close()


@pytest.fixture
def judge(scheduler: JudgeScheduler) -> Iterator[RpcClient]:
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), server.server)
    server.start()
    client = RpcClient("sandbox-judge", server.address, JudgeServiceStub)
    yield client
    client.close()
    server.stop(1)


def judge_all(judge: RpcClient, programs: list[str], tests: verdict_pb2.TestSet = DOUBLES, **fields: object) -> list:
    digest = judge.call("UploadTests", UploadTestsRequest(test_sets=[tests])).digests[0]
    request = JudgeRequest(programs=programs, language="python", tests_digest=digest, **fields)
    return list(judge.call("Judge", request, deadline_seconds=60).verdicts)


def test_programs_get_their_verdicts_in_order(judge: RpcClient) -> None:
    broken = "print("
    verdicts = judge_all(judge, [RIGHT, WRONG, broken, "1/0", RIGHT])

    assert [verdict.outcome for verdict in verdicts] == [
        Outcome.OUTCOME_ACCEPTED,
        Outcome.OUTCOME_WRONG_ANSWER,
        Outcome.OUTCOME_COMPILE_ERROR,
        Outcome.OUTCOME_RUNTIME_ERROR,
        Outcome.OUTCOME_ACCEPTED,
    ]
    assert [verdict.tests_passed for verdict in verdicts] == [12, 1, 0, 0, 12]
    assert {verdict.tests_total for verdict in verdicts} == {12}
    assert verdicts[1].detail == "test 2: token 1: expected '2', found '0'"
    assert "ZeroDivisionError" in verdicts[3].detail
    assert all(verdict.isolation and "cpython" in verdict.judge_version for verdict in verdicts)


def test_a_known_program_is_answered_from_the_cache(judge: RpcClient) -> None:
    first = judge_all(judge, [RIGHT, WRONG])
    # A verdict is answered first and kept then.
    wait_until(lambda: all(each.cached for each in judge_all(judge, [RIGHT, WRONG])), "both to be kept", 10)
    second = judge_all(judge, [WRONG, RIGHT, "print(1)"])

    assert [verdict.cached for verdict in first] == [False, False]
    assert [verdict.cached for verdict in second] == [True, True, False]
    assert second[1].outcome == Outcome.OUTCOME_ACCEPTED


def test_details_cover_every_test_even_after_a_failure(judge: RpcClient) -> None:
    (verdict,) = judge_all(judge, ["n = int(input())\nprint(2 * n if n != 3 else 1 // 0)"], want_details=True)

    assert verdict.outcome == Outcome.OUTCOME_RUNTIME_ERROR
    assert len(verdict.tests) == 12
    assert [result.outcome == Outcome.OUTCOME_ACCEPTED for result in verdict.tests].count(False) == 1
    assert verdict.tests[3].memory_bytes > 1 << 20
    assert [result.output for result in verdict.tests[:3]] == ["0\n", "2\n", "4\n"]


def test_so_much_of_an_output_comes_back_as_was_asked_for(judge: RpcClient) -> None:
    silent = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase()])
    (verdict,) = judge_all(judge, ["print('x' * 5000)"], silent, want_details=True, output_bytes=3000)

    assert verdict.tests[0].output == "x" * 3000
    with pytest.raises(InvalidInput, match="/output_bytes"):
        judge_all(judge, ["print(1)"], silent, want_details=True, output_bytes=1 << 20)


def test_limits_are_the_test_sets_own(judge: RpcClient) -> None:
    limited = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"", stdout=b"")],
        limits=Limits(cpu_seconds=0.3, wall_seconds=0.6, memory_bytes=64 << 20, output_bytes=1000),
    )
    programs = [
        "while True: pass",
        "import time; time.sleep(5)",
        "x = bytearray(100 << 20)",
        "print('x' * 2000)",
    ]

    assert [Outcome.Name(verdict.outcome) for verdict in judge_all(judge, programs, limited)] == [
        "OUTCOME_CPU_TIME_LIMIT",
        "OUTCOME_WALL_TIME_LIMIT",
        "OUTCOME_MEMORY_LIMIT",
        "OUTCOME_OUTPUT_LIMIT",
    ]


def test_an_oversize_program_is_a_verdict_not_a_fault(judge: RpcClient) -> None:
    (verdict,) = judge_all(judge, ["#" * 70_000])

    assert verdict.outcome == Outcome.OUTCOME_COMPILE_ERROR
    assert "70000 bytes" in verdict.detail


def test_unusable_requests_are_refused_with_a_type(judge: RpcClient) -> None:
    with pytest.raises(InvalidInput, match="unknown language"):
        judge.call("Judge", JudgeRequest(programs=["x"], language="cobol", tests_digest="0"))
    with pytest.raises(NotFound, match="upload it first"):
        judge.call("Judge", JudgeRequest(programs=["x"], language="python", tests_digest="0"))
    with pytest.raises(InvalidInput) as refusal:
        judge.call(
            "UploadTests",
            UploadTestsRequest(test_sets=[verdict_pb2.TestSet(limits=Limits(cpu_seconds=-1, memory_bytes=-1))]),
        )
    assert {each.pointer for each in refusal.value.violations} == {
        "/tests",
        "/limits/cpu_seconds",
        "/limits/memory_bytes",
    }


def test_a_full_queue_says_come_back_later(redis_client: redis.Redis, tier: str) -> None:
    scheduler = JudgeScheduler(redis_client, Settings(max_queued_programs=3), tier, workers=1)
    digest = scheduler.test_sets.upload(DOUBLES)
    try:
        with pytest.raises(ResourceExhausted):
            scheduler.submit([f"print({n})" for n in range(4)], "python", digest, Priority.PRIORITY_TRAINING)
    finally:
        scheduler.close()


def test_evaluation_overtakes_training(redis_client: redis.Redis, settings: Settings, tier: str) -> None:
    scheduler = JudgeScheduler(redis_client, settings, tier, workers=1)
    digest = scheduler.test_sets.upload(DOUBLES)
    finished: list[str] = []
    try:
        slow = [f"x = {n}\nfor _ in range(10**6): pass" for n in range(5)]
        training = scheduler.submit(slow, "python", digest, Priority.PRIORITY_TRAINING)
        evaluation = scheduler.submit([RIGHT], "python", digest, Priority.PRIORITY_EVALUATION)
        training.futures[slow[-1]].add_done_callback(lambda _: finished.append("training"))
        evaluation.futures[RIGHT].add_done_callback(lambda _: finished.append("evaluation"))
        training.verdicts(60)
        evaluation.verdicts(60)
    finally:
        scheduler.close()
    assert finished == ["evaluation", "training"]


def test_the_judge_describes_itself(judge: RpcClient, scheduler: JudgeScheduler, tier: str) -> None:
    description = judge.call("DescribeJudge", DescribeJudgeRequest())

    assert description.judge_version == scheduler.judge_version
    assert description.isolation == tier
    assert "python" in description.languages


def rollout_group(group_id: str, responses: list[str], digest: str, language: str = "python") -> RolloutGroup:
    prompt = Prompt(prompt_id="p", tests_digest=digest, language=language, response_format="raw")
    return RolloutGroup(
        request=PromptGroup(group_id=group_id, run_id="job_1", prompt=prompt),
        trajectories=[Trajectory(trajectory_id=f"{group_id}-{n}", response_text=r) for n, r in enumerate(responses)],
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [({}, [0.0, -1.0, -1.0]), ({"score": "share_of_tests", "scale": 2, "shift": -3}, [-1.0, 2 / 12 - 3, -3.0])],
)
def test_groups_travel_the_pipeline_with_verdicts_and_rewards(
    redis_client: redis.Redis, scheduler: JudgeScheduler, reward: dict[str, Any], expected: list[float]
) -> None:
    spec = parse_job_spec({"model": {"path": "pi0"}, "tasks": {"reward": reward}})
    redis_client.set(redis_keys.run_spec("job_1"), spec_to_json(spec))
    digest = scheduler.test_sets.upload(DOUBLES)
    groups = [rollout_group(f"g{n}", [RIGHT, WRONG, "print("], digest) for n in range(20)]
    poison = rollout_group("poison", [RIGHT], digest, language="cobol")
    publish(redis_client, redis_keys.rollouts(), [each.SerializeToString() for each in [*groups, poison]])
    stop = threading.Event()
    workers = [
        threading.Thread(target=JudgeWorker(redis_client, scheduler, f"w{n}", Settings()), args=(stop,))
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 20, "every group is judged")
        wait_until(
            lambda: redis_client.xlen(redis_keys.dead_letters(redis_keys.rollouts())) == 1,
            "the broken group is given up",
        )
    finally:
        stop.set()
        for worker in workers:
            worker.join(20)
    judged = [RolloutGroup.FromString(fields[b"payload"]) for _, fields in redis_client.xrange(redis_keys.verdicts())]
    assert {each.request.group_id for each in judged} == {f"g{n}" for n in range(20)}
    for group in judged:
        assert [each.reward for each in group.trajectories] == pytest.approx(expected)
        assert all(each.hops[-1].service == "sandbox-judge" for each in group.trajectories)
    assert redis_client.xlen(redis_keys.rollouts()) == 0


def test_groups_of_a_run_that_a_later_release_started_are_judged(
    redis_client: redis.Redis, scheduler: JudgeScheduler
) -> None:
    spec = json.loads(spec_to_json(parse_job_spec({"model": {"path": "pi0"}})))
    spec["replay"]["of_a_later_release"] = 1
    redis_client.set(redis_keys.run_spec("job_1"), json.dumps(spec))
    digest = scheduler.test_sets.upload(DOUBLES)
    # Unknown fields of a message travel on: field 999, a string.
    later = b"\xba\x3e\x05later"
    groups = [rollout_group(f"g{n}", [RIGHT], digest).SerializeToString() + later for n in range(20)]
    publish(redis_client, redis_keys.rollouts(), groups)
    stop = threading.Event()
    worker = threading.Thread(target=JudgeWorker(redis_client, scheduler, "w", Settings()), args=(stop,))
    worker.start()
    try:
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 20, "every group is judged")
    finally:
        stop.set()
        worker.join(20)

    assert redis_client.xlen(redis_keys.dead_letters(redis_keys.rollouts())) == 0
    assert all(later in fields[b"payload"] for _, fields in redis_client.xrange(redis_keys.verdicts()))


def test_a_closed_scheduler_leaves_no_process_behind(redis_client: redis.Redis, settings: Settings, tier: str) -> None:
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    descriptors = len(os.listdir("/proc/self/fd"))
    scheduler = JudgeScheduler(redis_client, settings, tier, workers=2)
    digest = scheduler.test_sets.upload(DOUBLES)
    scheduler.submit([RIGHT, WRONG], "python", digest, Priority.PRIORITY_TRAINING).verdicts(60)
    scheduler.close()

    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the Redis pool may keep one more connection


def test_an_empty_program_is_wrong_and_the_next_ones_are_judged_as_ever(judge: RpcClient) -> None:
    (empty,) = judge_all(judge, [""])
    others = judge_all(judge, [f"{RIGHT}  # {number}" for number in range(6)])
    assert empty.outcome == Outcome.OUTCOME_WRONG_ANSWER
    assert [verdict.outcome for verdict in others] == [Outcome.OUTCOME_ACCEPTED] * 6
