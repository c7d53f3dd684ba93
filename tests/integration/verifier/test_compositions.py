"""Compositions of which a part asks outside: the sandbox judge decides its own parts, and a failed gate ends it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from services.verifier.stage import VERIFIER_VERSION, VerifierScheduler
from spo.errors import InvalidInput
from spo.testing.peers import ServiceDoubles
from spo.v1 import verdict_pb2 as wire
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING
from tests.integration.verifier.conftest import RewardServer, answer

ANSWER = wire.TestSet(answer=wire.AnswerRule(expected=["right"]))


def composition(url: str, **gate: bool) -> wire.TestSet:
    parts = [
        wire.Part(name="style", weight=1, verifier=wire.TestSet(http=wire.HttpScore(url=url))),
        wire.Part(name="truth", weight=3, verifier=ANSWER, **gate),
        wire.Part(name="short", weight=0.5, length=wire.LengthPenalty(free_characters=10, most_characters=20)),
    ]
    return wire.TestSet(composition=wire.Composition(parts=parts), pass_score=0.8)


@pytest.mark.parametrize("gate", [True, False])
def test_the_pools_parts_and_the_judges_make_one_score_and_a_failed_gate_asks_nobody_else(
    server: RewardServer, schedulers: Callable[..., VerifierScheduler], gate: bool
) -> None:
    server.reply = lambda asked: answer(scores=[0.5] * len(asked["responses"]))
    with ServiceDoubles() as judge:
        scheduler = schedulers(sandbox_judge_address=judge.address)
        digest = scheduler.test_sets.upload(composition(server.url, gate=gate))
        right, wrong = scheduler.submit(["right", "no"], "text", digest, PRIORITY_TRAINING).verdicts(20)

    assert (right.outcome, right.score) == (wire.OUTCOME_ACCEPTED, pytest.approx(0.875))
    assert {part.name: part.score for part in right.parts} == {"style": 0.5, "truth": 1.0, "short": 0.0}
    assert right.judge_version == f"{VERIFIER_VERSION} {judge.judge.version}"
    assert (wrong.outcome, wrong.score) == (wire.OUTCOME_WRONG_ANSWER, 0.0 if gate else pytest.approx(0.125))
    asked = [text for body in server.bodies for text in json.loads(body)["responses"]]
    assert asked == (["right"] if gate else ["right", "no"])


def test_what_cannot_be_asked_is_refused_at_its_part(schedulers: Callable[..., VerifierScheduler]) -> None:
    with pytest.raises(InvalidInput) as refused:
        schedulers().test_sets.upload(composition(""))
    assert [fault.pointer for fault in refused.value.violations] == ["/composition/parts/0/verifier/http/url"]
