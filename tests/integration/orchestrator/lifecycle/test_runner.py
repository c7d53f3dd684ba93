"""A job's whole life, and what a restart, a cancel or trouble makes of it; trainer and value-estimation are played."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL, PAUSE, RESUME, evaluation_results
from services.orchestrator.steps import act_on
from services.orchestrator.versions import publish_version
from spo import redis_keys
from spo.client import Client
from spo.messaging.streams import recovery
from spo.messaging.streams.stage import Consumer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest, PromptValue


@contextmanager
def at_work(context: AppContext) -> Iterator[None]:
    """The desk's loops in threads, as its process runs them."""
    loops = (context.runner.run, context.dispatcher.run, context.evaluations.run)
    threads = [threading.Thread(target=loop, args=(context.stop,)) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        context.stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def estimate_everything(context: AppContext, job_id: str) -> list[str]:
    """Plays value-estimation: gives every published prompt a value; returns the prompts asked for."""
    asked = requests(context)
    for prompt_id in asked:
        value = PromptValue(prompt_id=prompt_id, samples=8, successes=1)
        context.redis.hset(redis_keys.run_values(job_id), prompt_id, value.SerializeToString())
    return asked


def requests(context: AppContext) -> list[str]:
    found: Any = context.redis.xrange(redis_keys.estimates())
    return [EstimateRequest.FromString(fields[b"payload"]).prompt.prompt_id for _, fields in found]


def state(context: AppContext, job_id: str) -> JobState:
    return context.jobs.state(job_id)


def submitted(context: AppContext, document: dict[str, Any]) -> str:
    return context.jobs.submit(parse_job_spec(document))


def bring_to_running(context: AppContext, job_id: str) -> None:
    wait_until(lambda: len(requests(context)) == 6, "all prompts are asked for")
    estimate_everything(context, job_id)
    wait_until(lambda: state(context, job_id) is JobState.RUNNING, "the job runs")


def test_a_job_goes_from_submit_to_success(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        bring_to_running(context, job_id)
        grant = context.leases.wait_for_job("trainer", 5)
        owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
        for version in (1, 2):
            reports = [wire.StepReport(step=version * 10, metrics={"loss": 1 / version})]
            context.leases.renew(wire.RenewLeaseRequest(**owner, reports=reports))
            publish_version(
                context.jobs,
                wire.PublishWeightsRequest(**owner, version=version, step=version * 10, uri="w", manifest_digest="d"),
            )
        context.leases.finish(wire.FinishRunRequest(**owner, final_step=20))
        wait_until(lambda: state(context, job_id) is JobState.SUCCEEDED, "the job succeeds")

    results = evaluation_results(context.redis, job_id)
    assert (results[0]["step"], results[-1]["step"], results[-1]["version"]) == (0, 20, 2)
    assert results[0]["pass_at_k"]["1"]["value"] == pytest.approx(0.5)
    assert results[0]["distinct_solutions"] == 1.0
    assert results[0]["entropy"] == pytest.approx(0.5)
    assert set(peers.inference.versions) >= {0, 2}
    assert [e.body["to"] for e in context.jobs.events(job_id) if e.kind == "state"] == [
        "queued",
        "validating",
        "estimating",
        "running",
        "succeeded",
    ]


def test_the_judges_have_every_test_set_before_a_prompt_is_asked_for(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        wait_until(lambda: requests(context), "a prompt is asked for")

    tasks = context.library.load(context.jobs.spec(job_id).tasks)
    assert {problem.tests_digest for problem in (*tasks.train, *tasks.evaluation)} <= peers.judge.uploaded


def test_a_restarted_orchestrator_adopts_the_job_and_asks_for_no_prompt_twice(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    first = open_context()
    job_id = submitted(first, document)
    with at_work(first):
        wait_until(lambda: len(requests(first)) == 6, "all prompts are asked for")
    asked = requests(first)

    second = open_context()
    with at_work(second):
        wait_until(lambda: any(e.kind == "adopted" for e in second.jobs.events(job_id)), "the job is adopted")
        bring_to_running(second, job_id)

    assert requests(second) == asked
    assert len(set(asked)) == 6


def test_a_job_that_waited_starts_when_the_running_one_ends(context: AppContext, document: dict[str, Any]) -> None:
    first, second = submitted(context, document), submitted(context, document)
    with at_work(context):
        wait_until(lambda: state(context, first) is JobState.ESTIMATING, "the first job estimates")
        assert state(context, second) is JobState.QUEUED
        act_on(context.jobs, first, CANCEL)
        wait_until(lambda: state(context, second) is JobState.ESTIMATING, "the second job's turn comes")

    assert state(context, first) is JobState.CANCELLED


def test_a_cancelled_job_ends_when_its_trainer_lets_go(context: AppContext, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        bring_to_running(context, job_id)
        grant = context.leases.wait_for_job("trainer", 5)
        owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
        act_on(context.jobs, job_id, CANCEL)
        assert context.leases.renew(wire.RenewLeaseRequest(**owner)) == wire.DIRECTIVE_CANCEL
        assert state(context, job_id) is JobState.CANCELLING
        context.leases.finish(wire.FinishRunRequest(**owner, error_code="cancelled", error_message="cancelled"))
        wait_until(lambda: state(context, job_id) is JobState.CANCELLED, "the job is cancelled")


def test_a_pause_waits_for_the_checkpoint_and_a_resume_goes_on(context: AppContext, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        bring_to_running(context, job_id)
        grant = context.leases.wait_for_job("trainer", 5)
        owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
        context.leases.renew(wire.RenewLeaseRequest(**owner, reports=[wire.StepReport(step=5)]))
        act_on(context.jobs, job_id, PAUSE)
        assert context.leases.renew(wire.RenewLeaseRequest(**owner)) == wire.DIRECTIVE_PAUSE
        assert state(context, job_id) is JobState.PAUSING
        context.leases.checkpoint(wire.ReportCheckpointRequest(**owner, step=5, path="p", manifest_digest="d"))
        assert state(context, job_id) is JobState.PAUSED
        assert context.leases.renew(wire.RenewLeaseRequest(**owner)) == wire.DIRECTIVE_CANCEL
        context.leases.finish(wire.FinishRunRequest(**owner, error_code="cancelled", error_message="cancelled"))
        assert context.leases.wait_for_job("trainer", 0).run_id == "", "nobody trains a paused job"
        act_on(context.jobs, job_id, RESUME)
        assert context.leases.wait_for_job("another", 10).run_id == job_id
    assert state(context, job_id) is JobState.RUNNING


def test_a_trainer_that_gives_up_fails_the_job_with_its_reason(context: AppContext, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        bring_to_running(context, job_id)
        grant = context.leases.wait_for_job("trainer", 5)
        owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
        context.leases.finish(
            wire.FinishRunRequest(**owner, error_code="q_mismatch", error_message="Q_T is not Qhat_0")
        )

    record = context.jobs.record(job_id)
    assert state(context, job_id) is JobState.FAILED
    assert (record.failure_code, record.failure_message) == ("q_mismatch", "Q_T is not Qhat_0")


def test_estimates_given_up_on_fail_the_job_loudly(context: AppContext, document: dict[str, Any]) -> None:
    job_id = submitted(context, document)
    with at_work(context):
        wait_until(lambda: len(requests(context)) == 6, "all prompts are asked for")
        reader = Consumer(context.redis, redis_keys.estimates(), redis_keys.VALUE_GROUP, "value")
        for entry in reader.read(4):
            reader.dead_letter(entry, "poison")
        wait_until(lambda: state(context, job_id) is JobState.FAILED, "the job fails")

    assert context.jobs.record(job_id).failure_code == "too_many_dead_letters"
    assert recovery.counts_of(context.redis, job_id)[redis_keys.estimates()].count == 4
    told = [event.body for event in context.jobs.events(job_id) if event.kind == "dead_letters"]
    assert (told[-1]["stream"], told[-1]["reason"]) == ("estimates", "poison")


def test_training_begins_only_when_the_pivotal_tokens_are_searched(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id = submitted(context, {**document, "value": {"pivotal": {}}})
    with at_work(context):
        wait_until(lambda: len(requests(context)) == 6, "all prompts are asked for")
        prompts = estimate_everything(context, job_id)
        wait_until(lambda: context.redis.xlen(redis_keys.pivotal()) == 6, "all searches are asked for")
        assert state(context, job_id) is JobState.ESTIMATING
        found: Any = context.redis.xrange(redis_keys.pivotal())
        asked = [PivotalRequest.FromString(fields[b"payload"]) for _, fields in found]
        assert [(each.run_id, each.prompt.prompt_id) for each in asked] == [(job_id, prompt) for prompt in prompts]

        for prompt_id in prompts:
            context.redis.hset(redis_keys.run_pivotal(job_id), prompt_id, 1)

        wait_until(lambda: state(context, job_id) is JobState.RUNNING, "the job runs")


def test_a_standstill_becomes_one_event_that_says_who_is_missing(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(stall_seconds=0.1)
    job_id = submitted(context, document)
    with at_work(context):
        stalled = wait_until(
            lambda: [e for e in context.jobs.events(job_id) if e.kind == "stalled"], "the standstill is told"
        )

    assert "no live replica of value-estimation" in stalled[0].body["waits"]


def test_an_evaluation_waits_for_a_replica_that_still_loads(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    peers.inference.unready = 3
    job_id = submitted(context, document)
    with at_work(context):
        wait_until(lambda: evaluation_results(context.redis, job_id), "the reference is evaluated")

    assert evaluation_results(context.redis, job_id)[0]["problems"] == 3


def test_a_job_of_no_steps_ends_with_the_values_of_its_prompts_and_says_them(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = submitted(context, document | {"trainer": {"steps": 0}})
    with at_work(context):
        wait_until(lambda: len(requests(context)) == 6, "all prompts are asked for")
        before = api.get(f"/v1/jobs/{job_id}/prompts").json()["items"]
        assert [(each["samples"], each["successes"]) for each in before] == [(None, None)] * 6
        estimate_everything(context, job_id)
        wait_until(lambda: state(context, job_id) is JobState.SUCCEEDED, "the job has succeeded")

        with Client(str(api.base_url)) as client:
            found = client.prompts(job_id)
        pages = [api.get(f"/v1/jobs/{job_id}/prompts", params={"limit": 4, "cursor": at}).json() for at in ("", "4")]

    assert [(each.samples, each.successes) for each in found] == [(8, 1)] * 6
    assert {(each.lowest_reward, each.highest_reward, each.with_solutions) for each in found} == {(-1.0, 0.0, True)}
    assert [len(page["items"]) for page in pages] == [4, 2]
    assert [page["next_cursor"] for page in pages] == ["4", None]
    assert context.leases.lease(job_id).epoch == 0
    moves = [event.body["to"] for event in context.jobs.events(job_id) if event.kind == "state"]
    assert moves == ["queued", "validating", "estimating", "succeeded"]
    assert evaluation_results(context.redis, job_id) == []


def test_problems_that_are_left_out_are_told_by_the_jobs_events(
    context: AppContext, document: dict[str, Any], tmp_path: Path
) -> None:
    public = [{"stdin": "", "stdout": "1", "public": True}, {"stdin": "", "stdout": "1"}]
    rows = [
        *({"statement": f"Print {number}.", "tests": public} for number in range(4)),
        {"statement": "Print without a public test.", "tests": public[1:]},
        {"statement": "How many?", "answer": {"expected": ["1"]}},
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"kind": "jsonl", "path": str(file), "evaluation_problems": 0, "reward": {"tests": "public"}}
    job_id = submitted(context, document | {"tasks": tasks})

    with at_work(context):
        wait_until(lambda: len(requests(context)) == 5, "the prompts that can be decided are asked for")

    reasons = [event.body.get("reason", "") for event in context.jobs.events(job_id)]
    assert "5 problems ready; 1 training problems without public tests are left out" in reasons
