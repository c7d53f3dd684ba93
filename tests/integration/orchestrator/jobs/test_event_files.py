"""A job's older events are in files: Redis and restarts do not grow with its age, and nobody who reads notices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL, RESUME
from services.orchestrator.jobs import SEGMENT, JobStore
from services.orchestrator.steps import act_on
from spo.errors import IntegrityError
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import TERMINAL, JobState
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

MANY = """
for i = 1, tonumber(ARGV[1]) do
  local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  local seq = tonumber(string.match(newest[1], '^%d+')) + 1
  redis.call('XADD', KEYS[1], seq .. '-0', 'at', '2026-11-22T13:13:25.123Z', 'actor', 'orchestrator',
    'kind', 'progress', 'body', '{"stage": "running", "done": ' .. seq .. ', "total": 2000000}', 'from', '', 'to', '')
end
"""


def running_job(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def add_events(client: redis.Redis, job_id: str, count: int) -> None:
    client.eval(MANY, 1, own_keys.job_events(job_id), count)


def in_redis(client: redis.Redis, job_id: str) -> int:
    return int(client.xlen(own_keys.job_events(job_id)))


def move_all(jobs: JobStore, job_id: str) -> None:
    while jobs.move_events_to_files(job_id):
        pass


def test_events_are_paged_from_the_first_to_the_last_across_files_and_redis(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any], api: httpx.Client
) -> None:
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 3 * SEGMENT + 200)
    before = context.jobs.events(job_id, limit=10_000)

    move_all(context.jobs, job_id)

    assert SEGMENT <= in_redis(redis_client, job_id) < 2 * SEGMENT
    assert context.jobs.events(job_id, limit=10_000) == before
    assert context.jobs.events(job_id, after_seq=SEGMENT - 3, limit=7) == before[SEGMENT - 3 : SEGMENT + 4]
    found, cursor = [], "0"
    while cursor is not None:
        page = api.get(f"/v1/jobs/{job_id}/events", params={"after_seq": cursor, "limit": 333}).json()
        found += [event["seq"] for event in page["items"]]
        cursor = page["next_cursor"]
    assert found == list(range(1, len(before) + 1))


def test_a_listener_resumes_after_an_event_that_is_in_a_file_and_goes_on_into_redis(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any], api: httpx.Client
) -> None:
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 2 * SEGMENT + 200)
    move_all(context.jobs, job_id)
    assert context.jobs.fail(job_id, "test", "it ended")
    last = context.jobs.events(job_id, limit=10_000)[-1].seq

    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(SEGMENT - 5)}
    with api.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        told = [json.loads(line[5:])["seq"] for line in response.iter_lines() if line.startswith("data:")]

    assert told == list(range(SEGMENT - 4, last + 1))


def test_the_time_of_an_adoption_does_not_depend_on_the_age_of_the_job(
    open_context: Callable[..., AppContext], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    context = open_context()
    job_id = running_job(context, document)
    for _ in range(10):
        add_events(redis_client, job_id, 10 * SEGMENT)
        move_all(context.jobs, job_id)
    assert context.jobs.transition(job_id, JobState.PAUSING, "test")
    assert context.jobs.transition(job_id, JobState.PAUSED, "test")
    assert in_redis(redis_client, job_id) < 2 * SEGMENT

    successor = open_context()
    began = time.monotonic()
    successor.runner.adopt()
    seconds = time.monotonic() - began

    assert seconds < 2
    assert successor.jobs.state(job_id) is JobState.PAUSED
    assert act_on(successor.jobs, job_id, RESUME) is JobState.PAUSED
    assert act_on(successor.jobs, job_id, CANCEL) is JobState.CANCELLING
    assert successor.jobs.refold(job_id) is JobState.CANCELLING


def test_a_crash_between_file_and_redis_loses_and_doubles_nothing(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 3 * SEGMENT)
    before = context.jobs.events(job_id, limit=10_000)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(context.jobs, "commit", crash)
        with pytest.raises(KeyboardInterrupt):
            context.jobs.move_events_to_files(job_id)
    assert context.jobs.events(job_id, limit=10_000) == before
    move_all(context.jobs, job_id)

    assert context.jobs.events(job_id, limit=10_000) == before
    assert context.jobs.refold(job_id) is JobState.RUNNING


def test_a_full_disk_keeps_events_in_redis_and_the_job_says_so(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any], tmp_path: Path
) -> None:
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 2 * SEGMENT)
    events = tmp_path / "state" / "events"
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("a file where the folder should be")

    context.runner.tick()

    assert in_redis(redis_client, job_id) >= 2 * SEGMENT
    assert "cannot be written" in context.monitor.waits(job_id, JobState.RUNNING)[0]
    assert context.jobs.state(job_id) is JobState.RUNNING


def test_files_take_no_events_with_a_hole(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running_job(context, document)
    assert context.jobs.files is not None
    with pytest.raises(IntegrityError):
        context.jobs.files.write(job_id, context.jobs.events(job_id))


def test_a_deleted_job_leaves_no_events(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any], tmp_path: Path
) -> None:
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 2 * SEGMENT)
    move_all(context.jobs, job_id)
    assert list((tmp_path / "state" / "events").rglob("*.jsonl"))
    assert context.jobs.fail(job_id, "test", "it ended")
    assert context.jobs.state(job_id) in TERMINAL
    context.deletion.delete(job_id)
    context.deletion.sweep()

    context.jobs.append(job_id, "weights_applied", {})
    context.replicas._tell(None, _beat_of(job_id))
    context.monitor._sample(job_id)
    context.replicas._keep_logs(_beat_of(job_id))

    assert not [path for path in (tmp_path / "state").rglob("*") if job_id in str(path)]
    assert redis_client.keys(f"spo:{job_id}*") == []


def _beat_of(job_id: str) -> HeartbeatRequest:
    beat = HeartbeatRequest(replica_id="r1", pool="inference", run_id=job_id, policy_version=1, problem="none")
    beat.logs.add(run_id=job_id, level="info", at_unix_ms=1, line="late")
    return beat
