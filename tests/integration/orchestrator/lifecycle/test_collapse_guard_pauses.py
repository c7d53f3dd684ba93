"""The collapse guard end to end: a real trainer with DeepSpeed, the real orchestrator over gRPC, a forced alarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import RESUME
from services.orchestrator.service import OrchestratorService
from services.orchestrator.steps import act_on
from services.orchestrator.versions import announced_version, published_versions
from spo.observability import TRAINER_COLLAPSE_ALARMS
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH
from spo.weights.store import WeightStore

if TYPE_CHECKING:
    from tests.integration.orchestrator.conftest import Training

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

STEPS, WINDOW, TURNS_AT = 10, 2, 7


def run_job(training: Training, policy: str) -> str:
    guard = {"policy": policy, "window": WINDOW, "log_ratio_nats": 100, "grad_norm": 1e6, "reward_fall": 100}
    return training.run_job({"steps": STEPS, "update_interval": 2, "checkpoint_interval": 2}, collapse_guard=guard)


def cut_off_from_step_seven(step: int, batch: Any) -> None:
    for each in batch.batch:
        if step >= TURNS_AT and each.trajectory.source == SOURCE_ONLINE:
            each.trajectory.finish_reason = FINISH_REASON_LENGTH


def alarms_counted() -> float:
    return float(TRAINER_COLLAPSE_ALARMS.labels(alarm="truncation")._value.get())


def test_by_policy_pause_an_alarm_pauses_the_job_at_the_last_good_weights(training: Training) -> None:
    context, counted = training.context, alarms_counted()
    training.pool.spoil = cut_off_from_step_seven
    job_id = run_job(training, "pause")

    training.wait_until(lambda: context.jobs.state(job_id) is JobState.PAUSED, "the job is paused")

    (alarm,) = training.events(job_id, "alarm")
    assert alarm.body | {"reason": ""} == {"step": 7, "alarm": "truncation", "reason": "", "policy": "pause"}
    pausing = next(each for each in training.events(job_id, "state") if each.body["to"] == "pausing")
    assert pausing.actor == "collapse guard"
    why = "collapse guard at step 7: truncated responses rose from 0% to 50%; inference is at weight version 2"
    assert pausing.body["reason"] == why
    # Published after steps 2, 4 and 6; the window of the alarm began after step 5.
    assert [each["version"] for each in published_versions(context.jobs, job_id)] == [1, 2, 3]
    announced = announced_version(context.jobs, job_id)
    assert announced is not None
    assert (announced.version, announced.step) == (2, 4)
    stored = WeightStore(context.settings.state_path / "weights").open(job_id, 2)
    assert stored.manifest_digest == announced.manifest_digest
    assert [each.step for each in training.pool.asked][-1] == 7
    numbers = [each.seq for each in context.jobs.events(job_id)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert alarms_counted() == counted + 1

    act_on(context.jobs, job_id, RESUME)
    training.wait_trained(job_id)

    assert len(training.events(job_id, "alarm")) == 1
    announced = announced_version(context.jobs, job_id)
    assert announced is not None
    assert (announced.version, announced.step) == (5, STEPS)


def test_by_policy_warn_an_alarm_is_an_event_and_training_goes_on(training: Training) -> None:
    training.pool.spoil = cut_off_from_step_seven
    job_id = run_job(training, "warn")

    training.wait_trained(job_id)

    (alarm,) = training.events(job_id, "alarm")
    assert (alarm.body["step"], alarm.body["alarm"], alarm.body["policy"]) == (7, "truncation", "warn")
    assert [each.body["to"] for each in training.events(job_id, "state")][-2:] == ["running", "succeeded"]


def test_a_quarantined_batch_is_an_event_with_the_ids_and_the_reason(training: Training) -> None:
    def spoil(step: int, batch: Any) -> None:
        if step == 3:
            batch.batch[5].trajectory.reward = float("nan")

    training.pool.spoil = spoil
    job_id = run_job(training, "warn")

    training.wait_trained(job_id)

    (quarantine,) = training.events(job_id, "quarantine")
    assert quarantine.body["step"] == 3
    assert len(quarantine.body["trajectory_ids"]) == 8
    assert "the reward is missing or not finite" in quarantine.body["reason"]


def test_a_report_that_arrives_twice_is_told_of_once_and_pauses_once(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id = context.jobs.submit(parse_job_spec({**document, "collapse_guard": {"policy": "pause"}}))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    grant = context.leases.wait_for_job("first", 0)
    report = wire.StepReport(step=30, alarms={"log_ratio": "far", "grad_norm": "high"}, metrics={"loss": 1.0})
    renewal = wire.RenewLeaseRequest(run_id=job_id, trainer_id="first", epoch=grant.epoch, reports=[report])
    service = OrchestratorService(context)

    first = service.RenewLease(renewal, None)  # type: ignore[arg-type]
    act_on(context.jobs, job_id, RESUME)
    second = service.RenewLease(renewal, None)  # type: ignore[arg-type]

    assert (first.directive, second.directive) == (wire.DIRECTIVE_PAUSE, wire.DIRECTIVE_CONTINUE)
    kinds = [each.kind for each in context.jobs.events(job_id)]
    assert kinds.count("alarm") == 2
    reasons = [each.body["reason"] for each in context.jobs.events(job_id) if each.body.get("to") == "pausing"]
    assert reasons == ["collapse guard at step 30: high; far; inference is at weight version 0"]
