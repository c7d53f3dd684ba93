"""Verdicts of services: remembered by what decided, and asked for a second time where their keys say so."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import redis

from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Composition, HttpScore, Part, Verdict
from tests.integration.verifier.conftest import RewardServer, answer


@dataclass
class Pool:
    """Verifiers of one setting."""

    client: redis.Redis
    server: RewardServer
    recheck_rate: float = 0.0
    cache_seconds: int = 60

    def __enter__(self) -> Pool:
        settings = Settings(
            verifier_http_hosts=[self.server.host],
            http_networks=["127.0.0.0/8"],
            attempts=1,
            recheck_rate=self.recheck_rate,
            cache_seconds=self.cache_seconds,
        )
        self.scheduler = VerifierScheduler(self.client, settings, scorers_of(settings, self.client))
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close(1.0)

    def judged(self, *responses: str, pass_score: float = 0.5, within_composition: bool = False) -> list[Verdict]:
        tests = verdict_pb2.TestSet(http=HttpScore(url=self.server.url, timeout_seconds=5), pass_score=pass_score)
        if within_composition:
            tests = verdict_pb2.TestSet(
                composition=Composition(parts=[Part(name="asked", weight=1, verifier=tests)]), pass_score=0.5
            )
        digest = self.scheduler.test_sets.upload(tests)
        return self.scheduler.submit(responses, "text", digest, Priority.PRIORITY_TRAINING).verdicts(20)


def test_what_was_said_of_a_response_is_remembered_for_all_replicas_and_parts(
    redis_client: redis.Redis, server: RewardServer
) -> None:
    with Pool(redis_client, server) as pool:
        first = pool.judged("a", "b")
        assert [verdict.cached for verdict in first] == [False, False]
    with Pool(redis_client, server) as other:
        again = other.judged("b", "c")
        part = other.judged("c", within_composition=True)

    assert [verdict.cached for verdict in again] == [True, False]
    assert part[0].score == 1.0
    assert [len(body) for body in map(_responses, server.bodies)] == [2, 1]


def test_another_rule_is_another_verdict_and_a_failure_is_none(redis_client: redis.Redis, server: RewardServer) -> None:
    with Pool(redis_client, server) as pool:
        pool.judged("a")
        assert not pool.judged("a", pass_score=0.9)[0].cached
        server.reply = lambda _: answer(status=500)
        with pytest.raises(Exception, match="500"):
            pool.judged("b")
        server.reply = lambda document: answer(scores=[0.25] * len(document["responses"]))
        assert pool.judged("b")[0].score == 0.25


def test_a_second_look_that_differs_is_counted_and_the_mean_decides(
    redis_client: redis.Redis, server: RewardServer
) -> None:
    scores = iter([[0.9, 1.0], [0.1, 1.0], [0.2], [0.2]])
    server.reply = lambda _: answer(scores=next(scores))
    with Pool(redis_client, server, recheck_rate=1.0) as pool:
        flaky, sure = pool.judged("a", "b")
        known = pool.judged("a")[0]

    assert (flaky.runs, flaky.differing_runs, flaky.outcome) == (4, 1, OUTCOME_WRONG_ANSWER)
    assert flaky.score == pytest.approx(0.35)
    assert flaky.detail == "looks: accepted 0.9, wrong_answer 0.1, wrong_answer 0.2, wrong_answer 0.2"
    assert (sure.runs, sure.differing_runs, sure.outcome) == (2, 0, OUTCOME_ACCEPTED)
    assert (known.cached, known.runs) == (True, 4)
    assert len({headers["idempotency-key"] for headers in server.headers}) == 4, "each look is a question of its own"


def test_nothing_is_remembered_where_the_operator_says_so(redis_client: redis.Redis, server: RewardServer) -> None:
    with Pool(redis_client, server, cache_seconds=0) as pool:
        pool.judged("a")
        assert not pool.judged("a")[0].cached


def _responses(body: bytes) -> list[str]:
    found: list[str] = json.loads(body)["responses"]
    return found
