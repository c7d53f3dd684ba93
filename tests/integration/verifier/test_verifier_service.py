"""The verifiers' doors: the judge's contract for their own kinds, and environments by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import redis

from services.verifier.environments.service import Environments, EnvironmentService, StateSeal
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler, VerifierService, VerifierWorker
from spo import redis_keys
from spo.errors import InvalidInput, NotFound
from spo.messaging.streams.entries import publish, read_after
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, start_run
from spo.v1 import verdict_pb2
from spo.v1.environment_service_pb2 import BeginRequest, DescribeEnvironmentsRequest, StepRequest, Turn
from spo.v1.environment_service_pb2_grpc import (
    EnvironmentServiceStub,
    add_EnvironmentServiceServicer_to_server,
)
from spo.v1.judge_service_pb2 import DescribeJudgeRequest, JudgeRequest, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import HttpScore, Outcome, Verdict

HTTP = verdict_pb2.TestSet(http=HttpScore(url="https://rewards.example.org/score", arguments_json="{}"))


class LengthScorer:
    """Accepts responses of an even length; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def verdicts(
        self, responses: Sequence[str], test_set: verdict_pb2.TestSet, language: str = ""
    ) -> list[Verdict]:
        self.asked += responses
        outcomes = (Outcome.OUTCOME_WRONG_ANSWER if len(each) % 2 else Outcome.OUTCOME_ACCEPTED for each in responses)
        return [Verdict(outcome=outcome) for outcome in outcomes]


@pytest.fixture
def scorer() -> LengthScorer:
    return LengthScorer()


@pytest.fixture
def scheduler(redis_client: redis.Redis, scorer: LengthScorer) -> Iterator[VerifierScheduler]:
    made = VerifierScheduler(redis_client, Settings(), {"http": scorer})
    yield made
    made.close(1.0)


@pytest.fixture
def address(redis_client: redis.Redis, scheduler: VerifierScheduler) -> Iterator[str]:
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(VerifierService(scheduler), server.server)
    add_EnvironmentServiceServicer_to_server(
        EnvironmentService(Environments({}), StateSeal(redis_client)), server.server
    )
    server.start()
    yield server.address
    server.stop(1)


@pytest.fixture
def verifier(address: str) -> Iterator[RpcClient]:
    client = RpcClient("verifier", address, JudgeServiceStub)
    yield client
    client.close()


def test_responses_are_scored_in_order_and_equal_ones_once(verifier: RpcClient, scorer: LengthScorer) -> None:
    (digest,) = verifier.call("UploadTests", UploadTestsRequest(test_sets=[HTTP])).digests

    request = JudgeRequest(programs=["ab", "a", "ab"], language="text", tests_digest=digest)
    verdicts = verifier.call("Judge", request).verdicts

    accepted = [verdict.outcome == Outcome.OUTCOME_ACCEPTED for verdict in verdicts]
    assert (accepted, scorer.asked) == ([True, False, True], ["ab", "a"])
    described = verifier.call("DescribeJudge", DescribeJudgeRequest())
    assert {verdict.judge_version for verdict in verdicts} == {described.judge_version}
    assert list(described.features) == ["http"]


def test_what_belongs_to_the_sandbox_judge_is_refused_by_name(verifier: RpcClient) -> None:
    with pytest.raises(InvalidInput) as refused:
        verifier.call(
            "UploadTests", UploadTestsRequest(test_sets=[verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=b"1")])])
        )
    assert refused.value.violations[0].pointer == "/program"
    with pytest.raises(NotFound, match="upload it first"):
        verifier.call("Judge", JudgeRequest(programs=["a"], tests_digest="0" * 64))


def test_an_environment_that_is_not_there_is_not_found(address: str) -> None:
    client = RpcClient("verifier", address, EnvironmentServiceStub)
    client.call("DescribeEnvironments", DescribeEnvironmentsRequest())
    for method, request in (
        ("Begin", BeginRequest(environment="nowhere", seeds=[1])),
        ("Step", StepRequest(environment="nowhere", turns=[Turn(action="a")])),
    ):
        with pytest.raises(NotFound) as missing:
            client.call(method, request)
        assert missing.value.code == "environment_not_found"
    client.close()


def test_groups_of_the_pools_own_stream_get_verdicts_and_rewards(
    redis_client: redis.Redis, scheduler: VerifierScheduler
) -> None:
    start_run(redis_client)
    prompt = Prompt(prompt_id="p", tests_digest=scheduler.test_sets.upload(HTTP), verifier_pool="verifier")
    texts = ("ab", "a")
    group = RolloutGroup(
        request=PromptGroup(run_id=RUN, group_id="g", prompt=prompt),
        trajectories=[Trajectory(trajectory_id=text, run_id=RUN, response_text=text) for text in texts],
    )
    publish(redis_client, redis_keys.verifier_rollouts(), [group.SerializeToString()])
    stop = threading.Event()
    worker = VerifierWorker(redis_client, scheduler, "verifier-0", Settings())
    thread = threading.Thread(target=worker, args=(stop,), daemon=True)
    thread.start()
    wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 1, "the group is scored")
    stop.set()
    thread.join(5)

    (entry,) = read_after(redis_client, redis_keys.verdicts(), "0-0", 1)
    scored = RolloutGroup.FromString(entry.payload).trajectories
    assert [(each.reward, each.hops[-1].service) for each in scored] == [(0.0, "verifier"), (-1.0, "verifier")]
    assert redis_client.xlen(redis_keys.verifier_rollouts()) == 0
