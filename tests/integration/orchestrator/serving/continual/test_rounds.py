"""Rounds of a continual job on a real store, jobs and served models: what begins them, what is served, what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from ulid import ULID

from services.orchestrator import continual, redis_keys as own_keys
from services.orchestrator.capture import Captured, CapturedChoice, Feedback
from services.orchestrator.container import AppContext
from services.orchestrator.continual import ContinualJob, Round
from services.orchestrator.job_records import report_writes
from services.orchestrator.serving import Change, Target
from spo.experience.columns import StoredTrajectory
from spo.experience.store import Origin
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.runs import trajectory
from spo.v1.prompt_pb2 import Prompt
from tests.integration.orchestrator.lifecycle.test_forks import seal

Document = dict[str, Any]
MIX = {"replay": {"mix": [{"source": "online", "share": 0.5}, {"source": "other_run", "share": 0.5}]}}
PROBLEMS = 40


class Loop:
    """One continual job, `nightly`, that improves `helper`; time is turned by hand."""

    def __init__(self, context: AppContext, api: httpx.Client) -> None:
        self.context = context
        self.api = api
        self.ahead = timedelta()
        self.files = 0

    def put(self, **fields: Any) -> httpx.Response:
        body = {"serves": "helper", "experience": ["traffic"], "overrides": MIX, **fields}
        return self.api.put("/v1/continual/nightly", json=body)

    def store(self, rows: int, run: str = "traffic") -> None:
        self.files += 1
        made = [
            StoredTrajectory(found, Prompt(prompt_id=found.prompt_id, text="words", task_set="toy"))
            for found in (trajectory(1000 * self.files + number, run_id=run) for number in range(rows))
        ]
        self.context.experience.write(Origin(run, "import", "toy"), f"part-{self.files}", made)

    def tick(self, **later: float) -> Document:
        """One look, so much later; returns the newest round, empty before the first."""
        self.ahead += timedelta(**later)
        self.context.continual_loop.tick(datetime.now(UTC) + self.ahead)
        return next(iter(self.shown()["history"]), {})

    def shown(self) -> Document:
        found: Document = self.api.get("/v1/continual/nightly").json()
        return found

    def train(self, job_id: str, state_path: Path) -> None:
        """The job of a round publishes version 1 and succeeds."""
        publish(self.context, job_id, state_path, 1)
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING, JobState.SUCCEEDED):
            assert self.context.jobs.transition(job_id, state, "test"), state

    def evaluate(self, found: Document, rates: tuple[float, float]) -> None:
        """Both evaluations of a round end: so much of each problem is solved before and after."""
        requests = self.context.evaluations.requests
        for evaluation_id, rate in zip(found["evaluations"], rates, strict=True):
            rows = [
                {"prompt_id": f"p{number}", "samples": 20, "correct": round(20 * rate)} for number in range(PROBLEMS)
            ]
            requests.update(replace(requests.get(evaluation_id), state="succeeded", result={"per_problem": rows}))

    def serving(self) -> tuple[str, int | None]:
        found = self.context.served_models.get("", "helper")
        return found.job_id, found.version


def publish(context: AppContext, job_id: str, state_path: Path, version: int) -> None:
    head = {"version": version, "parent": version - 1, "step": 10 * version, "dtype": "float32"}
    folder = state_path / "weights" / job_id / f"{version:08d}"
    told = {"version": version, "step": 10 * version, "uri": str(folder)}
    told["manifest_digest"] = seal(folder, head, "model-00001.safetensors", version)
    record = json.dumps(told | {"size_bytes": 1, "published_at": "2026-01-01T00:00:00Z"})
    context.redis.hset(own_keys.job_weights(job_id), str(version), record)


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def parent(context: AppContext, document: Document, state_path: Path) -> str:
    """An ended job whose version 2 is served as `helper`."""
    job_id = context.jobs.submit(parse_job_spec(document))
    for version in (1, 2):
        publish(context, job_id, state_path, version)
    context.jobs.fail(job_id, "test", "it ended")
    context.served_models.publish("", "helper", Target(job_id, 2), Change("test"))
    return job_id


@pytest.fixture
def loop(context: AppContext, api: httpx.Client, parent: str) -> Loop:
    return Loop(context, api)


def test_a_better_version_is_served_and_the_next_round_starts_from_it(
    loop: Loop, parent: str, state_path: Path, context: AppContext
) -> None:
    assert loop.put(schedule={"min_new_trajectories": 3}).status_code == 201
    loop.store(2)
    assert not loop.tick()
    loop.store(1)
    begun = loop.tick()
    assert (begun["state"], begun["parent_job"], begun["parent_version"]) == ("training", parent, 2)
    assert begun["learned_from"] == {"traffic": 3}
    spec = context.jobs.spec(begun["job_id"])
    assert spec.name == "nightly round 1"
    assert [stored.run for stored in spec.offline.experience] == ["traffic"]
    assert spec.model.path != context.jobs.spec(parent).model.path

    assert loop.tick()["state"] == "training"
    loop.train(begun["job_id"], state_path)
    asked = loop.tick()
    assert asked["state"] == "evaluating"
    versions = [context.evaluations.requests.get(each).version for each in asked["evaluations"]]
    assert versions == [0, 1]
    assert loop.tick()["state"] == "evaluating"

    loop.evaluate(asked, (0.4, 0.6))
    ended = loop.tick()
    assert ended["state"] == "served"
    assert ended["comparison"]["gain"] == pytest.approx(0.2)
    assert loop.serving() == (begun["job_id"], 1)
    # Nothing new: what the round's own job stores does not count.
    loop.store(9, run=begun["job_id"])
    assert loop.tick(days=3)["number"] == 1
    loop.store(3)
    after = loop.tick()
    assert (after["number"], after["parent_job"], after["parent_version"]) == (2, begun["job_id"], 1)


def test_the_page_shows_what_was_served_when_and_why(loop: Loop, state_path: Path, api: httpx.Client) -> None:
    assert "No name is served yet" not in api.get("/models").text
    loop.put()
    assert "no round yet" in api.get("/models").text
    loop.store(1)
    begun = loop.tick()
    loop.train(begun["job_id"], state_path)
    loop.evaluate(loop.tick(), (0.4, 0.6))
    loop.tick()

    page = api.get("/models").text
    assert "gain +0.200" in page
    assert "continual job nightly" in page
    assert 'hx-post="/v1/served-models/helper/rollback"' in page


def test_what_is_not_shown_to_be_better_is_not_served(loop: Loop, parent: str, state_path: Path) -> None:
    loop.put()
    loop.store(1)
    begun = loop.tick()
    loop.train(begun["job_id"], state_path)
    loop.evaluate(loop.tick(), (0.4, 0.35))

    ended = loop.tick()

    assert (ended["state"], loop.serving()) == ("kept", (parent, 2))
    assert "not shown to be better: pass@1 0.400 -> 0.350" in ended["reason"]


def test_the_source_that_disagrees_with_the_rest_is_named(
    loop: Loop, state_path: Path, context: AppContext, api: httpx.Client
) -> None:
    loop.put()
    loop.store(1)
    begun = loop.tick()
    levels = {"residual_abs/north": 0.3, "residual_abs/east": 0.4, "residual_abs/west": 0.7, "reward": -0.5}
    reports = [(step, {name: level + 0.01 * (step % 2) for name, level in levels.items()}) for step in range(10)]
    context.jobs.write(*report_writes(begun["job_id"], reports))
    loop.train(begun["job_id"], state_path)
    loop.evaluate(loop.tick(), (0.4, 0.35))

    ended = loop.tick()

    assert [(each["source"], each["suspect"]) for each in ended["sources"]] == [
        ("west", True),
        ("east", False),
        ("north", False),
    ]
    assert "feedback that disagrees with the rest: west" in ended["reason"]
    assert "<b>west</b>" in api.get("/models").text


def test_a_change_by_hand_meanwhile_stands(loop: Loop, parent: str, state_path: Path, context: AppContext) -> None:
    loop.put()
    loop.store(1)
    begun = loop.tick()
    loop.train(begun["job_id"], state_path)
    loop.evaluate(loop.tick(), (0.2, 0.9))
    context.served_models.publish("", "helper", Target(parent, 1), Change("a person"))

    assert loop.tick()["state"] == "kept"
    assert loop.serving() == (parent, 1)


def test_a_version_is_rolled_back_by_one_call_and_the_next_round_starts_from_there(
    loop: Loop, parent: str, state_path: Path, context: AppContext
) -> None:
    loop.put()
    loop.store(1)
    begun = loop.tick()
    loop.train(begun["job_id"], state_path)
    loop.evaluate(loop.tick(), (0.2, 0.9))
    assert loop.tick()["state"] == "served"

    context.served_models.roll_back("", "helper", Change("a person"))

    assert loop.serving() == (parent, 2)
    loop.store(1)
    assert (loop.tick()["parent_job"], loop.tick()["parent_version"]) == (parent, 2)


def test_one_whose_name_is_served_no_more_says_so_until_it_is_again(
    loop: Loop, parent: str, api: httpx.Client, context: AppContext
) -> None:
    loop.put(schedule={"every_hours": 5})
    loop.store(1)
    context.served_models.remove("", "helper", Change("a person"))

    # Long before a round is due.
    assert not loop.tick()

    assert "nothing is served as helper" in loop.shown()["waits"]
    since = loop.shown()["waits_since"]
    assert not loop.tick(hours=6)
    assert loop.shown()["waits_since"] == since
    assert "nothing is served as helper" in api.get("/models").text
    found = [entry for entry in api.get("/v1/attention").json()["items"] if entry["subject"] == "continual job nightly"]
    assert [entry["page"] for entry in found] == ["/models"]

    context.served_models.roll_back("", "helper", Change("a person"))
    assert loop.tick()["parent_job"] == parent
    assert (loop.shown()["waits"], loop.shown()["waits_since"]) == ("", "")
    assert loop.api.get("/v1/continual").json()["items"][0]["waits"] == ""


def test_one_that_is_due_and_has_too_little_to_learn_from_says_how_much_is_missing(
    loop: Loop, api: httpx.Client, context: AppContext
) -> None:
    loop.put(schedule={"min_new_trajectories": 3})
    loop.store(2)

    assert not loop.tick()

    lacking = "its next round waits for traffic: 2 of 3 new trajectories are stored in the runs that it learns from"
    assert loop.shown()["waits"] == lacking
    assert loop.shown()["waits_since"]
    subjects = [entry["subject"] for entry in api.get("/v1/attention").json()["items"]]
    assert "continual job nightly" not in subjects, "nothing is wrong with it"


def test_a_round_that_its_makers_quota_holds_back_says_so_until_there_is_room(
    loop: Loop, parent: str, context: AppContext
) -> None:
    loop.put(schedule={"min_new_trajectories": 1})
    made = context.continual.get("nightly", None)
    context.continual.put(replace(made, max_active_jobs=0))
    loop.store(1)

    assert loop.tick()["state"] == "starting"

    assert loop.shown()["waits"] == "the round waits: 0 jobs have not ended"
    context.continual.put(replace(made, max_active_jobs=1))
    assert loop.tick()["state"] == "training"
    assert loop.shown()["waits"] == ""


CRASHES = {"before the job is noted": "training", "between the two": "evaluating", "before the end is noted": "served"}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_between_two_steps_costs_nothing(
    loop: Loop, state_path: Path, context: AppContext, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.put()
    loop.store(1)
    lost = CRASHES[crash]
    note = context.continual.change_round

    def dies(job: ContinualJob, changed: Round) -> None:
        if changed.state == lost:
            raise RuntimeError("the process ends here")
        note(job, changed)

    def step() -> Document:
        """The step, cut off once where it would note this state, then taken again by the next process."""
        monkeypatch.setattr(context.continual, "change_round", dies)
        loop.tick()
        monkeypatch.setattr(context.continual, "change_round", note)
        return loop.tick()

    before = len(context.jobs.page([], "", 100, None).job_ids)
    begun = step()
    loop.train(begun["job_id"], state_path)
    loop.evaluate(step(), (0.2, 0.9))
    ended = step()

    assert (ended["state"], ended["number"]) == ("served", 1)
    assert len(context.jobs.page([], "", 100, None).job_ids) == before + 1
    assert len(context.served_models.history("", "helper")) == 2
    assert [each.version for each in context.evaluations.requests.all()] == [1, 0]


def test_captured_traffic_and_what_is_said_of_it_later_is_learned_from(
    loop: Loop, context: AppContext, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continual, "COLLECT_SECONDS", 0.0)
    statement = context.library.load(context.jobs.spec(parent).tasks).train[0].statement
    ids = [f"cmpl-{ULID()}" for _ in range(3)]
    for number, completion_id in enumerate(ids):
        choice = CapturedChoice(0, f"print({number})", "stop", 2, 2, (3, 4))
        asked: tuple[dict[str, str], ...] = ({"role": "prompt", "content": statement},)
        context.captures.keep(Captured(completion_id, "", "a person", "helper", parent, number + 1, asked, (choice,)))
    answer = loop.put(experience=[], traffic={"name": "traffic"}, schedule={"min_new_trajectories": 2})
    assert answer.status_code == 201, answer.text
    # Nobody has said anything of it yet.
    assert not loop.tick()
    context.captures.give_feedback("", ids[2], 0, Feedback(thumbs="up"))
    assert not loop.tick()
    assert loop.shown()["new_trajectories"] == 1
    context.captures.give_feedback("", ids[0], 0, Feedback(score=0.25))

    begun = loop.tick()

    assert begun["learned_from"] == {"traffic": 2}
    assert [stored.run for stored in context.jobs.spec(begun["job_id"]).offline.experience] == ["traffic"]
    (file,) = {file.origin.kind for file in context.experience.files("traffic")}
    assert file == "traffic"


def test_a_failed_job_ends_its_round_with_the_reason_and_not_the_next_one(loop: Loop, context: AppContext) -> None:
    loop.put()
    loop.store(1)
    context.jobs.fail(loop.tick()["job_id"], "test", "no such luck")

    assert (loop.tick()["state"], "no such luck" in loop.tick()["reason"]) == ("failed", True)
    loop.store(1)
    assert (loop.tick()["number"], loop.tick()["state"]) == (2, "training")


def test_a_gate_that_cannot_be_asked_ends_the_round_with_the_reason(
    loop: Loop, context: AppContext, state_path: Path, parent: str, tmp_path: Path
) -> None:
    tasks = tmp_path / "gate.jsonl"
    tests = [{"stdin": "1", "stdout": "1"}]
    rows = [{"problem_id": name, "prompt": f"add {name}", "tests": tests} for name in ("a", "b")]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    put = loop.put(gate={"tasks": {"kind": "jsonl", "path": str(tasks), "evaluation_problems": 1}})
    assert put.status_code == 201, put.text
    loop.store(1)
    begun = loop.tick()
    loop.train(begun["job_id"], state_path)
    tasks.unlink()

    ended = loop.tick()

    assert (ended["state"], loop.serving()) == ("failed", (parent, 2))
    assert "gate.jsonl" in ended["reason"]


def test_the_clock_holds_a_round_and_a_person_may_begin_one(loop: Loop, api: httpx.Client) -> None:
    loop.put(schedule={"every_hours": 5})
    loop.store(4)
    assert not loop.tick(hours=4)
    assert api.post("/v1/continual/nightly/rounds").json()["round_wanted"]
    assert loop.tick()["number"] == 1
    assert not loop.shown()["round_wanted"]


def test_a_paused_one_begins_nothing_by_itself(loop: Loop) -> None:
    loop.put(paused=True)
    loop.store(4)
    assert not loop.tick(days=9)
    assert loop.put().status_code == 200
    assert loop.tick()["number"] == 1


def test_one_that_cannot_be_carried_out_is_refused_with_a_pointer(loop: Loop) -> None:
    cases: tuple[tuple[Callable[[], httpx.Response], int, str], ...] = (
        (lambda: loop.put(serves="nobody"), 404, ""),
        (lambda: loop.put(overrides={}), 422, "/overrides/replay/mix"),
        (lambda: loop.put(overrides=MIX | {"trainer": {"steps": -1}}), 422, "/overrides/trainer/steps"),
        (lambda: loop.put(schedule={"daily_at": "25:00"}), 422, "/schedule/daily_at"),
        (lambda: loop.put(extra=1), 422, "/extra"),
    )
    for put, status, pointer in cases:
        answer = put()
        assert answer.status_code == status, answer.text
        assert pointer in [""] + [fault["pointer"] for fault in answer.json().get("errors", ())], answer.text


def test_a_deleted_one_leaves_what_is_served_and_its_jobs(loop: Loop, api: httpx.Client, parent: str) -> None:
    loop.put()
    loop.store(1)
    job_id = loop.tick()["job_id"]

    assert api.delete("/v1/continual/nightly").status_code == 204

    assert api.get("/v1/continual/nightly").status_code == 404
    assert api.get(f"/v1/jobs/{job_id}").status_code == 200
    assert loop.serving() == (parent, 2)
    loop.put()
    assert loop.shown()["history"] == []
    assert loop.tick()["job_id"] not in ("", job_id), "one that is made anew under the same name has its own rounds"
