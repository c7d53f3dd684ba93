"""Names under which policies are served: what they mean, their history, rolling back, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys, serving
from services.orchestrator.container import AppContext
from services.orchestrator.serving import Change, Target
from spo.errors import Conflict, NotFound, PreconditionFailed
from spo.testing.runs import toy_spec

WHO = Change("key:test")


def job_with_versions(context: AppContext, *versions: int, tenant: str = "") -> str:
    job_id = context.jobs.submit(toy_spec({"model": {"path": "/models/pi0"}}), tenant=tenant)
    for version in versions:
        document = json.dumps({"version": version, "step": version, "uri": "", "manifest_digest": "0" * 64})
        context.redis.hset(own_keys.job_weights(job_id), str(version), document)
    return job_id


def test_publishing_what_a_name_means_already_is_no_change(context: AppContext) -> None:
    job_id = job_with_versions(context, 1)

    first = context.served_models.publish("", "assistant", Target(job_id, 1), WHO)
    again = context.served_models.publish("", "assistant", Target(job_id, 1), Change("somebody else"))

    assert again == first
    assert (first.number, first.by, first.before) == (1, "key:test", None)
    assert context.served_models.resolve("", "assistant") == Target(job_id, 1)


def test_rolling_back_goes_one_further_each_time(context: AppContext) -> None:
    job_id = job_with_versions(context, 1, 2, 3)
    for version in (1, 2, 3):
        context.served_models.publish("", "assistant", Target(job_id, version), WHO)

    found = [context.served_models.roll_back("", "assistant", WHO).version for _ in range(2)]

    assert found == [2, 1]
    with pytest.raises(PreconditionFailed, match="nothing then"):
        context.served_models.roll_back("", "assistant", WHO)
    assert context.served_models.roll_back("", "assistant", WHO, to=3).version == 3
    history = context.served_models.history("", "assistant")
    assert [(change.number, change.version, change.restores) for change in history] == [
        (6, 3, 3),
        (5, 1, 1),
        (4, 2, 2),
        (3, 3, None),
        (2, 2, None),
        (1, 1, None),
    ]
    assert history[0].before == {"job_id": job_id, "version": 1}


def test_a_loop_that_builds_on_an_older_change_is_refused(context: AppContext) -> None:
    job_id = job_with_versions(context, 1, 2)
    context.served_models.publish("", "assistant", Target(job_id, 1), Change("loop", expected=0))

    with pytest.raises(Conflict, match="number 1, not 0"):
        context.served_models.publish("", "assistant", Target(job_id, 2), Change("loop", expected=0))


def test_a_tenant_has_room_for_names_whatever_others_have(context: AppContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_NAMES", 2)
    jobs = {tenant: job_with_versions(context, tenant=tenant) for tenant in ("red", "blue")}

    def publish(tenant: str, name: str) -> None:
        context.served_models.publish(tenant, name, Target(jobs[tenant], 0), WHO)

    for tenant in jobs:
        for name in ("one", "two"):
            publish(tenant, name)
    with pytest.raises(Conflict, match="2 names of yours"):
        publish("red", "three")
    context.served_models.remove("red", "one", WHO)
    publish("red", "three")

    assert [each.name for each in context.served_models.all("red")] == ["three", "two"]
    assert context.redis.hlen(own_keys.served_models()) == 4
    with pytest.raises(NotFound):
        context.served_models.history("red", "one")
    assert context.served_models.history("blue", "one")


def test_only_what_the_tenant_has_can_be_served(context: AppContext) -> None:
    job_id = job_with_versions(context, 1, tenant="red")

    with pytest.raises(NotFound):
        context.served_models.publish("blue", "assistant", Target(job_id, 1), WHO)
    with pytest.raises(NotFound, match="no weight version 7"):
        context.served_models.publish("red", "assistant", Target(job_id, 7), WHO)
    context.served_models.publish("red", "assistant", Target(job_id, 1), WHO)
    with pytest.raises(NotFound):
        context.served_models.resolve("blue", "assistant")
    with pytest.raises(NotFound):
        context.served_models.resolve("blue", f"{job_id}@1")
    assert context.served_models.resolve("red", f"{job_id}@0") == Target(job_id, 0)
    assert context.served_models.resolve("red", job_id) == Target(job_id, None)


def test_names_are_changed_over_rest(context: AppContext, api: httpx.Client) -> None:
    job_id = job_with_versions(context, 1, 2)

    def ask(method: str, path: str = "", **body: Any) -> httpx.Response:
        return api.request(method, f"/v1/served-models{path}", json=body or None)

    assert ask("PUT", "/assistant", job_id=job_id, version=1, note="first").json()["number"] == 1
    assert ask("PUT", "/assistant", job_id=job_id, version=2).json()["before"] == {"job_id": job_id, "version": 1}
    assert api.post("/v1/served-models/assistant/rollback", json={}).json()["version"] == 1
    assert [each["by"] for each in ask("GET", "/assistant/history").json()["items"]] == ["operator"] * 3
    assert [each["name"] for each in ask("GET").json()["items"]] == ["assistant"]
    refused = ask("PUT", "/assistant", job_id=job_id, version=9)
    assert (refused.status_code, refused.json()["code"]) == (404, "weight_version_not_found")
    assert ask("PUT", "/job_x", job_id=job_id).json()["code"] == "name_taken"
    assert ask("DELETE", "/assistant").json()["removed"] is True
    assert ask("GET", "/assistant").json()["code"] == "model_not_found"
    assert api.post("/v1/served-models/assistant/rollback", json={"to_number": 2}).json()["version"] == 2


def test_a_restarted_orchestrator_serves_the_same(open_context: Callable[..., AppContext]) -> None:
    first = open_context()
    job_id = job_with_versions(first, 1)
    first.served_models.publish("", "assistant", Target(job_id, 1), WHO)

    assert open_context().served_models.get("", "assistant").target == Target(job_id, 1)
