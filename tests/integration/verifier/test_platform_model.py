"""The job's own pi0 as judge, sampled by the platform's inference: a real gRPC server in the place of a replica."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from services.verifier.http_scorer import BadAnswer, ServiceAway
from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler
from spo.errors import InvalidInput
from spo.rpc.server import RpcServer
from spo.testing.peers import InferenceDouble
from spo.testing.runs import RUN, start_run
from spo.v1 import verdict_pb2
from spo.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from spo.v1.judge_service_pb2 import Priority
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.verdict_pb2 import Composition, ModelScore, Outcome, Part, Verdict

RUBRIC = "Asked: {statement} Answered: {response} How good is it?"


class Judging:
    """The verifiers of a platform, and the replica that they ask."""

    def __init__(self, client: redis.Redis) -> None:
        self.replica = InferenceDouble()  # type: ignore[abstract]
        self.asked: list[PromptGroup] = []
        self.said = ["The right one.\nScore: 8/10"]
        self.replica.respond = self._respond
        self.server = RpcServer("127.0.0.1", 0)
        add_InferenceServiceServicer_to_server(self.replica, self.server.server)
        self.server.start()
        settings = Settings(
            inference_address=self.server.address, attempts=3, backoff_seconds=0.01, recheck_rate=0, model_seconds=5
        )
        self.scheduler = VerifierScheduler(client, settings, scorers_of(settings, client))

    def _respond(self, group: PromptGroup, index: int) -> str:
        if index == 0:
            self.asked.append(group)
        return self.said.pop(0) if len(self.said) > 1 else self.said[0]

    def judged(self, *responses: str, run_id: str = RUN, votes: int = 1, part: bool = False) -> list[Verdict]:
        tests = verdict_pb2.TestSet(
            model=ModelScore(rubric=RUBRIC, statement="2 + 2", votes=votes, model="pi0"), pass_score=0.5
        )
        if part:
            whole = Composition(parts=[Part(name="said", weight=1, verifier=tests)])
            tests = verdict_pb2.TestSet(composition=whole, pass_score=0.5)
        digest = self.scheduler.test_sets.upload(tests)
        batch = self.scheduler.submit(responses, "text", digest, Priority.PRIORITY_TRAINING, run_id=run_id)
        return batch.verdicts(30)


@pytest.fixture
def judging(redis_client: redis.Redis) -> Iterator[Judging]:
    start_run(redis_client)
    found = Judging(redis_client)
    yield found
    found.scheduler.close(1.0)
    found.server.stop(0)


def test_pi0_of_the_run_votes_and_the_mean_decides(judging: Judging) -> None:
    judging.said = ["Score: 8/10", "No idea.", "Score: 6/10", "Score: 4/10"]

    (verdict,) = judging.judged("It is 4.", votes=3)

    assert (verdict.outcome, verdict.score) == (Outcome.OUTCOME_ACCEPTED, pytest.approx(0.6))
    assert verdict.detail == "votes of 10: 8, 6, 4"
    assert verdict.judge_version.endswith(f"run:{RUN}")
    assert [group.sampling.samples for group in judging.asked] == [3, 1], "an unreadable vote is asked for again"
    first = judging.asked[0]
    assert (first.run_id, first.HasField("policy_version"), first.policy_version) == (RUN, True, 0)
    assert first.prompt.text.startswith("Asked: 2 + 2 Answered: <response-")
    assert "\nIt is 4.\n</response-" in first.prompt.text
    assert first.sampling.seed != judging.asked[1].sampling.seed


def test_what_one_runs_pi0_said_is_remembered_for_that_run_alone(judging: Judging, redis_client: redis.Redis) -> None:
    start_run(redis_client, run_id="other")

    assert not judging.judged("a")[0].cached
    assert judging.judged("a")[0].cached
    assert judging.judged("a", part=True)[0].score == 0.8
    assert not judging.judged("a", run_id="other")[0].cached
    assert [group.run_id for group in judging.asked] == [RUN, "other"]


def test_no_vote_is_no_score_and_a_replica_that_loads_is_waited_for(judging: Judging) -> None:
    judging.replica.unready = 1
    assert judging.judged("a")[0].score == 0.8
    judging.said = ["I am the policy and like it."]
    with pytest.raises(BadAnswer, match="no 'Score: X/10'"):
        judging.judged("b")
    judging.replica.unready = 100
    with pytest.raises(ServiceAway, match="still loads"):
        judging.judged("c")


def test_without_a_job_there_is_no_pi0_to_ask(judging: Judging) -> None:
    with pytest.raises(InvalidInput, match="of no job"):
        judging.judged("a", run_id="")
    with pytest.raises(InvalidInput):
        judging.scheduler.test_sets.upload(
            verdict_pb2.TestSet(model=ModelScore(rubric="r", address="run:x", model="m"))
        )
