"""Jobs are found by state, label and name, and why one is slow is told in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_waits
from services.orchestrator.job_records import JobFilter
from services.orchestrator.jobs import IN_REDIS, PIECE, find_jobs
from services.orchestrator.monitor import JobMonitor
from spo import redis_keys
from spo.messaging.streams.entries import publish
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1 import orchestrator_service_pb2 as wire


@pytest.fixture
def jobs(context: AppContext, document: dict[str, Any]) -> list[str]:
    """Oldest first."""
    labels: list[dict[str, str]] = [{"team": "red"}, {"team": "blue"}, {"team": "red", "night": ""}]
    return [
        context.jobs.submit(parse_job_spec({**document, "name": f"Sweep {number}", "labels": each}))
        for number, each in enumerate(labels)
    ]


@pytest.mark.parametrize(
    ("wanted", "words", "found"),
    [
        (JobFilter(), "", [2, 1, 0]),
        (JobFilter(), "sweep 1", [1]),
        (JobFilter(), "  ", []),
        (JobFilter(labels=["team:red"]), "sweep", [2, 0]),
        (JobFilter(labels=["team:red"]), "SWEEP 0", [0]),
        (JobFilter(states=[JobState.FAILED]), "sweep", [1]),
        (JobFilter(states=[JobState.QUEUED], labels=["team"]), "sweep", [2, 0]),
        (JobFilter(tenant="red"), "sweep", []),
    ],
)
def test_jobs_are_found(context: AppContext, jobs: list[str], wanted: JobFilter, words: str, found: list[int]) -> None:
    context.jobs.fail(jobs[1], "x", "y")
    page = find_jobs(context.jobs, wanted, words, None, 10)

    assert [jobs.index(job_id) for job_id in page.job_ids] == found
    assert page.next_cursor is None


def test_a_rare_job_is_found_behind_many_others(context: AppContext, document: dict[str, Any]) -> None:
    context.jobs.durable = IN_REDIS
    rare = context.jobs.submit(parse_job_spec({**document, "name": "needle"}))
    spec = parse_job_spec(document)
    for _ in range(PIECE + 10):
        context.jobs.submit(spec)

    assert find_jobs(context.jobs, JobFilter(), "needle", None, 10).job_ids == [rare]


def test_waits_are_told_in_seconds_with_the_longest_first(context: AppContext, jobs: list[str]) -> None:
    job_id = jobs[0]
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    grant = context.leases.wait_for_job("trainer", 5)
    metrics = {"wait_seconds": 3600.0, "step_seconds": 1200.0}
    report = wire.StepReport(step=1, metrics=metrics)
    context.leases.renew(
        wire.RenewLeaseRequest(run_id=job_id, trainer_id="trainer", epoch=grant.epoch, reports=[report])
    )
    context.redis.xadd(redis_keys.rollouts(), {"payload": b"x", "run": job_id}, id="1000-0")
    # Not of this job: nothing of it waits there.
    publish(context.redis, redis_keys.rollouts(), [b"just now"])
    context.redis.xadd(redis_keys.verdicts(), {"payload": b"x", "run": "job_OTHER"}, id="1000-0")
    context.redis.hset(redis_keys.entries_in_flight(job_id), redis_keys.rollouts(), 1)

    waits = job_waits(context, job_id, JobState.RUNNING)

    assert [wait.whom for wait in waits[:2]] == ["sandbox-judge", "a batch from the replay buffer"]
    assert waits[0].entries == 1
    assert "idles 75%" in waits[1].meaning


def test_how_idle_pools_are_is_sampled(context: AppContext, jobs: list[str]) -> None:
    for load in (0.25, 0.75):
        beat = wire.HeartbeatRequest(replica_id=f"i-{load}", pool="inference", load=load)
        context.replicas.beat(beat)
    JobMonitor(context.jobs, context.leases, context.assigner, 60).observe(jobs[0])
    sampled = context.redis.zrange(own_keys.job_platform_series(jobs[0]), 0, -1)[0]

    assert b'"idle_inference": 0.5' in sampled
    assert b'"replicas_inference": 2' in sampled
