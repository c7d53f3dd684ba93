"""Requests at odd moments: two that meet at a job leave it as one of them asked for, and nothing half-done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState

ROUNDS = 4
PATHS: dict[str, Callable[[httpx.Client, str], httpx.Response]] = {
    "delete": lambda api, job: api.delete(f"/v1/jobs/{job}"),
    "rename": lambda api, job: api.patch(f"/v1/jobs/{job}", json={"name": "other"}),
    "evaluate": lambda api, job: api.post("/v1/evaluations", json={"job_id": job, "samples": 1, "ks": [1]}),
    **{
        action: lambda api, job, action=action: api.post(f"/v1/jobs/{job}/{action}")  # type: ignore[misc]
        for action in ("cancel", "pause", "resume", "checkpoint")
    },
}
WAYS = {
    "queued": (),
    "validating": (JobState.VALIDATING,),
    "estimating": (JobState.VALIDATING, JobState.ESTIMATING),
    "running": (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING),
    "paused": (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING, JobState.PAUSING, JobState.PAUSED),
    "failed": (JobState.VALIDATING, JobState.FAILED),
}


@pytest.mark.parametrize(
    ("state", "requests", "ends"),
    [
        ("queued", "cancel cancel", "cancelled"),
        ("queued", "cancel delete", "cancelled gone"),
        ("validating", "cancel pause", "cancelling cancelled"),
        ("validating", "cancel rename", "cancelling cancelled"),
        ("estimating", "cancel cancel", "cancelling cancelled"),
        ("running", "cancel pause", "cancelling cancelled pausing"),
        ("running", "pause pause", "pausing"),
        ("running", "checkpoint cancel", "cancelling cancelled"),
        ("paused", "resume resume", "paused running"),
        ("paused", "resume delete", "paused running"),
        ("paused", "resume cancel", "cancelling cancelled"),
        ("failed", "delete delete", "gone"),
        ("failed", "delete rename", "gone"),
        ("failed", "delete evaluate", "gone"),
        ("failed", "delete resume", "gone"),
        ("failed", "delete cancel", "gone"),
    ],
)
def test_two_requests_that_meet_at_a_job_leave_it_whole(
    context: AppContext, api: httpx.Client, document: dict[str, Any], state: str, requests: str, ends: str
) -> None:
    for _ in range(ROUNDS):
        job_id = context.jobs.submit(parse_job_spec(document))
        for each in WAYS[state]:
            assert context.jobs.transition(job_id, each, "test")
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda name, job_id=job_id: PATHS[name](api, job_id), requests.split()))  # type: ignore[misc]

        assert all(answer.status_code in (200, 202, 204, 404, 409, 412, 422) for answer in answers), answers
        assert any(answer.is_success for answer in answers)
        found = api.get(f"/v1/jobs/{job_id}")
        now = found.json()["state"] if found.is_success else "gone"
        assert now in ends.split(), [answer.text for answer in answers]
        if now == "gone":
            context.deletion.sweep()
            assert context.redis.keys(f"*:{job_id}:*") == []
            assert job_id not in {job["id"] for job in api.get("/v1/jobs").json()["items"]}
        else:
            context.jobs.fail(job_id, "test", "the round is over")
            kinds = [event.kind for event in context.jobs.events(job_id)]
            assert [event.seq for event in context.jobs.events(job_id)] == list(range(1, len(kinds) + 1))
