"""The course of the demo: a model is trained a little and served; people use it; rounds learn from what they say.

phase 1   feedback of which a tenth is wrong: a round, the gate, a new version is served
phase 2   one crowd sends 30 % of the traffic and says the opposite of the truth: the gate holds, its round names it
end       one call rolls back; the weights are those of before, to the bit
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from spo.client import Client
from spo.client.models import Job
from spo.client.models.continual import ContinualDetail, ContinualRound
from spo.demo.demo import RECIPE, Demo
from spo.demo.loop.canary import places_of
from spo.demo.loop.traffic import Crowd, GreedyAnswer, People, TrafficCount
from spo.errors import NotReady
from spo.spec.job_spec import TasksSpec
from spo.spec.spec_file import read_spec
from spo.tasks.load import load_tasks

SERVED = "helper"
CONTINUAL = "from-traffic"
TRAFFIC = "traffic"
POLL_SECONDS = 1.0
ENDED = ("served", "kept", "failed")
LOOKED_AT = 8


@dataclass(frozen=True)
class Course:
    """How much of everything; seconds are limits."""

    seed: int = 0
    train_problems: int = 160
    evaluation_problems: int = 80
    first_steps: int = 30
    round_steps: int = 120
    batch_size: int = 64
    value_samples: int = 16
    answers: int = 8
    gate_samples: int = 20
    canaries: int = 10
    round_seconds: float = 900.0
    # Below 0 something is served although little is trained.
    min_gain: float = 0.0
    phases: Mapping[str, Sequence[Crowd]] = field(default_factory=lambda: PHASES)


PHASES: Mapping[str, Sequence[Crowd]] = {
    "a tenth of the feedback is wrong": tuple(Crowd(name, 0.25, 0.1) for name in ("north", "east", "south", "west")),
    "one crowd, 30 % of the traffic, says the opposite": (
        *(Crowd(name, 0.7 / 3, 0.0) for name in ("north", "east", "south")),
        Crowd("west", 0.3, 1.0),
    ),
}


@dataclass(frozen=True)
class Phase:
    """Traffic, and the round that learned from it."""

    name: str
    traffic: TrafficCount
    round: ContinualRound
    seconds: float


@dataclass
class CourseOutcome:
    """What the demo saw."""

    course: Course
    first_job: Job
    phases: list[Phase] = field(default_factory=list)
    canaries: int = 0
    canary_places: list[str] = field(default_factory=list)
    captured_canary_is_found: bool = False
    rolled_back: dict[str, Any] = field(default_factory=dict)
    first_digest: str = ""


def first_job(course: Course) -> dict[str, Any]:
    """A little of the demo's job: what it leaves to be learned is what traffic is to teach."""
    document = read_spec(RECIPE)
    return {
        **document,
        "name": "what is served first",
        "seed": course.seed,
        "tasks": {
            **document["tasks"],
            "train_problems": course.train_problems,
            "evaluation_problems": course.evaluation_problems,
        },
        "value": {**document["value"], "samples": course.value_samples},
        "trainer": {
            **document["trainer"],
            "steps": course.first_steps,
            "batch_size": course.batch_size,
            "update_interval": course.first_steps,
            "checkpoint_interval": course.first_steps,
        },
        "evaluation": {**document["evaluation"], "samples": 4, "interval_steps": 10_000, "ks": [1]},
    }


def continual_spec(course: Course) -> dict[str, Any]:
    """Rounds of offline training from traffic alone: nothing is sampled but what people asked for, and the values."""
    return {
        "serves": SERVED,
        "traffic": {"name": TRAFFIC},
        "schedule": {"min_new_trajectories": course.train_problems * course.answers},
        "gate": {"samples": course.gate_samples, "min_gain": course.min_gain},
        "overrides": {
            # The demo's own terms learn from the policy's samples and from people's programs, and from nothing else.
            "algorithm": {"losses": [{"objective": "terminal_squared"}]},
            "offline": {
                "human_solutions": False,
                "keep_reference_samples": False,
                "experience": [{"run": TRAFFIC, "per_prompt": 64}],
            },
            "replay": {"mix": [{"source": "other_run", "share": 1.0}], "offline_per_prompt": 64},
            "trainer": {
                "steps": course.round_steps,
                "learning_rate": 8.0e-4,
                "update_interval": course.round_steps,
                "checkpoint_interval": course.round_steps,
            },
        },
    }


class Loop:
    """Carries a platform through the course."""

    def __init__(self, demo: Demo, course: Course) -> None:
        self.demo = demo
        self.course = course

    def run(self) -> CourseOutcome:
        """All phases. Raises SpoError, NotReady where a round does not end in time."""
        first = self.demo.run(first_job(self.course)).job
        if first.state != "succeeded":
            raise NotReady(f"job {first.id} is {first.state}", code="job_did_not_succeed")
        outcome = CourseOutcome(self.course, first)
        platform = self.demo.platform
        tasks = load_tasks(TasksSpec.model_validate(first.spec["tasks"]))
        with People(platform.http_url, platform.addresses["sandbox-judge"], SERVED, tasks.train) as people:
            people.spo.serving.publish(SERVED, first.id, first.progress.weight_version, "where the demo begins")
            at_first = people.greedy(tasks.train[:LOOKED_AT])
            outcome.first_digest = weights_digest(people.spo, first.id, first.progress.weight_version)
            for number, (name, crowds) in enumerate(self.course.phases.items(), 1):
                outcome.phases.append(self._phase(people, name, crowds, number))
            self._look_for_canaries(people, outcome)
            self._roll_back(people, outcome, at_first)
        return outcome

    def _phase(self, people: People, name: str, crowds: Sequence[Crowd], number: int) -> Phase:
        began, course = time.monotonic(), self.course
        self.demo.say(f"phase {number}: {name}")
        traffic = people.use(
            crowds,
            course.answers,
            course.seed + 1000 * number,
            lambda done, of: self.demo.show(stage=f"phase {number}: {done} of {of} problems asked"),
        )
        self.demo.say(
            f"phase {number}: {traffic.answers} answers, {traffic.right / max(1, traffic.answers):.0%} of them right; "
            f"{traffic.wrong_feedback} were judged wrongly by the people"
        )
        if number == 1:
            people.spo.continual.put(CONTINUAL, continual_spec(course))
        ended = self._await_round(people, number)
        self.demo.say(f"round {number}: {ended.state}: {ended.reason}")
        return Phase(name, traffic, ended, time.monotonic() - began)

    def _await_round(self, people: People, number: int) -> ContinualRound:
        deadline = time.monotonic() + self.course.round_seconds
        while time.monotonic() < deadline:
            found = people.spo.continual.get(CONTINUAL)
            newest = next((each for each in found.history if each.number == number), None)
            if newest and newest.state in ENDED:
                return newest
            self._show(people, found, newest)
            time.sleep(POLL_SECONDS)
        raise NotReady(f"round {number} took longer than {self.course.round_seconds:g} s", code="demo_timeout")

    def _show(self, people: People, found: ContinualDetail, newest: ContinualRound | None) -> None:
        if newest is None:
            self.demo.show(stage=f"{found.new_trajectories} new trajectories are stored")
            return
        job = people.spo.get(newest.job_id) if newest.job_id else None
        self.demo.show(stage=f"round {newest.number}: {newest.state}", job=job, evaluations=())

    def _look_for_canaries(self, people: People, outcome: CourseOutcome) -> None:
        """Ask what nobody may keep, and once what may be kept: that one must be found, or the search finds nothing."""
        platform, texts = self.demo.platform, [f"canary-{secrets.token_hex(8)}" for _ in range(self.course.canaries)]
        self.demo.say(f"{len(texts)} requests without consent; looking for their texts in Redis, store and files")
        for text in texts:
            people.say_in_private(text)
        agreed = f"agreed-{secrets.token_hex(8)}"
        people.ask_anything(agreed)
        folders = (platform.redis_url, platform.state_path, platform.folder / "logs")
        outcome.canaries = len(texts)
        outcome.canary_places = places_of(texts, *folders)
        outcome.captured_canary_is_found = bool(places_of([agreed], *folders))

    def _roll_back(self, people: People, outcome: CourseOutcome, at_first: Sequence[GreedyAnswer]) -> None:
        """Take the newest version back by one call, and look whether what is served then is what was, to the bit."""
        spo = people.spo
        history = spo.serving.history(SERVED)
        if len(history) < 2:
            return
        began = time.monotonic()
        after = spo.serving.roll_back(SERVED, note="the demo takes it back")
        seconds = time.monotonic() - began
        newest, before = history[0], history[1]
        outcome.rolled_back = {
            "from": [newest.job_id, newest.version],
            "to": [after.job_id, after.version],
            "is_what_was_served_before": (after.job_id, after.version) == (before.job_id, before.version),
            "call_seconds": round(seconds, 3),
        }
        if (after.job_id, after.version) == (outcome.first_job.id, outcome.first_job.progress.weight_version):
            # Without chance, equal weights give equal answers.
            answers = people.greedy(people.problems[:LOOKED_AT])
            outcome.rolled_back |= {
                "weights_as_at_first": weights_digest(people.spo, after.job_id, after.version) == outcome.first_digest,
                "answers_as_at_first": [each.text for each in answers] == [each.text for each in at_first],
                "logprobs_as_at_first": [each.logprobs for each in answers] == [each.logprobs for each in at_first],
            }
        self.demo.say(f"rolled back in {seconds:.2f} s")


def weights_digest(spo: Client, job_id: str, version: int | None) -> str:
    """Of the bytes of a version's files."""
    (found,) = (each for each in spo.weights(job_id) if each.version == version)
    hashed = blake3()
    for path in sorted(Path(found.uri).rglob("*")):
        if path.is_file():
            hashed.update(path.name.encode()).update(path.read_bytes())
    return hashed.hexdigest()
