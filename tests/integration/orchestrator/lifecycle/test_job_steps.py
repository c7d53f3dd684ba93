"""One job's trouble is its own: steps that block or raise, histories that cannot be, jobs that are not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import structlog

from services.orchestrator import redis_keys as own_keys, steps
from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document, job_summaries
from services.orchestrator.service import OrchestratorService
from spo import redis_keys
from spo.errors import Unreachable
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest, HeartbeatResponse


@pytest.fixture
def roomy(open_context: Any) -> AppContext:
    """With room for several jobs at once."""
    context: AppContext = open_context(max_running_jobs=10)
    return context


@pytest.fixture
def at_work(roomy: AppContext) -> Iterator[AppContext]:
    """Its runner's loop in a thread."""
    thread = threading.Thread(target=roomy.runner.run, args=(roomy.stop,))
    yield roomy
    roomy.stop.set()
    if thread.ident:
        thread.join(20)


def submit(context: AppContext, document: dict[str, Any], name: str) -> str:
    return context.jobs.submit(parse_job_spec(document | {"name": name}))


def test_a_step_that_blocks_delays_no_other_job_and_is_named(
    at_work: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, healthy = (submit(at_work, document, name) for name in ("blocked", "healthy"))
    validate, release, calls = at_work.runner.preparation.validate, threading.Event(), []

    def validate_or_block(job_id: str) -> None:
        calls.append(job_id)
        if job_id == blocked:
            release.wait(60)
        validate(job_id)

    monkeypatch.setattr(at_work.runner.preparation, "validate", validate_or_block)
    monkeypatch.setattr(steps, "LONG_STEP_SECONDS", 0.5)
    threading.Thread(target=at_work.runner.run, args=(at_work.stop,)).start()

    wait_until(lambda: at_work.jobs.state(healthy) is JobState.ESTIMATING, "the healthy job goes on", 30)
    wait_until(lambda: at_work.monitor.waits(blocked, JobState.VALIDATING), "the blocked one says so", 30)
    assert "has taken" in at_work.monitor.waits(blocked, JobState.VALIDATING)[0]
    assert calls.count(blocked) == 1, "one step of a job at a time"
    release.set()
    wait_until(lambda: at_work.jobs.state(blocked) is JobState.ESTIMATING, "the blocked job goes on too", 30)
    wait_until(lambda: not at_work.monitor.waits(blocked, JobState.VALIDATING), "nothing is waited for", 30)


def test_a_step_that_waits_for_a_service_says_what_for(
    roomy: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(roomy, document, "waiting")

    def refuse(job: str) -> None:
        raise Unreachable("sandbox-judge at nowhere did not answer")

    with monkeypatch.context() as patched:
        patched.setattr(roomy.runner.preparation, "validate", refuse)
        roomy.runner.tick()
    assert roomy.monitor.waits(job_id, JobState.VALIDATING) == ["sandbox-judge at nowhere did not answer"]
    assert roomy.jobs.state(job_id) is JobState.VALIDATING

    def goes_on() -> bool:
        roomy.runner.tick()
        return roomy.jobs.state(job_id) is JobState.ESTIMATING

    wait_until(goes_on, "its prompts are checked", 60)
    assert roomy.monitor.waits(job_id, JobState.VALIDATING) == []


def test_a_job_whose_history_cannot_be_fails_by_name_and_the_others_are_adopted(
    roomy: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    damaged, healthy = (submit(roomy, document, name) for name in ("damaged", "healthy"))
    event = {"at": "t", "actor": "nobody", "kind": "state", "body": "{}", "from": "paused", "to": "running"}
    redis_client.xadd(own_keys.job_events(damaged), event, id="2-0")  # type: ignore[arg-type]

    roomy.runner.adopt()
    roomy.runner.tick()

    assert roomy.jobs.state(damaged) is JobState.FAILED
    assert roomy.jobs.record(damaged).failure_code == "history_damaged"
    assert roomy.jobs.state(healthy) is not JobState.QUEUED
    assert "adopted" in [event.kind for event in roomy.jobs.events(healthy)]


@pytest.mark.parametrize("key", [own_keys.job_events, redis_keys.job_record])
def test_what_redis_says_of_one_jobs_keys_holds_up_that_job_alone(
    roomy: AppContext,
    redis_client: redis.Redis,
    document: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    key: Callable[[str], str],
) -> None:
    # A process of its own, that begins slowly; this is about what comes after it.
    monkeypatch.setattr(roomy.runner.preparation.model_check, "of_all_prompts", lambda *asked: {})
    names = ("queued", "running", "healthy")
    queued, running, healthy = (submit(roomy, document, name) for name in names)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        roomy.jobs.transition(running, state, "test")
    for damaged in (queued, running):
        redis_client.set(key(damaged), "by a hand that meant another key")

    roomy.runner.adopt()
    roomy.runner.tick()

    assert "adopted" in [event.kind for event in roomy.jobs.events(healthy)]
    wait_until(lambda: _moves(roomy, healthy), "the healthy job goes on", 60, 0.3)
    for damaged, state in ((queued, JobState.QUEUED), (running, JobState.RUNNING)):
        assert roomy.jobs.state(damaged) is state, "nothing was lost of it, and it can be mended"
        told = job_document(roomy, damaged).waits[0]
        assert told.startswith("Redis refuses what the job needs:")
        assert "WRONGTYPE" in told
        assert f"another kind of value than it should hold is in {key(damaged)}" in told
    listed = {summary.id: summary for summary in job_summaries(roomy, [queued, running, healthy])}
    assert [listed[each].state for each in (queued, running)] == [JobState.QUEUED, JobState.RUNNING]
    assert listed[healthy].name == "healthy"
    assert [found.id for found in roomy.watch.manifests.save_all("epoch")] == []


@pytest.mark.parametrize("key", [redis_keys.job_record, redis_keys.run_spec, own_keys.job_lease])
def test_trainers_prompts_and_replicas_pass_by_a_job_whose_keys_are_damaged(
    roomy: AppContext, redis_client: redis.Redis, document: dict[str, Any], key: Callable[[str], str]
) -> None:
    damaged, healthy = (submit(roomy, document, name) for name in ("damaged", "healthy"))
    for job_id in (damaged, healthy):
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            roomy.jobs.transition(job_id, state, "test")
    redis_client.delete(key(damaged))
    if key is redis_keys.run_spec:
        redis_client.hset(key(damaged), "not", "a spec")
    else:
        redis_client.set(key(damaged), "no record, no lease")
    for number in (1, 2):
        roomy.replicas.beat(HeartbeatRequest(replica_id=f"inference-{number}", pool="inference"))

    assert roomy.leases.wait_for_job("trainer-1", 0).run_id == healthy
    roomy.dispatcher._dispatch_or_fail(damaged)
    roomy.assigner.balance()
    roomy.autoscaling.observe(1.0)
    serving = roomy.assigner.serving(healthy)
    assert serving, "the healthy one has its share of the replicas"
    for replica in serving:
        asked = HeartbeatRequest(replica_id=replica, pool="inference", run_id=healthy)
        assert HeartbeatResponse.FromString(OrchestratorService(roomy).heartbeats.answer(asked)).run_id == healthy
    list(roomy._tasks_in_use())
    list(roomy.evaluations._pending({}))
    assert roomy.jobs.state(damaged) is JobState.RUNNING


def test_a_wait_of_many_rounds_is_a_line_of_the_log_when_it_begins_and_one_when_it_ends(
    roomy: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(roomy, document, "waits")
    roomy.jobs.transition(job_id, JobState.VALIDATING, "test")

    def away(job_id: str) -> None:
        raise Unreachable("the judge does not answer")

    with structlog.testing.capture_logs() as lines:
        with monkeypatch.context() as patched:
            patched.setattr(roomy.runner.preparation, "validate", away)
            for _ in range(30):
                roomy.runner.tick()
        monkeypatch.setattr(roomy.runner.preparation, "validate", lambda job_id: None)
        roomy.runner.tick()

    told = [line["event"] for line in lines if line.get("job") == job_id and line["log_level"] != "debug"]
    assert told[0] == "a job waits"
    assert len(told) == 2, told


def test_a_bucket_that_does_not_take_a_jobs_events_is_its_wait(
    roomy: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(roomy, document, "waits")
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        roomy.jobs.transition(job_id, state, "test")

    def away(job_id: str) -> int:
        raise Unreachable("the bucket s3://state does not answer: timed out", code="storage_unavailable")

    monkeypatch.setattr(roomy.jobs, "move_events_to_files", away)
    roomy.runner.tick()

    told = "its older events cannot be written to files, and stay in Redis: the bucket s3://state does not answer"
    assert job_document(roomy, job_id).waits[0].startswith(told)


def _moves(context: AppContext, job_id: str) -> bool:
    context.runner.tick()
    return context.jobs.state(job_id) is JobState.ESTIMATING


def test_a_job_that_is_on_the_lists_but_not_there_keeps_nobody_from_a_slot(
    open_context: Any, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    context = open_context(max_running_jobs=1)
    ghost = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    for key in (redis_keys.job_index(), redis_keys.jobs_in_state(JobState.QUEUED)):
        redis_client.zadd(key, {ghost: 1})
    healthy = submit(context, document, "healthy")

    context.runner.adopt()
    context.runner.tick()

    assert context.jobs.state(healthy) is not JobState.QUEUED
    assert context.jobs.in_states([JobState.QUEUED]) == []
    assert context.jobs.page([], None, 10).job_ids == [healthy]


def test_a_run_whose_replay_buffer_hangs_delays_no_other_runs_prompts(
    roomy: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, healthy = (submit(roomy, document, name) for name in ("hanging", "healthy"))
    for job_id in (hanging, healthy):
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            assert roomy.jobs.transition(job_id, state, "test")
    release, asked = threading.Event(), []

    def dispatch(job_id: str) -> int:
        asked.append(job_id)
        if job_id == hanging:
            release.wait(60)
        return 0

    monkeypatch.setattr(roomy.dispatcher, "dispatch", dispatch)
    thread = threading.Thread(target=roomy.dispatcher.run, args=(roomy.stop,))
    thread.start()

    wait_until(lambda: asked.count(healthy) >= 3, "the healthy run is looked at again and again", 20)
    assert asked.count(hanging) == 1
    release.set()
    roomy.stop.set()
    thread.join(20)


def test_a_round_over_many_jobs_costs_a_fixed_number_of_commands_for_each(
    open_context: Any, redis_client: redis.Redis, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context: AppContext = open_context(max_running_jobs=1000)
    for number in range(20):
        redis_client.hset(own_keys.assignments(), f"r{number}", "")
    costs = {}
    for jobs in (10, 60):
        while len(context.jobs.in_states([JobState.RUNNING])) < jobs:
            job_id = submit(context, document, "one of many")
            for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
                context.jobs.transition(job_id, state, "test")
        monkeypatch.setattr(context.runner, "_tidied_at", time.monotonic())
        context.runner.tick()
        context.monitor._sampled_at.clear()
        before = redis_client.info("stats")["total_commands_processed"]
        context.runner.tick()
        costs[jobs] = redis_client.info("stats")["total_commands_processed"] - before

    assert costs[60] <= costs[10] * 6 * 1.2, costs
