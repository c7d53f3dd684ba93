"""One evaluation's trouble is its own: of a job with damaged weights, of one nobody answers, of one nobody wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.orchestrator import evaluation, redis_keys as own_keys, scoring
from services.orchestrator.container import AppContext
from services.orchestrator.evaluation import RequestedEvaluation, ScheduledEvaluation
from services.orchestrator.job_records import CANCEL, evaluation_results
from services.orchestrator.steps import act_on
from services.orchestrator.versions import publish_version
from spo.errors import IntegrityError, InternalError, InvalidInput, NotReady, SpoError
from spo.spec.job_spec import EvaluationSpec, parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import BREAKS, RIGHT, ServiceDoubles, wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.prompt_pb2 import PromptGroup

WITH_LIMITS = {"evaluation_attempts": 2, "evaluation_patience_seconds": 0.5, "evaluations_kept": 3}


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(**WITH_LIMITS)


@pytest.fixture
def working_off(context: AppContext) -> Iterator[None]:
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()
    yield
    context.stop.set()
    thread.join(20)
    assert not thread.is_alive()


def running_job(context: AppContext, document: dict[str, Any], seed: int = 0) -> str:
    job_id = context.jobs.submit(parse_job_spec(document | {"seed": seed}))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def evaluated(context: AppContext, job_id: str) -> list[dict[str, Any]]:
    return evaluation_results(context.redis, job_id)


def state_of(context: AppContext, requested: RequestedEvaluation) -> str:
    return context.evaluations.requests.get(requested.id).state


@pytest.mark.usefixtures("working_off")
def test_a_job_whose_weights_are_damaged_fails_its_evaluation_by_name_and_delays_no_other(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    asked: list[str] = []

    def respond(group: PromptGroup, index: int) -> str:
        asked.append(group.run_id)
        if group.run_id == broken:
            raise IntegrityError("version 0: model.safetensors does not match the digest in its manifest")
        return RIGHT

    broken = running_job(context, document)
    peers.inference.respond = respond
    healthy = running_job(context, document, seed=1)

    wait_until(lambda: evaluated(context, healthy), "the healthy job is evaluated")
    (failure,) = wait_until(lambda: context.evaluations.schedule.given_up(broken), "the broken one is given up on")

    assert (failure.step, failure.failed_attempts, failure.code) == (0, 2, "integrity")
    assert "does not match the digest" in failure.message
    (told,) = [each for each in context.jobs.events(broken) if each.kind == "evaluation_failed"]
    assert told.body["message"] == failure.message
    assert context.evaluations.schedule.due(broken) is None, "it is not tried for ever"


@pytest.mark.usefixtures("working_off")
@pytest.mark.parametrize("again", [2, None], ids=["published again", "whole for the trainer"])
def test_a_job_whose_last_weights_are_damaged_goes_back_to_a_trainer_once_and_is_evaluated_at_what_it_publishes_again(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any], again: int | None
) -> None:
    def respond(group: PromptGroup, index: int) -> str:
        if group.policy_version in damaged:
            raise IntegrityError("the weights are damaged")
        return RIGHT

    def train(version: int | None) -> None:
        lease = context.leases.wait_for_job("trainer", 0)
        assert lease.run_id == job_id
        holder: dict[str, Any] = {"run_id": job_id, "trainer_id": "trainer", "epoch": lease.epoch}
        if version:
            publish_version(context.jobs, wire.PublishWeightsRequest(**holder, version=version, step=20))
        context.leases.checkpoint(wire.ReportCheckpointRequest(**holder, step=20, path="20", weight_version=version))
        context.leases.finish(wire.FinishRunRequest(**holder, final_step=20))

    damaged = {1}
    peers.inference.respond = respond
    job_id = running_job(context, document)
    train(1)
    wait_until(lambda: context.evaluations.schedule.given_up(job_id), "the evaluation is given up on")
    context.runner.tick()
    assert context.jobs.state(job_id) is JobState.RUNNING
    assert context.jobs.events(job_id)[-1].kind == "weights_damaged"
    train(again)
    wait_until(lambda: context.evaluations.schedule.due(job_id) is None, "it is evaluated, or that is given up")
    context.runner.tick()

    assert context.jobs.state(job_id) is JobState.SUCCEEDED
    failed = "; the evaluation of step 20 failed: the weights are damaged"
    expected = "20 steps trained and evaluated" if again else f"20 steps trained{failed}"
    assert context.jobs.events(job_id)[-1].body["reason"] == expected


@pytest.mark.usefixtures("working_off")
def test_a_job_ends_although_its_last_evaluation_cannot_and_says_so(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    def respond(group: PromptGroup, index: int) -> str:
        raise IntegrityError("the weights are damaged")

    peers.inference.respond = respond
    job_id = running_job(context, document)
    context.redis.hset(f"spo:{job_id}:orchestrator:job", "trained_steps", 20)
    wait_until(lambda: context.evaluations.schedule.given_up(job_id), "the evaluation is given up on")

    context.runner.tick()

    assert context.jobs.state(job_id) is JobState.SUCCEEDED
    reason = context.jobs.events(job_id)[-1].body["reason"]
    assert reason == "20 steps trained; the evaluation of step 0 failed: the weights are damaged"


@pytest.mark.usefixtures("working_off")
@pytest.mark.parametrize(
    ("says", "code"),
    [
        pytest.param(
            InvalidInput("the prompt has 9999 tokens", code="prompt_too_long"), "prompt_too_long", id="refused"
        ),
        pytest.param(InvalidInput("it killed engines", code="kills_engine"), "kills_engine", id="kills engines"),
        pytest.param(InternalError("the environment is broken"), "internal", id="a fault of inference"),
        pytest.param(BREAKS, "verifier_failed", id="a fault of its verifier"),
        pytest.param(NotReady("its reward service is away"), "not_ready", id="nobody answers for it"),
    ],
)
def test_one_problem_that_cannot_be_decided_is_named_and_the_others_are_evaluated(
    context: AppContext,
    peers: ServiceDoubles,
    document: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    says: str | SpoError,
    code: str,
) -> None:
    monkeypatch.setattr(scoring, "RETRY_SECONDS", 0.01)
    first: list[str] = []

    def respond(group: PromptGroup, index: int) -> str:
        first.append(group.prompt.prompt_id)
        if group.prompt.prompt_id != first[0]:
            return RIGHT
        if isinstance(says, SpoError):
            raise says
        return says

    peers.inference.respond = respond
    job_id = running_job(context, document)

    (found,) = wait_until(lambda: evaluated(context, job_id), "the job is evaluated", 30)

    (undecided,) = found["undecided"]
    assert (undecided["prompt_id"], undecided["code"]) == (first[0], code)
    assert undecided["reason"]
    assert (found["decided"], len(found["per_problem"])) == (found["problems"] - 1, found["problems"] - 1)
    assert found["pass_at_k"]["1"]["value"] == 1, "over those that are decided"
    assert not context.evaluations.schedule.given_up(job_id)


@pytest.mark.usefixtures("working_off")
def test_a_job_that_nobody_answers_waits_without_using_up_its_attempts_and_delays_no_other(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    def respond(group: PromptGroup, index: int) -> str:
        if group.run_id == silent and is_away:
            raise NotReady("the model still loads")
        return RIGHT

    is_away = True
    silent = running_job(context, document)
    peers.inference.respond = respond
    healthy = running_job(context, document, seed=1)
    wait_until(lambda: evaluated(context, healthy), "the healthy job is evaluated")
    (failure,) = wait_until(lambda: context.evaluations.schedule.failures(silent), "the other says why it waits")
    assert (failure.failed_attempts, failure.message) == (0, "the model still loads")

    is_away = False

    wait_until(lambda: evaluated(context, silent), "it is evaluated once the model is loaded")
    assert context.evaluations.schedule.failures(silent) == []


@pytest.mark.usefixtures("working_off")
def test_a_request_that_is_never_answered_gives_its_turns_to_others_and_fails_by_name(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    def respond(group: PromptGroup, index: int) -> str:
        if group.run_id == silent:
            raise NotReady("vLLM cannot serve the model: unknown head size")
        return RIGHT

    silent, healthy = (context.jobs.submit(parse_job_spec(document | {"seed": seed})) for seed in (1, 2))
    for job_id in (silent, healthy):
        context.jobs.fail(job_id, "test", "it ended")
    peers.inference.respond = respond
    stuck = context.evaluations.request(silent, 0, None, EvaluationSpec())
    later = context.evaluations.request(healthy, 0, None, EvaluationSpec())

    wait_until(lambda: state_of(context, later) == "succeeded", "the later request is answered")
    wait_until(lambda: state_of(context, stuck) == "failed", "the stuck one ends")

    failure = context.evaluations.requests.get(stuck.id).failure
    assert failure == {"code": "not_ready", "message": "vLLM cannot serve the model: unknown head size"}


@pytest.mark.usefixtures("working_off")
def test_an_evaluation_under_way_can_be_cancelled_and_the_next_one_begins(
    api: httpx.Client, context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    released = threading.Event()

    def respond(group: PromptGroup, index: int) -> str:
        if first.id in group.group_id and not released.is_set():
            raise NotReady("its replica loads")
        return RIGHT

    job_id = context.jobs.submit(parse_job_spec(document))
    context.jobs.fail(job_id, "test", "it ended")
    peers.inference.unready = 1_000_000
    first = context.evaluations.request(job_id, 0, None, EvaluationSpec())
    peers.inference.respond = respond
    peers.inference.unready = 0
    wait_until(lambda: state_of(context, first) == "running", "the evaluation begins")
    second = context.evaluations.request(job_id, 0, None, EvaluationSpec())

    cancelled = api.post(f"/v1/evaluations/{first.id}/cancel")

    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert api.post(f"/v1/evaluations/{first.id}/cancel").status_code == 200
    wait_until(lambda: state_of(context, second) == "succeeded", "the next one is answered")
    assert state_of(context, first) == "cancelled"
    ended = api.post(f"/v1/evaluations/{second.id}/cancel")
    assert (ended.status_code, ended.json()["code"]) == (409, "evaluation_ended")


@pytest.mark.usefixtures("working_off")
def test_requests_end_with_the_job_that_is_cancelled_or_deleted(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    peers.inference.unready = 1_000_000
    cancelled, deleted = (context.jobs.submit(parse_job_spec(document | {"seed": seed})) for seed in (1, 2))
    context.jobs.fail(deleted, "test", "it ended")
    requests = [context.evaluations.request(job_id, 0, None, EvaluationSpec()) for job_id in (cancelled, deleted)]

    act_on(context.jobs, cancelled, CANCEL, "test")
    context.deletion.delete(deleted)

    for requested in requests:
        wait_until(lambda each=requested: state_of(context, each) == "cancelled", "the request ends with its job")
    reasons = [context.evaluations.requests.get(requested.id).failure["message"] for requested in requests]
    assert reasons == ["its job was cancelled", "its job was deleted"]


@pytest.mark.usefixtures("working_off")
def test_requests_of_one_model_are_answered_before_the_replicas_load_another(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any], tmp_path: Any
) -> None:
    other = tmp_path / "other"
    other.symlink_to(document["model"]["path"])
    first, second = (
        context.jobs.submit(parse_job_spec(document | {"model": {"path": str(path)}}))
        for path in (document["model"]["path"], other)
    )
    for job_id in (first, second):
        context.jobs.fail(job_id, "test", "it ended")
    peers.inference.unready = 5
    requests = [
        context.evaluations.request(job_id, 0, None, EvaluationSpec()) for job_id in (first, second, first, second)
    ]
    served: list[str] = []

    def respond(group: PromptGroup, index: int) -> str:
        if not served or served[-1] != group.run_id:
            served.append(group.run_id)
        return RIGHT

    peers.inference.respond = respond

    for requested in requests:
        wait_until(lambda each=requested: state_of(context, each) == "succeeded", "the request is answered")
    assert served == [first, second], "each model was loaded once"


def test_a_job_keeps_its_newest_evaluations_and_that_of_the_reference(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id = running_job(context, document)
    for step in range(0, 80, 10):
        context.evaluations.schedule.store(
            ScheduledEvaluation(job_id, step, step // 10), {"step": step, "pass_at_k": {}}
        )
    assert [result["step"] for result in evaluated(context, job_id)] == [0, 50, 60, 70]

    requests = [context.evaluations.request(job_id, 0, None, EvaluationSpec()) for _ in range(6)]
    for requested in requests[:5]:
        context.evaluations.requests.update(requested.failed("test", "it failed"))
    left = {requested.id for requested in context.evaluations.requests.all()}
    assert left == {requested.id for requested in requests[3:]}, "the open one and the newest that ended"
    assert context.redis.zcard(own_keys.requested_evaluations(job_id)) == 3


def test_a_tenants_evaluations_give_way_to_its_own_alone(
    context: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "MAX_KEPT", 2)
    spec = parse_job_spec(document)
    red, blue, other = (context.jobs.submit(spec, tenant=tenant) for tenant in ("red", "blue", "blue"))
    asked = [context.evaluations.request(job_id, 0, None, EvaluationSpec()) for job_id in (red, blue, blue, other)]

    for requested in asked:
        context.evaluations.requests.update(requested.failed("test", "it failed"))

    assert {left.id for left in context.evaluations.requests.all()} == {asked[each].id for each in (0, 2, 3)}
