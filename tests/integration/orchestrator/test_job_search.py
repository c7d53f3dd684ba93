"""Jobs are found by state, label and name, and why one is slow is told in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator.desk import Desk
from services.orchestrator.job_search import PIECE, find_jobs
from services.orchestrator.listing import JobFilter
from services.orchestrator.slowness import job_waits
from services.orchestrator.states import JobState
from services.orchestrator.watch import Watch
from spo import redis_keys
from spo.job_spec import parse_job_spec
from spo.streams import publish
from spo.v1 import orchestrator_service_pb2 as wire


@pytest.fixture
def jobs(desk: Desk, document: dict[str, Any]) -> list[str]:
    """Oldest first."""
    labels: list[dict[str, str]] = [{"team": "red"}, {"team": "blue"}, {"team": "red", "night": ""}]
    return [
        desk.jobs.submit(parse_job_spec({**document, "name": f"Sweep {number}", "labels": each}))
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
def test_jobs_are_found(desk: Desk, jobs: list[str], wanted: JobFilter, words: str, found: list[int]) -> None:
    desk.jobs.fail(jobs[1], "x", "y")
    page = find_jobs(desk.jobs, wanted, words, None, 10)

    assert [jobs.index(job_id) for job_id in page.job_ids] == found
    assert page.next_cursor is None


def test_a_rare_job_is_found_behind_many_others(desk: Desk, document: dict[str, Any]) -> None:
    desk.jobs.durable = False
    rare = desk.jobs.submit(parse_job_spec({**document, "name": "needle"}))
    spec = parse_job_spec(document)
    for _ in range(PIECE + 10):
        desk.jobs.submit(spec)

    assert find_jobs(desk.jobs, JobFilter(), "needle", None, 10).job_ids == [rare]


def test_waits_are_told_in_seconds_with_the_longest_first(desk: Desk, jobs: list[str]) -> None:
    job_id = jobs[0]
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        desk.jobs.transition(job_id, state, "test")
    grant = desk.leases.wait_for_job("trainer", 5)
    metrics = {"wait_seconds": 3600.0, "step_seconds": 1200.0}
    report = wire.StepReport(step=1, metrics=metrics)
    desk.leases.renew(wire.RenewLeaseRequest(run_id=job_id, trainer_id="trainer", epoch=grant.epoch, reports=[report]))
    desk.redis.xadd(redis_keys.rollouts(), {"payload": b"x"}, id="1000-0")
    publish(desk.redis, redis_keys.verdicts(), [b"just now"])

    waits = job_waits(desk, job_id, JobState.RUNNING)

    assert [wait.whom for wait in waits[:2]] == ["sandbox-judge", "a batch from the replay buffer"]
    assert waits[0].entries == 1
    assert "idles 75%" in waits[1].meaning


def test_how_idle_pools_are_is_sampled(desk: Desk, jobs: list[str]) -> None:
    for load in (0.25, 0.75):
        beat = wire.HeartbeatRequest(replica_id=f"i-{load}", pool="inference", load=load)
        desk.replicas.beat(beat)
    Watch(desk.jobs, desk.replicas, desk.leases, desk.sharing, 60).look(jobs[0])
    sampled = desk.redis.zrange(redis_keys.job_platform_series(jobs[0]), 0, -1)[0]

    assert b'"idle_inference": 0.5' in sampled
    assert b'"replicas_inference": 2' in sampled
