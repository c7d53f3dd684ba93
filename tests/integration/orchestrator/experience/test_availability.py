"""A job that starts from stored experience: asked for per training prompt, never for copies of held-out problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL
from services.orchestrator.steps import act_on
from spo import redis_keys
from spo.errors import NotFound, NotReady
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1.prompt_pb2 import Prompt
from spo.v1.value_pb2 import EstimateRequest

Document = dict[str, Any]
EVERYTHING = {"experience": [{}]}


def problem(statement: str, answer: str) -> Document:
    tests = [{"stdin": f"{number}\n", "stdout": f"{answer} {number}\n"} for number in range(4)]
    return {"statement": statement, "tests": tests, "wrong_solutions": ["print('no')", "print('never')", "1/0", "2/0"]}


@pytest.fixture
def contaminated(document: Document, tmp_path: Path) -> Document:
    """Five training problems: one asks what a held-out one asks, another has a held-out one's tests."""
    held_out = [problem("print the number twice over and then stop right there", "a"), problem("something else", "b")]
    training = [
        problem("print the number twice over and then stop right there please", "c"),
        problem("an entirely different way to ask", "b"),
        problem("count the vowels of every word in turn", "d"),
        problem("how many days has the month of the year", "e"),
        problem("the largest of all the sums of three", "f"),
    ]
    for name, rows in (("training", training), ("held_out", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"kind": "jsonl", "path": str(tmp_path / "training.jsonl"), "train_problems": 5, "evaluation_problems": 0}
    return {**document, "tasks": tasks}


def is_validated(context: AppContext, job_id: str) -> bool:
    """Whether the job is past its checks, one of which runs in a process of its own, after one more tick."""
    context.runner.tick()
    return context.jobs.state(job_id) not in (JobState.QUEUED, JobState.VALIDATING)


def estimates(context: AppContext, document: Document) -> tuple[str, list[EstimateRequest]]:
    job_id = context.jobs.submit(parse_job_spec(document))
    wait_until(lambda: is_validated(context, job_id), "the job is validated", 60)
    context.runner.tick()
    entries: Any = context.redis.xrange(redis_keys.estimates())
    return job_id, [EstimateRequest.FromString(fields[b"payload"]) for _, fields in entries]


def test_every_training_prompt_may_take_stored_experience(context: AppContext, document: Document) -> None:
    job_id, requests = estimates(context, {**document, "offline": EVERYTHING})

    assert len(requests) == 6
    assert all(request.import_experience for request in requests)
    prompts: Any = context.redis.hgetall(redis_keys.run_prompts(job_id))
    assert {Prompt.FromString(raw).text for raw in prompts.values()} == {request.prompt.text for request in requests}


def test_jobs_that_name_none_ask_for_none(context: AppContext, document: Document) -> None:
    _, requests = estimates(context, document)

    assert not any(request.import_experience or request.wrong_solutions for request in requests)


def test_copies_of_held_out_problems_take_no_stored_experience(
    context: AppContext, contaminated: Document, tmp_path: Path
) -> None:
    # Near-duplicates in a file of its own are left out of training already; those of one file are not.
    both = (tmp_path / "held_out.jsonl").read_text() + (tmp_path / "training.jsonl").read_text()
    (tmp_path / "training.jsonl").write_text(both)
    tasks = {**contaminated["tasks"], "evaluation_problems": 2}
    found: dict[bool, int] = {}
    for seed in range(40):
        requested = {**contaminated, "tasks": {**tasks, "seed": seed}, "offline": EVERYTHING}
        held_out = {each.statement for each in context.library.load(parse_job_spec(requested).tasks).evaluation}
        if held_out == {"print the number twice over and then stop right there", "something else"}:
            break
    else:
        pytest.fail("no seed holds out the two")

    for decontaminate in (True, False):
        context.redis.delete(redis_keys.estimates())
        document = {**requested, "offline": {**EVERYTHING, "decontaminate": decontaminate}}
        job_id, requests = estimates(context, document)
        found[decontaminate] = sum(request.import_experience for request in requests)
        told = [event.body for event in context.jobs.events(job_id) if event.kind == "experience"]
        assert [each["prompts_left_out"] for each in told] == ([2] if decontaminate else [])
        context.jobs.transition(job_id, JobState.CANCELLING, "enough")
        context.runner.tick()

    assert found == {True: 3, False: 5}


def test_published_wrong_solutions_come_along_as_many_as_right_ones_would(
    context: AppContext, contaminated: Document
) -> None:
    _, requests = estimates(context, {**contaminated, "offline": {"wrong_human_solutions": True}})

    assert [len(request.wrong_solutions) for request in requests] == [3] * 5


def test_a_job_waits_until_the_run_it_names_is_stored(context: AppContext, document: Document) -> None:
    before = context.jobs.submit(parse_job_spec(document))
    context.redis.set(redis_keys.run_state(before), "succeeded")
    context.redis.zrem(redis_keys.jobs_in_state("queued"), before)
    context.redis.hset(redis_keys.replay_counters(before), "number", 10)
    context.redis.hset(redis_keys.replay_stored(before), "written", 7)
    job_id = context.jobs.submit(parse_job_spec({**document, "offline": {"experience": [{"run": before}]}}))
    for _ in range(3):
        context.runner.tick()

    assert context.jobs.state(job_id) is JobState.VALIDATING
    assert context.redis.xlen(redis_keys.estimates()) == 0

    context.redis.hset(redis_keys.replay_stored(before), "written", 10)
    wait_until(lambda: is_validated(context, job_id), "the job goes on", 60)
    assert context.jobs.state(job_id) is JobState.ESTIMATING


def test_jobs_without_values_take_stored_experience_too(context: AppContext, document: Document) -> None:
    offline = {**EVERYTHING, "human_solutions": False, "keep_reference_samples": False}
    losses = [{"objective": "supervised"}]
    mix = [{"source": "other_run", "share": 1.0}]
    requested = {**document, "value": None, "offline": offline, "algorithm": {"losses": losses}, "replay": {"mix": mix}}

    job_id, requests = estimates(context, requested)

    assert context.jobs.state(job_id) is JobState.ESTIMATING
    assert [(request.sampling.samples, request.import_experience) for request in requests] == [(0, True)] * 6


def test_a_job_is_not_deleted_while_its_experience_is_on_its_way(context: AppContext, document: Document) -> None:
    job_id = context.jobs.submit(parse_job_spec(document))
    act_on(context.jobs, job_id, CANCEL)
    context.redis.hset(redis_keys.replay_counters(job_id), "number", 10)
    context.redis.hset(redis_keys.replay_stored(job_id), "written", 7)

    with pytest.raises(NotReady, match="being stored"):
        context.deletion.delete(job_id)
    context.redis.hset(redis_keys.replay_stored(job_id), "written", 10)
    context.deletion.delete(job_id)

    with pytest.raises(NotFound):
        context.jobs.state(job_id)
