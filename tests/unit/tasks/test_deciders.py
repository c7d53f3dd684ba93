"""Who decides by a test set, in words, and under which versions."""

from __future__ import annotations

import pytest

from spo.tasks.verifier import composed_version, deciders, is_of_pool, versions_of_today
from spo.v1 import verdict_pb2 as wire

ANSWER = wire.TestSet(answer=wire.AnswerRule(expected=["7"]))
HTTP = wire.TestSet(http=wire.HttpScore(url="https://rewards.example.org"))
VERSIONS = {"": "3+cpython3.11.7", "verifier": "verifier-1"}


def composition(*verifiers: wire.TestSet) -> wire.TestSet:
    parts = [wire.Part(name=f"part{number}", weight=1, verifier=one) for number, one in enumerate(verifiers)]
    return wire.TestSet(composition=wire.Composition(parts=[*parts, wire.Part(name="short", weight=0.1)]))


@pytest.mark.parametrize(
    ("test_set", "named", "versions"),
    [
        (wire.TestSet(), "sandbox-judge: program", {"3+cpython3.11.7"}),
        (ANSWER, "sandbox-judge: answer", {"3+cpython3.11.7"}),
        (HTTP, "verifier: http", {"verifier-1"}),
        (composition(ANSWER, ANSWER), "sandbox-judge: composition of answer", {"3+cpython3.11.7"}),
        (
            composition(HTTP, ANSWER),
            "verifier: composition of http, answer",
            {"verifier-1", "verifier-1 3+cpython3.11.7"},
        ),
    ],
)
def test_pool_and_kinds_are_named_and_their_versions_known(
    test_set: wire.TestSet, named: str, versions: set[str]
) -> None:
    assert deciders(test_set) == named
    assert versions_of_today(test_set, VERSIONS) == versions


def test_a_composed_version_is_the_pools_unless_a_runs_own_model_has_judged() -> None:
    both = composed_version("verifier-1", "3+cpython3.11.7", "")
    assert both == "verifier-1 3+cpython3.11.7"
    assert is_of_pool(both, "verifier-1")
    assert is_of_pool("verifier-1", "verifier-1")
    assert not is_of_pool("verifier-10", "verifier-1")
    assert not is_of_pool("", "verifier-1")
    assert not is_of_pool(composed_version(both, "run:job_1"), "verifier-1")
