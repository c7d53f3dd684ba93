"""Logs of a job, deleting jobs, and trying a policy, over a really running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
import structlog

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.deletion import families, single_keys
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.observability import configure_logs, get_logger, lines_concern_run, waiting
from spo.service.process import ServiceProcess
from spo.spec.section import JobState
from spo.testing.runs import trajectory
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

Document = dict[str, Any]


def beat(context: AppContext, pool: str = "trainer", run_id: str = "") -> None:
    request = HeartbeatRequest(replica_id=f"{pool}-1", pool=pool, run_id=run_id)
    ServiceProcess._take_lines(request)
    context.replicas.beat(request)


@pytest.fixture
def job_id(api: httpx.Client, document: Document) -> str:
    waiting.clear()
    return str(api.post("/v1/jobs", json=document).json()["id"])


@pytest.fixture
def logging_on() -> Any:
    configure_logs("trainer")
    yield get_logger("test")
    lines_concern_run("")
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    waiting.clear()


def test_lines_travel_with_heartbeats_and_are_found_by_service_and_level(
    api: httpx.Client, context: AppContext, job_id: str, logging_on: Any
) -> None:
    logging_on.info("loading", run=job_id, path="x")
    lines_concern_run(job_id)
    logging_on.warning("slow")
    lines_concern_run("")
    beat(context, run_id=job_id)
    logging_on.error("broken", run=job_id, redis="redis://:canary@host/0", api_key="canary")
    beat(context, "inference")

    page = api.get(f"/v1/jobs/{job_id}/logs").json()

    assert [(line["service"], line["level"], line["fields"]["event"]) for line in page["items"]] == [
        ("inference", "error", "broken"),
        ("trainer", "warning", "slow"),
        ("trainer", "info", "loading"),
    ]
    assert "canary" not in json.dumps(page)
    events = [
        [line["fields"]["event"] for line in api.get(f"/v1/jobs/{job_id}/logs", params=query).json()["items"]]
        for query in ({"level": "warning"}, {"service": "trainer"}, {"service": "trainer", "level": "error"})
    ]
    assert events == [["broken", "slow"], ["slow", "loading"], []]


def test_a_line_that_names_no_run_goes_to_no_job(
    api: httpx.Client, context: AppContext, job_id: str, logging_on: Any
) -> None:
    context.jobs.transition(job_id, JobState.VALIDATING, "test")
    waiting.clear()
    logging_on.warning("the judge is slow")
    beat(context, "sandbox-judge")
    logging_on.warning("left from the run before")
    beat(context, "inference", run_id=job_id)

    assert api.get(f"/v1/jobs/{job_id}/logs").json()["items"] == []


def test_lines_of_a_run_that_is_gone_are_dropped(
    context: AppContext, redis_client: redis.Redis, job_id: str, logging_on: Any
) -> None:
    logging_on.info("late", run="job_01ARZ3NDEKTSV4RRFFQ69G5FAV")
    beat(context, run_id="job_01ARZ3NDEKTSV4RRFFQ69G5FAV")

    assert [key for key in redis_client.scan_iter("*logs*") if b"01ARZ3" in key] == []


def test_logs_are_paged_without_gap(api: httpx.Client, context: AppContext, job_id: str, logging_on: Any) -> None:
    for number in range(25):
        logging_on.info("line", run=job_id, number=number)
    beat(context)
    seen, cursor = [], ""
    while cursor is not None:
        page = api.get(f"/v1/jobs/{job_id}/logs", params={"limit": 10, "cursor": cursor}).json()
        seen += [line["fields"]["number"] for line in page["items"]]
        cursor = page["next_cursor"]

    assert seen == list(reversed(range(25)))


def test_a_heartbeat_carries_a_bounded_number_of_lines(context: AppContext, job_id: str, logging_on: Any) -> None:
    for number in range(5000):
        logging_on.info("flood", number=number)
    request = HeartbeatRequest(replica_id="r", pool="trainer")

    lines = ServiceProcess._take_lines(request)

    assert len(request.logs) == len(lines) == 200
    assert json.loads(lines[0].text)["number"] == 3000


def test_an_ended_job_is_deleted_with_all_it_left(
    api: httpx.Client, context: AppContext, job_id: str, redis_client: redis.Redis
) -> None:
    folders = [context.settings.state_path / kind / job_id / "1" for kind in ("weights", "checkpoints")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x")
    refused = api.delete(f"/v1/jobs/{job_id}")
    assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")
    api.post(f"/v1/jobs/{job_id}/cancel")
    redis_client.hset(redis_keys.run_values(job_id), "prompt-0", b"")
    ReplayStore(redis_client).append(job_id, [trajectory(number, run_id=job_id) for number in range(3)])
    redis_client.hset(redis_keys.replay_stored(job_id), "written", 3)
    ReplayStore(redis_client).record_batch(job_id, 7, ["traj_1"], {"online": 1})
    redis_client.hset(redis_keys.value_progress(job_id, "prompt-0"), "0", "1:1")
    redis_client.hset(own_keys.job_weights(job_id), "4", "{}")
    redis_client.hset(redis_keys.run_values_under(job_id, 4), "prompt-0", b"")
    redis_client.xadd(redis_keys.dead_letters(redis_keys.prompts(job_id)), {"payload": b""})
    redis_client.mset({f"spo:job_OTHER{number}:noise": b"x" for number in range(2000)})
    redis_client.config_resetstat()

    assert api.delete(f"/v1/jobs/{job_id}").status_code == 204

    assert api.get(f"/v1/jobs/{job_id}").status_code == 404
    assert api.get("/v1/jobs").json()["items"] == []
    assert api.delete(f"/v1/jobs/{job_id}").status_code == 404
    context.deletion.sweep()
    assert not any(folder.exists() for folder in folders)
    assert "cmdstat_scan" not in redis_client.info("commandstats"), "other jobs' keys are not looked at"
    assert redis_client.keys(f"*:{job_id}:*") == []
    assert redis_client.scard(own_keys.deleted_jobs()) == 0
    assert context.jobs.counts()[JobState.CANCELLED] == 0


def test_a_deletion_that_was_cut_short_is_finished_by_the_next_process(
    api: httpx.Client,
    context: AppContext,
    job_id: str,
    open_context: Callable[..., AppContext],
    redis_client: redis.Redis,
) -> None:
    api.post(f"/v1/jobs/{job_id}/cancel")
    context.watch.keep(job_id)

    def ends(_: str) -> None:
        raise RuntimeError("the process ends before the manifest is removed")

    context.deletion.forget = ends
    api.delete(f"/v1/jobs/{job_id}")

    after = open_context()
    after.deletion.sweep()

    assert redis_client.keys(f"*:{job_id}:*") == []
    assert after.watch.lost() == [], "a job that somebody has deleted is not lost"


def test_a_policy_can_be_tried(api: httpx.Client, job_id: str) -> None:
    answer = api.post(f"/v1/policies/{job_id}/completions", json={"prompt": "sum of the even numbers", "samples": 3})

    assert answer.status_code == 200, answer.text
    assert len(answer.json()["items"]) == 3
    assert {item["finish_reason"] for item in answer.json()["items"]} <= {"stop", "length", "unspecified"}
    assert api.get(f"/v1/policies/{job_id}/versions").json() == {"items": []}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/prompt"),
        ({"prompt": ""}, "/prompt"),
        ({"prompt": "x", "samples": 65}, "/samples"),
        ({"prompt": "x", "temperature": 0}, "/temperature"),
        ({"prompt": "x", "stop": "y"}, "/stop"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_by_field(
    api: httpx.Client, job_id: str, body: Document, pointer: str
) -> None:
    refused = api.post(f"/v1/policies/{job_id}/completions", json=body)

    assert refused.status_code == 422
    assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]


def test_every_kind_of_key_of_a_run_is_known_to_the_removal() -> None:
    # Whoever adds a key that exists once per run and something else adds it to deleted_keys.keys_of, and here.
    assert families(redis_keys, own_keys) == {
        "replay_trajectory", "replay_batch", "replay_source", "run_values_under", "value_progress", "trajectory_id",
    }  # fmt: skip
    assert len(single_keys(redis_keys, own_keys)) > 20
