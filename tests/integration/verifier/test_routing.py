"""Who is asked about a problem: the verifiers where a service or a model decides, otherwise the sandbox judge."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from services.orchestrator.scoring import upload_tests
from services.value_estimation.samples import ServiceClients, connect_clients
from services.value_estimation.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput
from spo.rpc.pools import JudgePools
from spo.tasks.problem import Problem
from spo.tasks.verifier import pool_of
from spo.testing.peers import ServiceDoubles
from spo.v1 import verdict_pb2 as verdicts
from spo.v1.prompt_pb2 import Prompt

PROGRAM = verdicts.TestSet(tests=[verdicts.TestCase(stdin=b"1", stdout=b"1")])
HTTP = verdicts.TestSet(http=verdicts.HttpScore(url="https://rewards.example.org/score"))
MODEL = verdicts.TestSet(model=verdicts.ModelScore(rubric="Is it right? {response}"))
TESTS = {"program": PROGRAM, "http": HTTP, "model": MODEL}


def composed(*parts: verdicts.TestSet) -> verdicts.TestSet:
    named = [verdicts.Part(name=f"part{number}", weight=1, verifier=part) for number, part in enumerate(parts)]
    length = verdicts.Part(name="short", length=verdicts.LengthPenalty(most_characters=10))
    return verdicts.TestSet(composition=verdicts.Composition(parts=[*named, length]))


@pytest.mark.parametrize(
    ("test_set", "pool"),
    [
        (PROGRAM, ""),
        (verdicts.TestSet(answer=verdicts.AnswerRule(expected=["1"])), ""),
        (HTTP, "verifier"),
        (MODEL, "verifier"),
        (composed(PROGRAM, PROGRAM), ""),
        (composed(PROGRAM, MODEL), "verifier"),
        (composed(composed(PROGRAM, HTTP)), "verifier"),
    ],
    ids=["program", "answer", "http", "model", "composed of programs", "composed with a model", "composed deeper"],
)
def test_a_test_set_belongs_to_the_verifiers_when_anything_of_it_asks_outside(
    test_set: verdicts.TestSet, pool: str
) -> None:
    assert pool_of(test_set) == pool
    assert redis_keys.rollouts_of(pool) == (redis_keys.verifier_rollouts() if pool else redis_keys.rollouts())


@pytest.fixture
def doubles() -> Iterator[tuple[ServiceDoubles, ServiceDoubles]]:
    with ServiceDoubles() as judge, ServiceDoubles() as verifier:
        judge.judge.version, verifier.judge.version = "judge", "verifier"
        yield judge, verifier


def test_each_pool_is_given_its_own_test_sets(doubles: tuple[ServiceDoubles, ServiceDoubles]) -> None:
    judge, verifier = doubles
    pools = JudgePools(judge.address, verifier.address)
    problems = {name: Problem(statement=name, tests=tests, language="text") for name, tests in TESTS.items()}

    upload_tests(pools, list(problems.values()))

    assert judge.judge.uploaded == {problems["program"].tests_digest}
    assert verifier.judge.uploaded == {problems["http"].tests_digest, problems["model"].tests_digest}
    with pytest.raises(InvalidInput, match="no pool of judges 'elsewhere'"):
        pools.of("elsewhere")
    pools.close()


def test_values_are_judged_by_the_pool_that_the_prompt_names_and_kept_under_its_version(
    doubles: tuple[ServiceDoubles, ServiceDoubles], redis_client: redis.Redis
) -> None:
    judge, verifier = doubles
    settings = Settings(sandbox_judge_address=judge.address, verifier_address=verifier.address, patience_seconds=5)
    clients: ServiceClients = connect_clients(settings, threading.Event(), redis_client)
    asked = []
    for pool in ("", "verifier"):
        prompt = Prompt(prompt_id="p", language="text", verifier_pool=pool)
        (verdict,) = clients.judge_programs(prompt, ["right"], all_tests=False, run_id="run")
        asked.append((verdict.judge_version, clients.judge_version(prompt)))

    assert asked == [("judge", "judge"), ("verifier", "verifier")]
    clients.judge.close()
