"""Evaluations somebody asks for: of a finished job's weights, on any task set, after the jobs that train."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http.training import list_evaluations
from services.orchestrator.job_records import evaluation_results
from spo import redis_keys
from spo.spec.job_spec import EvaluationSpec, parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import BREAKS, FAULT, RIGHT, ServiceDoubles, wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.prompt_pb2 import PromptGroup


@pytest.fixture
def working_off(context: AppContext) -> Iterator[None]:
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()
    yield
    context.stop.set()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def finished_job(context: AppContext, document: dict[str, Any]) -> str:
    """A job that ended, with weight versions 1 and 2, the second saved as a checkpoint."""
    job_id = context.jobs.submit(parse_job_spec(document))
    for version in (1, 2):
        record = f'{{"version": {version}, "step": {10 * version}, "uri": "w", "manifest_digest": "d"}}'
        context.redis.hset(own_keys.job_weights(job_id), str(version), record)
    head = '{"step": 20, "path": "p", "manifest_digest": "d", "weight_version": 2}'
    context.redis.hset(redis_keys.job_checkpoints(job_id), "20", head)
    context.jobs.fail(job_id, "test", "it ended")
    return job_id


def ended(api: httpx.Client, evaluation_id: str) -> dict[str, Any] | None:
    found: dict[str, Any] = api.get(f"/v1/evaluations/{evaluation_id}").json()
    return found if found["state"] in ("succeeded", "failed") else None


def tick_until_validated(context: AppContext, job_id: str) -> None:
    """Advance the job past its checks, one of which runs in a process of its own."""

    def is_validated() -> bool:
        context.runner.tick()
        return context.jobs.state(job_id) not in (JobState.QUEUED, JobState.VALIDATING)

    wait_until(is_validated, "the job is validated", 60)


@pytest.mark.usefixtures("working_off")
def test_a_finished_jobs_checkpoint_is_evaluated_on_its_problems(
    api: httpx.Client, peers: ServiceDoubles, finished_job: str
) -> None:
    wanted = {"job_id": finished_job, "checkpoint_step": 20, "samples": 8, "ks": [1, 3, 8]}

    asked = api.post("/v1/evaluations", json=wanted)

    assert asked.status_code == 202
    assert asked.headers["Location"] == f"/v1/evaluations/{asked.json()['id']}"
    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")
    assert found["state"] == "succeeded"
    assert set(peers.inference.versions) == {2}
    result = found["result"]
    assert set(result["pass_at_k"]) == {"1", "3", "8"}
    assert result["pass_at_k"]["1"]["value"] == 0.5
    assert result["pass_at_k"]["1"]["low"] <= 0.5 <= result["pass_at_k"]["1"]["high"]
    assert [(row["samples"], row["correct"], row["distinct"]) for row in result["per_problem"]] == [(8, 4, 1)] * 3
    (listed,) = api.get("/v1/evaluations").json()["items"]
    assert "per_problem" not in listed["result"]


@pytest.mark.usefixtures("working_off")
def test_another_task_set_is_given_to_the_judges_first(
    api: httpx.Client, peers: ServiceDoubles, finished_job: str
) -> None:
    tasks = {"kind": "toy", "train_problems": 1, "evaluation_problems": 5, "seed": 7}

    asked = api.post("/v1/evaluations", json={"job_id": finished_job, "version": 0, "tasks": tasks})

    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")
    assert found["result"]["problems"] == 5
    assert len(peers.judge.uploaded) == 5
    assert set(peers.inference.versions) == {0}


@pytest.mark.usefixtures("working_off")
def test_an_evaluation_waits_for_the_job_that_trains_and_then_has_the_replicas(
    api: httpx.Client,
    context: AppContext,
    peers: ServiceDoubles,
    finished_job: str,
    document: dict[str, Any],
) -> None:
    # Without held-out problems of its own, so that only the request asks the replicas.
    document["tasks"]["evaluation_problems"] = 0
    training = context.jobs.submit(parse_job_spec(document))
    context.replicas.beat(wire.HeartbeatRequest(replica_id="r1", pool="inference"))
    assert context.assigner.run_of("r1") == ""
    tick_until_validated(context, training)
    assert context.assigner.run_of("r1") == training
    served_while_asked = []

    def respond(*_: object) -> str:
        served_while_asked.append(context.assigner.run_of("r1"))
        return RIGHT

    peers.inference.respond = respond
    asked = api.post("/v1/evaluations", json={"job_id": finished_job})
    assert api.get(f"/v1/evaluations/{asked.json()['id']}").json()["state"] == "queued"

    context.jobs.fail(training, "test", "it ended")

    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")
    assert found["version"] == 2, "the newest one, when none is named"
    assert set(served_while_asked) == {finished_job}
    assert context.assigner.run_of("r1") == ""


def test_a_request_waits_for_what_the_schedule_of_a_training_job_owes(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    training = context.jobs.submit(parse_job_spec(document))

    def is_prepared() -> bool:
        context.replicas.beat(wire.HeartbeatRequest(replica_id="r1", pool="inference"))
        context.runner.tick()
        return context.jobs.state(training) is JobState.ESTIMATING

    wait_until(is_prepared, "the job is prepared")
    requested = context.evaluations.request(training, 0, None, EvaluationSpec())
    sampled: list[str] = []

    def respond(group: PromptGroup, index: int) -> str:
        name = group.group_id.removeprefix(f"{training}-").rpartition("-")[0]
        if name not in sampled:
            sampled.append(name)
        return RIGHT

    peers.inference.respond = respond
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()

    wait_until(lambda: context.evaluations.requests.get(requested.id).state == "succeeded", "the request is answered")

    context.stop.set()
    thread.join(20)
    assert sampled == ["evaluation-0", requested.id]
    assert [result["step"] for result in evaluation_results(context.redis, training)] == [0]


def test_a_request_that_a_stop_interrupted_is_answered_by_the_next_process(
    open_context: Callable[..., AppContext], context: AppContext, finished_job: str, peers: ServiceDoubles
) -> None:
    requested = context.evaluations.request(finished_job, 2, None, EvaluationSpec())
    peers.inference.unready = 1_000_000
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()
    wait_until(lambda: context.evaluations.requests.get(requested.id).state == "running", "the evaluation begins")
    context.stop.set()
    thread.join(20)
    assert not thread.is_alive(), "a stop ends the wait for replicas"
    peers.inference.unready = 0

    successor = open_context()
    thread = threading.Thread(target=successor.evaluations.run, args=(successor.stop,))
    thread.start()
    wait_until(lambda: successor.evaluations.requests.get(requested.id).state == "succeeded", "the request is answered")
    successor.stop.set()
    thread.join(20)


def test_a_poisoned_evaluation_fails_and_the_next_one_is_carried_out(
    api: httpx.Client, context: AppContext, finished_job: str
) -> None:
    poisoned = context.evaluations.request(finished_job, 1, None, EvaluationSpec())
    stored = json.loads(context.redis.hget(own_keys.on_demand_evaluations(), poisoned.id) or b"")
    # As a fault of ours may have left it.
    damaged = json.dumps(stored | {"version": "one"})
    context.redis.hset(own_keys.on_demand_evaluations(), poisoned.id, damaged)
    asked = api.post("/v1/evaluations", json={"job_id": finished_job})
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()

    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")

    context.stop.set()
    thread.join(20)
    assert found["state"] == "succeeded"
    failed = context.evaluations.requests.get(poisoned.id)
    assert (failed.state, failed.failure["code"]) == ("failed", "internal")
    assert context.redis.zcard(own_keys.open_evaluations()) == 0


@pytest.mark.usefixtures("working_off")
def test_an_evaluation_has_the_means_of_scores_and_their_parts(
    api: httpx.Client, finished_job: str, peers: ServiceDoubles
) -> None:
    peers.judge.parts = {"format": 1.0, "right": 0.25}
    asked = api.post("/v1/evaluations", json={"job_id": finished_job})

    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")

    assert found["result"]["scores"] == {"format": 1.0, "right": 0.25, "score": 0.25}


@pytest.mark.usefixtures("working_off")
def test_an_evaluation_says_what_of_its_verifier_failed(
    api: httpx.Client, finished_job: str, peers: ServiceDoubles
) -> None:
    peers.inference.respond = lambda group, index: BREAKS
    asked = api.post("/v1/evaluations", json={"job_id": finished_job})

    found = wait_until(lambda: ended(api, asked.json()["id"]), "the evaluation ends")

    assert (found["state"], found["failure"]["code"]) == ("failed", "verifier_failed")
    assert FAULT in found["failure"]["message"]


def test_evaluations_of_a_deleted_job_stay_with_their_tenant(context: AppContext, document: dict[str, Any]) -> None:
    job_id = context.jobs.submit(parse_job_spec(document), tenant="red")
    context.evaluations.request(job_id, 0, None, EvaluationSpec())
    context.jobs.fail(job_id, "test", "it ended")
    context.deletion.delete(job_id)

    red, blue = (Principal(name, tenant=name, scopes=frozenset({"jobs:read"})) for name in ("red", "blue"))
    assert [each.job_id for each in list_evaluations(context, red).items] == [job_id]
    assert list_evaluations(context, blue).items == []


def test_what_cannot_be_evaluated_is_refused_by_field(api: httpx.Client, finished_job: str) -> None:
    def pointers(**fields: Any) -> list[str]:
        answer = api.post("/v1/evaluations", json={"job_id": finished_job, **fields})
        assert answer.status_code == 422, answer.text
        return [error["pointer"] for error in answer.json()["errors"]]

    assert pointers(version=9) == ["/version"]
    assert pointers(checkpoint_step=15) == ["/checkpoint_step"]
    assert pointers(samples=4) == ["/ks"]
    assert pointers(tasks={"kind": "toy", "evaluation_problems": 0}) == ["/tasks/evaluation_problems"]
    absent = api.post("/v1/evaluations", json={"job_id": "job_" + "0" * 26})
    assert absent.status_code == 404
