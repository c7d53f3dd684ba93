"""A job whose keys in Redis are damaged can be ended: it is cancelled and deleted as any other, and harms none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth import Principal
from services.orchestrator.container import AppContext, require_own_job
from spo import redis_keys
from spo.errors import NotFound
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until

# Without these a job cannot be; the others come and go.
NEEDED = [redis_keys.run_state, redis_keys.job_record, redis_keys.run_spec, own_keys.job_events]
KEYS = [
    *NEEDED,
    redis_keys.prompts,
    redis_keys.replay_stored,
    redis_keys.replay_ids,
    redis_keys.run_prompts,
    own_keys.job_lease,
    own_keys.job_metrics,
]


def of_another_kind(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.sadd(key, "by a hand that meant another key")


def missing(client: redis.Redis, key: str) -> None:
    client.delete(key)


def submit(context: AppContext, document: dict[str, Any], name: str, state: JobState, tenant: str = "") -> str:
    job_id = context.jobs.submit(parse_job_spec(document | {"name": name, "labels": {"team": "a"}}), tenant=tenant)
    for each in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        if state is not JobState.QUEUED:
            context.jobs.transition(job_id, each, "test")
    if state is JobState.FAILED:
        context.jobs.fail(job_id, "internal", "test")
    return job_id


def ends(context: AppContext, api: httpx.Client, job_id: str) -> Callable[[], bool]:
    def ended() -> bool:
        context.runner.tick()
        shown = {job["id"]: job["state"] for job in api.get("/v1/jobs").json()["items"]}
        return shown[job_id] == "cancelled"

    return ended


def left_of(client: redis.Redis, job_id: str) -> list[bytes]:
    named = [key for key in client.scan_iter("spo:orchestrator:*:jobs", _type="zset") if client.zscore(key, job_id)]
    return [*client.keys(f"*{job_id}*"), *named]


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.FAILED])
@pytest.mark.parametrize(
    ("key", "damage"), [*((key, of_another_kind) for key in KEYS), *((key, missing) for key in NEEDED)]
)
def test_it_is_cancelled_and_deleted_with_all_it_left_and_another_job_goes_on(
    context: AppContext,
    api: httpx.Client,
    redis_client: redis.Redis,
    document: dict[str, Any],
    key: Callable[[str], str],
    damage: Callable[[redis.Redis, str], None],
    state: JobState,
) -> None:
    damaged = submit(context, document, "damaged", state)
    other = submit(context, document, "other", JobState.RUNNING)
    before = {each: redis_client.dump(each) for each in redis_client.keys(f"*{other}*")}
    damage(redis_client, key(damaged))

    if state is not JobState.FAILED:
        cancelled = api.post(f"/v1/jobs/{damaged}/cancel")
        assert cancelled.status_code == 202, cancelled.text
        wait_until(ends(context, api, damaged), "the damaged job is cancelled", 20)
    deleted = api.delete(f"/v1/jobs/{damaged}")
    assert deleted.status_code == 204, deleted.text
    context.deletion.sweep()

    assert left_of(redis_client, damaged) == []
    assert context.jobs.state(other) is JobState.RUNNING
    untouched = {own_keys.job_platform_series(other).encode(), own_keys.job_events(other).encode()}
    assert {each: redis_client.dump(each) for each in before if each not in untouched} == {
        each: held for each, held in before.items() if each not in untouched
    }


@pytest.mark.parametrize(
    ("name", "value"), [("created_unix_ms", ""), ("created_unix_ms", "soon"), ("labels", "{"), ("labels", "")]
)
def test_a_record_with_a_field_that_is_none_is_no_reason_to_stay(
    context: AppContext, api: httpx.Client, redis_client: redis.Redis, document: dict[str, Any], name: str, value: str
) -> None:
    job_id = submit(context, document, "damaged", JobState.RUNNING)
    redis_client.hset(redis_keys.job_record(job_id), name, value)
    if not value:
        redis_client.hdel(redis_keys.job_record(job_id), name)

    assert context.jobs.listed_under(job_id) == [JobState.RUNNING]
    context.jobs.fail(job_id, "internal", "a step of a script that fails is not undone")
    assert context.jobs.listed_under(job_id) == [JobState.FAILED]
    assert api.delete(f"/v1/jobs/{job_id}").status_code == 204
    context.deletion.sweep()
    assert left_of(redis_client, job_id) == []


def test_its_own_tenant_ends_it_and_no_other(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = submit(context, document, "damaged", JobState.RUNNING, tenant="a")
    own, other = (Principal(name, tenant=name) for name in ("a", "b"))
    for damage in (of_another_kind, missing):
        damage(redis_client, redis_keys.job_record(job_id))
        require_own_job(context, own, job_id)
        with pytest.raises(NotFound):
            require_own_job(context, other, job_id)


def test_what_it_is_told_of_names_the_way_out(
    context: AppContext, api: httpx.Client, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = submit(context, document, "damaged", JobState.RUNNING)
    of_another_kind(redis_client, redis_keys.run_state(job_id))

    for refused in (api.get(f"/v1/jobs/{job_id}"), api.post(f"/v1/jobs/{job_id}/pause")):
        assert (refused.status_code, refused.json()["code"]) == (500, "keys_damaged"), refused.text
        assert "cancelled" in refused.json()["detail"]
    api.post(f"/v1/jobs/{job_id}/cancel")
    told = [event.body for event in context.jobs.events(job_id) if event.kind == "keys_replaced"]
    assert told == [{"keys": [redis_keys.run_state(job_id)]}]


def test_a_job_of_which_a_key_is_missing_says_so_as_long_as_it_stands(
    context: AppContext, api: httpx.Client, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = submit(context, document, "damaged", JobState.RUNNING)
    redis_client.delete(redis_keys.job_record(job_id))

    context.runner.tick()

    shown = api.get(f"/v1/jobs/{job_id}")
    assert shown.status_code == 200, shown.text
    assert "cancel the job" in shown.json()["waits"][0]
