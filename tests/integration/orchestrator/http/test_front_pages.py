"""What is wrong now, datasets, models, the REST API and the documents as pages: what they say, harmlessly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.client import Client
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

HOSTILE = "<script>alert('x')</script>"
ROW = {"id": "one", "statement": HOSTILE, "tests": [{"stdin": "1", "stdout": "1"}]}


def test_what_is_wrong_names_services_jobs_and_what_to_do(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    with Client(str(api.base_url)) as client:
        before = client.platform.attention()
        job_id = client.submit(document | {"name": HOSTILE}).id
        alarm = {"step": 7, "alarm": "entropy", "reason": "the entropy fell"}
        context.redis.hset(own_keys.job_alarms(job_id), "1:7:entropy", json.dumps(alarm))
        warned = client.platform.attention()
        context.jobs.fail(job_id, "trainer_dies", HOSTILE)
        found = client.platform.attention()

    assert {entry.severity for entry in before} == {"warning"}
    assert {entry.subject for entry in before} >= {"inference", "trainer"}
    assert any("step 7: the entropy fell" in entry.message for entry in warned)
    assert any("no live replica of trainer" in entry.message and entry.severity == "error" for entry in warned)
    (failed,) = (entry for entry in found if entry.job_id == job_id)
    assert failed.severity == "error"
    assert failed.page == f"/jobs/{job_id}"
    page = api.get("/attention").text
    assert "trainer_dies" in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("earned", "told"),
    [
        ([-1.0] * 20, True),
        # One rollout of them was worth more.
        ([-1.0] * 19 + [-0.98], False),
        # Too few to say so.
        ([-1.0] * 2, False),
        # It never sampled.
        ([None] * 20, False),
    ],
)
def test_a_job_that_is_never_right_says_so_on_its_page_and_asks_for_a_person(
    context: AppContext, api: httpx.Client, document: dict[str, Any], earned: list[float | None], *, told: bool
) -> None:
    with Client(str(api.base_url)) as client:
        job_id = client.submit({**document, "rollout": {"samples_per_prompt": 4}, "trainer": {"batch_size": 32}}).id
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            context.jobs.transition(job_id, state, "test")
        for step, reward in enumerate(earned, 1):
            point = {"step": step, "reward": -0.5} | ({} if reward is None else {"reward/online": reward})
            context.redis.zadd(own_keys.job_metrics(job_id), {json.dumps(point): step})
        running = [each.message for each in client.get(job_id).warnings if each.pointer == "/rollout"]
        entries = [each for each in client.platform.attention() if "earned more" in each.message]
        context.jobs.transition(job_id, JobState.CANCELLING, "test")
        context.jobs.transition(job_id, JobState.CANCELLED, "test")
        ended = [each.message for each in client.get(job_id).warnings]

    sentence = f"no rollout of the last {len(earned)} steps earned more than the worst reward"
    assert [message.startswith(sentence) for message in running] == [True] * told
    assert [(each.job_id, each.message) for each in entries] == [(job_id, sentence)] * told
    assert ended == running
    assert (sentence in api.get(f"/jobs/{job_id}").text) == told


def test_before_the_first_step_what_prompts_have_shown_says_that_a_job_is_never_right(
    context: AppContext, document: dict[str, Any]
) -> None:
    document |= {"rollout": {"samples_per_prompt": 4, "unsolved_share": 0.5}}
    spec = parse_job_spec(document)
    job_id = context.jobs.submit(spec)
    outcomes = redis_keys.replay_outcomes(job_id)
    context.redis.hset(outcomes, mapping={"one": "40:0:40", "two": "36:0:36"})
    few = context.monitor.never_right(job_id, spec)
    context.redis.hset(outcomes, "three", "4:0:4")
    enough = context.monitor.never_right(job_id, spec)
    context.redis.hset(outcomes, "three", "4:1:0")

    assert few == ""
    assert enough.startswith("none of 80 rollouts was right: ")
    assert context.monitor.never_right(job_id, spec) == ""


def test_a_job_whose_turn_comes_is_not_wrong_and_stands_apart(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    with Client(str(api.base_url)) as client:
        job_id = client.submit(document | {"name": "one in the queue"}).id
        assert "the job waits for a slot" in client.get(job_id).waits[0]
        found = client.platform.attention()

    assert [entry for entry in found if entry.job_id == job_id] == []
    wrong, apart = api.get("/attention").text.split("Waiting for a slot")
    assert "one in the queue" in apart
    assert "one in the queue" not in wrong
    context.jobs.transition(job_id, JobState.CANCELLED, "test")
    assert "Waiting for a slot" not in api.get("/attention").text


def test_processes_that_end_again_and_again_are_a_crash_loop(context: AppContext, api: httpx.Client) -> None:
    for pid in range(4):
        context.replicas.beat(HeartbeatRequest(replica_id="judge-0", pool="sandbox-judge", pid=pid))

    assert "3 processes ended in the last 15 minutes" in api.get("/attention").text
    context.replicas.beat(HeartbeatRequest(replica_id="i", pool="inference", pid=1, draining=True))
    context.replicas.beat(HeartbeatRequest(replica_id="i", pool="inference", pid=2))
    assert context.replicas.ended_since(0) == {"sandbox-judge": 3}


def test_a_tenant_sees_no_other_tenants_trouble_datasets_or_models(
    open_context: Callable[..., AppContext],
    serve: Callable[[AppContext], str],
    document: dict[str, Any],
    tmp_path: Path,
) -> None:
    url = serve(open_context(api_key="operators-own-key"))
    with Client(url, "operators-own-key") as client:
        client.submit(document | {"name": "not for red"})
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps(ROW))
        client.datasets.upload(rows, name="theirs")
        key = client.platform.create_key("ada", "red", ["jobs:read"])
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key.token}"}, trust_env=False) as api:
        for path in ("/attention", "/datasets", "/models", "/", "/v1/attention"):
            answer = api.get(path)
            assert answer.status_code == 200, path
            assert "not for red" not in answer.text
            assert "theirs" not in answer.text
            assert document["model"]["path"] not in answer.text


def test_a_dataset_says_what_is_wrong_with_its_rows_and_who_uses_it(
    context: AppContext, api: httpx.Client, document: dict[str, Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps({"id": HOSTILE}))
    with Client(str(api.base_url)) as client:
        uploaded = client.datasets.upload(rows, name=HOSTILE[:190])
    context.datasets._advance(context.datasets.get(uploaded.id))

    listed, page = api.get("/datasets").text, api.get(f"/datasets/{uploaded.id}").text

    assert "invalid" in listed
    assert " faults</h2>" in page
    assert "line 2" in page
    for text in (listed, page):
        assert "<script>alert" not in text
    assert api.get("/datasets/ds_01J00000000000000000000000").status_code == 404


def test_models_are_those_that_jobs_name_and_those_that_were_trained(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    with Client(str(api.base_url)) as client:
        job_id = client.submit(document | {"name": "learner"}).id
    version = {
        "version": 3,
        "step": 30,
        "uri": "file:///w",
        "manifest_digest": "d",
        "size_bytes": 7_000_000,
        "published_at": "2026-01-31T12:00:00Z",
    }
    context.redis.hset(own_keys.job_weights(job_id), "3", json.dumps(version))
    own = context.settings.state_path / "cache" / "models" / "toy-standard-x"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    page = api.get("/models").text

    assert document["model"]["path"] in page
    assert "toy-standard-x" in page
    assert f"/v1/jobs/{job_id}/weights/3/download" in page


@pytest.mark.parametrize("path", ["/api", "/docs", "/docs/glossary.md", "/docs/troubleshooting.md", "/compare"])
def test_references_are_pages_under_the_same_policy(api: httpx.Client, path: str) -> None:
    page = api.get(path)

    assert page.status_code == 200
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert " style=" not in page.text
    assert "<img" not in page.text


def test_a_picture_of_a_document_is_served_as_one(api: httpx.Client) -> None:
    found = api.get("/docs/images/job.png")
    assert (found.status_code, found.headers["content-type"]) == (200, "image/png")
    assert found.content.startswith(b"\x89PNG")
    assert found.headers["x-content-type-options"] == "nosniff"


def test_every_operation_is_on_the_page_of_the_api(api: httpx.Client) -> None:
    page = api.get("/api").text
    for path, operations in api.get("/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page


@pytest.mark.parametrize("name", ["../README.md", "..%2FREADME.md", "no_such.md", "decisions/0001.md", "%00.md"])
def test_only_documents_are_served(api: httpx.Client, name: str) -> None:
    assert api.get(f"/docs/{name}").status_code in (404, 422)


def test_a_live_feed_asks_again_and_the_list_does_not(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    with Client(str(api.base_url)) as client:
        job_id = client.submit(document).id
    context.jobs.transition(job_id, JobState.CANCELLED, "test")

    assert "every 2s" not in api.get(f"/jobs/{job_id}/trajectories").text
    assert "every 2s" in api.get(f"/jobs/{job_id}/trajectories?live=1").text
