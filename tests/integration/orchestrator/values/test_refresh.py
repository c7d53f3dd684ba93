"""The refresh of the reference: asked for once per interval, in force when all values are there, then taken over."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import training_series
from services.orchestrator.service import OrchestratorService
from services.orchestrator.values import advance_reference, reference_in_force
from services.orchestrator.versions import publish_version
from spo import redis_keys
from spo.algorithm.values import q_from_successes
from spo.errors import NotReady
from spo.manifest_folder import numbered_folders, open_folder
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.value_pb2 import EstimateRequest, PromptValue

if TYPE_CHECKING:
    from tests.integration.orchestrator.conftest import Training

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

REFRESH = {"algorithm": {"reference_refresh": {"interval_steps": 10, "samples": 8}}}
OF_THE_POOL = [f"prompt_{number}" for number in range(6)]


def give_values(context: AppContext, key: str, prompt_ids: Sequence[str], successes: int) -> None:
    for prompt_id in prompt_ids:
        value = PromptValue(prompt_id=prompt_id, samples=8, successes=successes)
        context.redis.hset(key, prompt_id, value.SerializeToString())


def asked(context: AppContext) -> list[EstimateRequest]:
    entries: Any = context.redis.xrange(redis_keys.estimates())
    return [EstimateRequest.FromString(fields[b"payload"]) for _, fields in entries]


def running(context: AppContext, document: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A job that runs and whose prompts have values under pi0, and its trainer."""
    trainer = {"steps": 40, "update_interval": 5, "checkpoint_interval": 10, "reference": "in_trainer"}
    job_id = context.jobs.submit(parse_job_spec({**document, **REFRESH, "trainer": trainer}))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    problems = context.library.load(context.jobs.spec(job_id).tasks).train
    # One prompt was given up on in the beginning: it is asked about no more.
    give_values(context, redis_keys.run_values(job_id), [each.problem_id for each in problems[1:]], 1)
    grant = context.leases.wait_for_job("trainer", 0)
    return job_id, {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}


def publish(context: AppContext, who: dict[str, Any], version: int, step: int) -> None:
    publish_version(
        context.jobs,
        wire.PublishWeightsRequest(**who, version=version, step=step, uri="/w", manifest_digest=f"digest-{version}"),
    )


def test_a_version_at_the_end_of_an_interval_is_asked_about_once_and_in_force_when_all_is_known(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id, who = running(context, document)
    publish(context, who, 1, 5)
    advance_reference(context.jobs, context.library, job_id)
    assert asked(context) == []

    publish(context, who, 2, 10)
    advance_reference(context.jobs, context.library, job_id)
    advance_reference(context.jobs, context.library, job_id)

    requests = asked(context)
    assert len(requests) == len({each.prompt.prompt_id for each in requests}) == 5
    assert {(each.reference_version, each.reference_hash) for each in requests} == {(2, "digest-2")}
    assert {each.sampling.samples for each in requests} == {8}

    service, renewal = OrchestratorService(context), wire.RenewLeaseRequest(**who)
    prompt_ids = [each.prompt.prompt_id for each in requests]
    give_values(context, redis_keys.run_values_under(job_id, 2), prompt_ids[:-1], 4)
    advance_reference(context.jobs, context.library, job_id)
    assert service.RenewLease(renewal, None).reference_version == 0  # type: ignore[arg-type]
    give_values(context, redis_keys.run_values_under(job_id, 2), prompt_ids[-1:], 4)
    advance_reference(context.jobs, context.library, job_id)
    advance_reference(context.jobs, context.library, job_id)

    assert service.RenewLease(renewal, None).reference_version == 2  # type: ignore[arg-type]
    told = [each.body for each in context.jobs.events(job_id) if each.kind == "reference"]
    assert told == [{"version": 2, "prompts": 5}]
    request = wire.GetReferenceValuesRequest(run_id=job_id, version=2)
    values = service.GetReferenceValues(request, None).qhat_0  # type: ignore[arg-type]
    expected = q_from_successes(4, 8, context.jobs.spec(job_id).algorithm.beta)
    assert dict(values) == pytest.approx(dict.fromkeys(prompt_ids, expected))

    publish(context, who, 4, 20)
    advance_reference(context.jobs, context.library, job_id)
    assert {each.reference_version for each in asked(context)[5:]} == {4}


def test_the_trainer_takes_the_new_reference_with_its_values_and_its_checkpoints_know(training: Training) -> None:
    context, released = training.context, threading.Event()

    def hold_from_step_13(step: int, batch: Any) -> None:
        if step >= 13 and not released.is_set():
            raise NotReady("held")

    training.pool.spoil = hold_from_step_13
    trainer = {"steps": 15, "update_interval": 5, "checkpoint_interval": 5, "reference": "in_trainer"}
    # The pool's trajectories are of other prompts than the toy contest's.
    job_id = training.run_job(trainer, **REFRESH)
    problems = context.library.load(context.jobs.spec(job_id).tasks).train
    give_values(context, redis_keys.run_values(job_id), [each.problem_id for each in problems], 1)
    training.wait_until(lambda: len(asked(context)) == len(problems), "values under version 2 are asked for")
    training.wait_until(lambda: 12 in training_series(context.redis, job_id).steps, "what may be learned is learned")
    everything = [*OF_THE_POOL, *(each.problem_id for each in problems)]
    give_values(context, redis_keys.run_values_under(job_id, 2), everything, 8)
    training.wait_until(lambda: reference_in_force(context.jobs, job_id) == 2, "the reference is in force")
    await_renewals(training, job_id)
    released.set()
    training.wait_trained(job_id)

    series = training_series(context.redis, job_id)
    at = {
        step: {name: column[row] or 0.0 for name, column in series.columns.items()}
        for row, step in enumerate(series.steps)
    }
    # Version 2 was gathered after step 10: near the policy of step 13, unlike pi0.
    assert abs(at[13]["log_ratio"]) < 0.5 * abs(at[12]["log_ratio"])
    # Under it every prompt is always solved, so Qhat_0 is 0 instead of -0.3; Q_T = Qhat_0 + sum of A.
    beta = context.jobs.spec(job_id).algorithm.beta
    assert at[12]["q_terminal"] == pytest.approx(-0.3 + beta * at[12]["log_ratio"], abs=1e-4)
    assert at[13]["q_terminal"] == pytest.approx(beta * at[13]["log_ratio"], abs=1e-4)
    saved = {step: open_folder(path).manifest["reference_version"] for step, path in checkpoints(context, job_id)}
    assert saved == {10: 0, 15: 2}


def await_renewals(training: Training, job_id: str) -> None:
    """Two renewals: the second began after now, so the trainer has heard of what is in force now."""
    for _ in range(2):
        expiry = training.context.leases.lease(job_id).expires_unix_ms

        def renewed(before: int = expiry) -> bool:
            return training.context.leases.lease(job_id).expires_unix_ms > before

        training.wait_until(renewed, "a renewal")


def checkpoints(context: AppContext, job_id: str) -> list[tuple[int, Path]]:
    return numbered_folders(context.settings.state_path / "checkpoints" / job_id)
