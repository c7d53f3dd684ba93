"""GET /v1/jobs: by state, label and creation time, page by page, quickly whatever is stored."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import label_writes, write_fields
from spo import redis_keys
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState

Document = dict[str, Any]


def submitted(context: AppContext, document: Document, tenant: str = "", **labels: str) -> str:
    return context.jobs.submit(parse_job_spec(document | {"labels": labels}), tenant=tenant)


def listed(api: httpx.Client, **query: Any) -> list[str]:
    answer = api.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["items"]]


def test_jobs_are_found_by_labels_and_states_together(
    api: httpx.Client, context: AppContext, document: Document
) -> None:
    red = submitted(context, document, team="red", kind="sweep")
    blue = submitted(context, document, team="blue", kind="sweep")
    submitted(context, document)
    context.jobs.fail(blue, "test", "it ended")

    assert listed(api, label="team:red") == [red]
    assert listed(api, label="team") == [blue, red]
    assert listed(api, label=["kind:sweep", "team:blue"]) == [blue]
    assert listed(api, label="kind:sweep", status="queued") == [red]
    assert listed(api, label="team:green") == []


def test_a_deleted_job_is_in_no_list(api: httpx.Client, context: AppContext, document: Document) -> None:
    job_id = submitted(context, document, team="red")
    context.jobs.fail(job_id, "test", "it ended")
    context.deletion.delete(job_id)

    assert listed(api, label="team:red") == listed(api) == []


def test_jobs_are_found_by_when_they_were_made(api: httpx.Client, context: AppContext, document: Document) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(submitted(context, document))
        time.sleep(0.005)
    made = [datetime.fromtimestamp(context.jobs.record(job_id).created_unix_ms / 1000, UTC) for job_id in jobs]

    assert listed(api, created_from=made[1].isoformat()) == jobs[:0:-1]
    assert listed(api, created_to=made[1].isoformat()) == jobs[1::-1]
    assert listed(api, created_from=made[1].isoformat(), created_to=made[1].isoformat()) == [jobs[1]]
    assert listed(api, created_from=(made[2] + timedelta(hours=1)).isoformat()) == []
    first = api.get("/v1/jobs", params={"limit": 1, "created_to": made[1].isoformat()}).json()
    assert [job["id"] for job in first["items"]] == [jobs[1]]
    assert listed(api, cursor=first["next_cursor"], created_to=made[1].isoformat()) == [jobs[0]]
    assert api.get("/v1/jobs", params={"created_from": "yesterday"}).status_code == 422


def test_tenants_find_only_their_own_jobs_by_label(context: AppContext, document: Document) -> None:
    mine = submitted(context, document, "red", team="x")
    submitted(context, document, "blue", team="x")

    assert context.jobs.page([], None, 10, "red", ["team:x"]).job_ids == [mine]


def test_ten_thousand_jobs_are_listed_fast(api: httpx.Client, context: AppContext, document: Document) -> None:
    spec = parse_job_spec(document)
    with context.redis.pipeline(transaction=False) as pipe:
        for number in range(10_000):
            job_id, state = f"job_{number:026d}", JobState.FAILED if number % 2 else JobState.SUCCEEDED
            labels = {"n": str(number % 10)}
            created = {"created_at": "2026-01-01T00:00:00Z", "created_unix_ms": number}
            pipe.execute_command(*write_fields(job_id, name=spec.name, labels=labels, **created))
            pipe.set(redis_keys.run_state(job_id), state.value)
            for key in (redis_keys.job_index(), redis_keys.jobs_in_state(state)):
                pipe.zadd(key, {job_id: number})
            for write in label_writes(labels, job_id, number):
                pipe.execute_command(*write)
        pipe.execute()

    for query in ({}, {"status": "succeeded"}, {"label": "n:7"}, {"label": "n:7", "status": "failed"}):
        assert len(listed(api, **query)) == 50
        seconds = []
        for _ in range(10):
            began = time.monotonic()
            listed(api, **query)
            seconds.append(time.monotonic() - began)

        print(f"{query}: median {sorted(seconds)[5] * 1000:.1f} ms")
        # Loose: the machine may be busy.
        assert sorted(seconds)[5] < 0.25, query
