"""A continual job on the whole platform: what people say is learned from and served, or kept back, and taken back.

How much is learned is chance at this size: the gates are set so that the first round passes and the second cannot.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.client.models import ContinualRound
from spo.demo.loop import (
    CONTINUAL,
    ENDED,
    SERVED,
    Course,
    Crowd,
    GreedyAnswer,
    People,
    continual_spec,
    first_job,
    places_of,
    weights_digest,
)
from spo.local.launcher import LocalPlatform
from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks
from spo.testing.peers import wait_until

COURSE = Course(
    train_problems=16,
    evaluation_problems=8,
    first_steps=4,
    round_steps=6,
    batch_size=16,
    value_samples=4,
    answers=4,
    gate_samples=2,
)
HONEST = (Crowd("north", 0.5, 0.0), Crowd("west", 0.5, 0.0))
POISONED = (Crowd("north", 0.5, 1.0), Crowd("west", 0.5, 1.0))

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(3600)]


def test_a_round_is_served_a_poisoned_one_is_kept_and_one_call_rolls_back_bit_for_bit(
    live: Any, client: Client, reference_model: Path
) -> None:
    platform = live.platform
    with _people(platform) as people:
        spo = people.spo
        document = first_job(COURSE)
        first = spo.wait(
            spo.submit({**document, "model": {**document["model"], "path": str(reference_model)}}).id, 1200
        )
        assert first.state == "succeeded", first.failure
        version = first.progress.weight_version
        spo.serving.publish(SERVED, first.id, version, "where the test begins")
        at_first, digest = _answers(people), weights_digest(spo, first.id, version)

        # Feedback on every problem makes a round due; whatever it has learned passes this gate.
        better = _round(people, 1, HONEST, min_gain=-1.0)
        assert better.state == "served", better.reason
        assert better.learned_from == {"traffic": COURSE.train_problems * COURSE.answers}
        served = spo.serving.get(SERVED)
        assert (served.job_id, served.version) == (better.job_id, better.version)
        assert weights_digest(spo, better.job_id, better.version) != digest
        assert [each.logprobs for each in _answers(people)] != [each.logprobs for each in at_first]

        poisoned = _round(people, 2, POISONED, min_gain=0.5)
        assert poisoned.state == "kept", poisoned.reason
        assert poisoned.comparison is not None
        assert spo.serving.get(SERVED).job_id == better.job_id

        _nothing_is_kept_without_consent(platform, people)

        after = spo.serving.roll_back(SERVED, note="the test takes it back")
        assert (after.job_id, after.version) == (first.id, version)
        assert weights_digest(spo, after.job_id, after.version) == digest
        assert _answers(people) == at_first


def _people(platform: LocalPlatform) -> People:
    document = first_job(COURSE)["tasks"]
    problems = load_tasks(TasksSpec.model_validate(document)).train
    return People(platform.http_url, platform.addresses["sandbox-judge"], SERVED, problems)


def _answers(people: People) -> Sequence[GreedyAnswer]:
    return people.greedy(people.problems[:3])


def _round(people: People, number: int, crowds: Sequence[Crowd], min_gain: float) -> ContinualRound:
    """The round that learns from one answer after another to every problem, and what these crowds say of them."""
    spec = continual_spec(COURSE)
    people.spo.continual.put(CONTINUAL, {**spec, "gate": {**spec["gate"], "min_gain": min_gain}})
    counted = people.use(crowds, COURSE.answers, 1000 * number, lambda *_: None)
    assert counted.answers == COURSE.train_problems * COURSE.answers

    def ended() -> ContinualRound | None:
        history = people.spo.continual.get(CONTINUAL).history
        return next((each for each in history if each.number == number and each.state in ENDED), None)

    found = wait_until(ended, f"round {number}", 1200, 0.5)
    assert found is not None
    return found


def _nothing_is_kept_without_consent(platform: LocalPlatform, people: People) -> None:
    private, agreed = [f"canary-{secrets.token_hex(8)}" for _ in range(3)], f"agreed-{secrets.token_hex(8)}"
    for text in private:
        people.say_in_private(text)
    people.ask_anything(agreed)
    folders = (platform.redis_url, platform.state_path, platform.folder / "logs")
    assert places_of(private, *folders) == []
    assert places_of([agreed], *folders) != []
