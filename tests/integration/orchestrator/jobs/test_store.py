"""Jobs as append-only events on a real server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL, PAUSE, RESUME, fold
from services.orchestrator.steps import act_on, ask_for_checkpoint
from spo import redis_keys
from spo.errors import Conflict, InvalidInput, NotFound
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.section import JobState


@pytest.fixture
def spec(document: dict[str, Any]) -> JobSpec:
    return parse_job_spec(document)


def test_a_submitted_job_is_queued_with_its_spec_and_its_first_event(context: AppContext, spec: JobSpec) -> None:
    job_id = context.jobs.submit(spec)

    (event,) = context.jobs.events(job_id)
    assert context.jobs.state(job_id) is JobState.QUEUED
    assert context.jobs.spec(job_id) == spec
    assert (event.seq, event.kind, event.body["from"], event.body["to"]) == (1, "state", None, "queued")


def test_of_many_attempts_at_a_transition_exactly_one_succeeds(context: AppContext, spec: JobSpec) -> None:
    job_id = context.jobs.submit(spec)

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda _: context.jobs.transition(job_id, JobState.VALIDATING, "turn"), range(32)))

    assert done.count(True) == 1
    assert [event.body["to"] for event in context.jobs.events(job_id)] == ["queued", "validating"]


def test_event_numbers_have_no_gap_under_parallel_writers(context: AppContext, spec: JobSpec) -> None:
    job_id = context.jobs.submit(spec)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: context.jobs.append(job_id, "progress", {"done": number}), range(100)))

    assert [event.seq for event in context.jobs.events(job_id)] == list(range(1, 102))


def test_a_transition_outside_the_table_changes_nothing(context: AppContext, spec: JobSpec) -> None:
    job_id = context.jobs.submit(spec)

    assert not context.jobs.transition(job_id, JobState.SUCCEEDED, "cheating")
    assert context.jobs.state(job_id) is JobState.QUEUED
    assert len(context.jobs.events(job_id)) == 1


def test_the_state_is_the_fold_of_the_events_and_is_repaired_from_them(
    context: AppContext, spec: JobSpec, redis_client: redis.Redis
) -> None:
    job_id = context.jobs.submit(spec)
    context.jobs.transition(job_id, JobState.VALIDATING, "turn")
    redis_client.set(redis_keys.run_state(job_id), "succeeded")
    redis_client.zadd(redis_keys.jobs_in_state("succeeded"), {job_id: 1})
    redis_client.zrem(redis_keys.jobs_in_state("validating"), job_id)

    assert context.jobs.refold(job_id) is JobState.VALIDATING
    assert context.jobs.state(job_id) is JobState.VALIDATING
    assert context.jobs.counts() == {state: int(state is JobState.VALIDATING) for state in JobState}
    assert fold([event.body for event in context.jobs.events(job_id)]) is JobState.VALIDATING


def test_a_job_that_is_listed_under_another_state_too_is_listed_under_its_own_alone(
    context: AppContext, spec: JobSpec, redis_client: redis.Redis
) -> None:
    job_id = context.jobs.submit(spec)
    redis_client.zadd(redis_keys.jobs_in_state("running"), {job_id: 1})

    assert context.jobs.refold(job_id) is JobState.QUEUED
    assert context.jobs.counts() == {state: int(state is JobState.QUEUED) for state in JobState}


def test_a_checkpoint_asked_of_a_job_that_has_just_stopped_leaves_no_mark(
    context: AppContext, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = context.jobs.submit(spec)
    # Who asked saw it running.
    monkeypatch.setattr(context.jobs, "state", lambda job_id: JobState.RUNNING)

    with pytest.raises(Conflict):
        ask_for_checkpoint(context.jobs, job_id)

    assert not context.jobs.record(job_id).checkpoint_asked


def test_one_idempotency_key_makes_one_job(context: AppContext, spec: JobSpec) -> None:
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: context.jobs.submit(spec, "key"), range(50)))

    assert len(ids) == 1
    assert context.jobs.page([], None, 10).job_ids == list(ids)


def test_a_used_key_with_another_spec_is_refused(context: AppContext, spec: JobSpec) -> None:
    context.jobs.submit(spec, "key")

    with pytest.raises(InvalidInput) as refusal:
        context.jobs.submit(spec.model_copy(update={"name": "other"}), "key")

    assert refusal.value.code == "idempotency_mismatch"


def test_pages_hold_every_job_once_newest_first(context: AppContext, spec: JobSpec) -> None:
    submitted = [context.jobs.submit(spec) for _ in range(7)]
    found: list[str] = []
    cursor = None
    while True:
        page = context.jobs.page([], cursor, 2)
        found += page.job_ids
        cursor = page.next_cursor
        if cursor is None:
            break

    assert sorted(found) == sorted(submitted)
    assert len(found) == 7
    assert found[0] in submitted[-3:]


def test_jobs_are_found_by_their_state(context: AppContext, spec: JobSpec) -> None:
    first, second = context.jobs.submit(spec), context.jobs.submit(spec)
    context.jobs.transition(second, JobState.VALIDATING, "turn")

    assert context.jobs.page([JobState.QUEUED], None, 10).job_ids == [first]
    assert context.jobs.in_states((JobState.QUEUED, JobState.VALIDATING)) == sorted([first, second])
    assert context.jobs.counts()[JobState.VALIDATING] == 1


def running(context: AppContext, spec: JobSpec) -> str:
    job_id = context.jobs.submit(spec)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def test_verbs_are_idempotent_and_leave_one_event(context: AppContext, spec: JobSpec) -> None:
    job_id = running(context, spec)
    before = len(context.jobs.events(job_id))

    assert [act_on(context.jobs, job_id, PAUSE) for _ in range(3)] == [JobState.PAUSING] * 3
    assert act_on(context.jobs, job_id, RESUME) is JobState.RUNNING
    assert [act_on(context.jobs, job_id, CANCEL) for _ in range(2)] == [JobState.CANCELLING] * 2
    assert len(context.jobs.events(job_id)) == before + 3


def test_an_ended_job_takes_no_action(context: AppContext, spec: JobSpec) -> None:
    job_id = running(context, spec)
    context.jobs.transition(job_id, JobState.SUCCEEDED, "done")

    with pytest.raises(Conflict, match="legal transitions: none"):
        act_on(context.jobs, job_id, CANCEL)


def test_an_ended_job_was_last_worked_on_when_it_ended(context: AppContext, spec: JobSpec) -> None:
    job_id = context.jobs.submit(spec)
    context.jobs.append(job_id, "progress", {"done": 1})
    act_on(context.jobs, job_id, CANCEL)
    ended = context.jobs.events(job_id)[-1]

    context.jobs.append(job_id, "replica", {"action": "serves"})

    assert len(context.jobs.events(job_id)) > ended.seq
    assert context.jobs.record(job_id).updated_at == ended.at


def test_an_unknown_job_is_not_found(context: AppContext) -> None:
    with pytest.raises(NotFound):
        context.jobs.state("job_none")


def test_control_writes_wait_for_the_append_only_file(open_context: Callable[..., AppContext], spec: JobSpec) -> None:
    context = open_context()
    calls = "cmdstat_waitaof"
    before = dict(context.redis.info("commandstats")).get(calls, {"calls": 0})["calls"]

    context.jobs.submit(spec)

    assert dict(context.redis.info("commandstats"))[calls]["calls"] == before + 1
