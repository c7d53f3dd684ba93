"""A job whose model no inference replica can load says so, and fails by name."""

from __future__ import annotations

from typing import Any

from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest


def beat(context: AppContext, name: str, refused: str) -> None:
    problem = "vLLM cannot serve the model: ValueError: No available memory for the cache blocks" if refused else ""
    context.replicas.beat(HeartbeatRequest(replica_id=name, pool="inference", refused_run_id=refused, problem=problem))


def test_a_job_fails_once_every_replica_of_it_has_given_up_on_its_model(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    for name in ("one", "two"):
        beat(context, name, "")
    context.runner.tick()
    assert context.assigner.serving(job_id) == ["one", "two"]

    for _ in range(2):
        beat(context, "one", job_id)
    context.runner.tick()

    assert context.jobs.state(job_id) is JobState.RUNNING
    (told,) = [each.body for each in context.jobs.events(job_id) if each.kind == "replica_gave_up"]
    assert told["replica_id"] == "one"
    assert "No available memory" in told["problem"]

    beat(context, "two", job_id)
    context.runner.tick()

    record = context.jobs.record(job_id)
    assert (context.jobs.state(job_id), record.failure_code) == (JobState.FAILED, "model_not_served")
    assert "none of 2 inference replicas" in record.failure_message
    assert "No available memory" in record.failure_message
