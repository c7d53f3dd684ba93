"""Jobs as append-only events on a real server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from services.orchestrator.desk import Desk
from services.orchestrator.states import CANCEL, PAUSE, RESUME, JobState, fold
from spo import redis_keys
from spo.errors import Conflict, InvalidInput, NotFound
from spo.job_spec import JobSpec, parse_job_spec


@pytest.fixture
def spec(document: dict[str, Any]) -> JobSpec:
    return parse_job_spec(document)


def test_a_submitted_job_is_queued_with_its_spec_and_its_first_event(desk: Desk, spec: JobSpec) -> None:
    job_id = desk.jobs.submit(spec)

    (event,) = desk.jobs.events(job_id)
    assert desk.jobs.state(job_id) is JobState.QUEUED
    assert desk.jobs.spec(job_id) == spec
    assert (event.seq, event.kind, event.body["from"], event.body["to"]) == (1, "state", None, "queued")


def test_of_many_attempts_at_a_transition_exactly_one_succeeds(desk: Desk, spec: JobSpec) -> None:
    job_id = desk.jobs.submit(spec)

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda _: desk.jobs.transition(job_id, JobState.VALIDATING, "turn"), range(32)))

    assert done.count(True) == 1
    assert [event.body["to"] for event in desk.jobs.events(job_id)] == ["queued", "validating"]


def test_event_numbers_have_no_gap_under_parallel_writers(desk: Desk, spec: JobSpec) -> None:
    job_id = desk.jobs.submit(spec)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: desk.jobs.append(job_id, "progress", {"done": number}), range(100)))

    assert [event.seq for event in desk.jobs.events(job_id)] == list(range(1, 102))


def test_a_transition_outside_the_table_changes_nothing(desk: Desk, spec: JobSpec) -> None:
    job_id = desk.jobs.submit(spec)

    assert not desk.jobs.transition(job_id, JobState.SUCCEEDED, "cheating")
    assert desk.jobs.state(job_id) is JobState.QUEUED
    assert len(desk.jobs.events(job_id)) == 1


def test_the_state_is_the_fold_of_the_events_and_is_repaired_from_them(
    desk: Desk, spec: JobSpec, redis_client: redis.Redis
) -> None:
    job_id = desk.jobs.submit(spec)
    desk.jobs.transition(job_id, JobState.VALIDATING, "turn")
    redis_client.set(redis_keys.run_state(job_id), "succeeded")

    assert desk.jobs.refold(job_id) is JobState.VALIDATING
    assert desk.jobs.state(job_id) is JobState.VALIDATING
    assert fold([event.body for event in desk.jobs.events(job_id)]) is JobState.VALIDATING


def test_one_idempotency_key_makes_one_job(desk: Desk, spec: JobSpec) -> None:
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: desk.jobs.submit(spec, "key"), range(50)))

    assert len(ids) == 1
    assert desk.jobs.page([], None, 10).job_ids == list(ids)


def test_a_used_key_with_another_spec_is_refused(desk: Desk, spec: JobSpec) -> None:
    desk.jobs.submit(spec, "key")

    with pytest.raises(InvalidInput) as refusal:
        desk.jobs.submit(spec.model_copy(update={"name": "other"}), "key")

    assert refusal.value.code == "idempotency_mismatch"


def test_pages_hold_every_job_once_newest_first(desk: Desk, spec: JobSpec) -> None:
    submitted = [desk.jobs.submit(spec) for _ in range(7)]
    found: list[str] = []
    cursor = None
    while True:
        page = desk.jobs.page([], cursor, 2)
        found += page.job_ids
        cursor = page.next_cursor
        if cursor is None:
            break

    assert sorted(found) == sorted(submitted)
    assert len(found) == 7
    assert found[0] in submitted[-3:]


def test_jobs_are_found_by_their_state(desk: Desk, spec: JobSpec) -> None:
    first, second = desk.jobs.submit(spec), desk.jobs.submit(spec)
    desk.jobs.transition(second, JobState.VALIDATING, "turn")

    assert desk.jobs.page([JobState.QUEUED], None, 10).job_ids == [first]
    assert desk.jobs.in_states((JobState.QUEUED, JobState.VALIDATING)) == sorted([first, second])
    assert desk.jobs.counts()[JobState.VALIDATING] == 1


def running(desk: Desk, spec: JobSpec) -> str:
    job_id = desk.jobs.submit(spec)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert desk.jobs.transition(job_id, state, "test")
    return job_id


def test_verbs_are_idempotent_and_leave_one_event(desk: Desk, spec: JobSpec) -> None:
    job_id = running(desk, spec)
    before = len(desk.jobs.events(job_id))

    assert [desk.jobs.act(job_id, PAUSE) for _ in range(3)] == [JobState.PAUSING] * 3
    assert desk.jobs.act(job_id, RESUME) is JobState.RUNNING
    assert [desk.jobs.act(job_id, CANCEL) for _ in range(2)] == [JobState.CANCELLING] * 2
    assert len(desk.jobs.events(job_id)) == before + 3


def test_an_ended_job_takes_no_verb(desk: Desk, spec: JobSpec) -> None:
    job_id = running(desk, spec)
    desk.jobs.transition(job_id, JobState.SUCCEEDED, "done")

    with pytest.raises(Conflict, match="legal transitions: none"):
        desk.jobs.act(job_id, CANCEL)


def test_an_unknown_job_is_not_found(desk: Desk) -> None:
    with pytest.raises(NotFound):
        desk.jobs.state("job_none")


def test_control_writes_wait_for_the_append_only_file(open_desk: Callable[..., Desk], spec: JobSpec) -> None:
    desk = open_desk()
    calls = "cmdstat_waitaof"
    before = dict(desk.redis.info("commandstats")).get(calls, {"calls": 0})["calls"]

    desk.jobs.submit(spec)

    assert dict(desk.redis.info("commandstats"))[calls]["calls"] == before + 1
