"""One trainer per job, fenced; replicas that register by heartbeat; weight versions announced once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import training_series
from services.orchestrator.service import OrchestratorService
from services.orchestrator.versions import publish_version
from spo import redis_keys
from spo.errors import Conflict, LeaseLost
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub, add_OrchestratorServiceServicer_to_server


def running(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def owner(grant: wire.LeaseJobResponse, trainer: str) -> dict[str, Any]:
    return {"run_id": grant.run_id, "trainer_id": trainer, "epoch": grant.epoch}


def publish(context: AppContext, who: dict[str, Any], version: int, digest: str = "d") -> bool:
    return publish_version(
        context.jobs,
        wire.PublishWeightsRequest(
            **who, version=version, step=version * 10, uri=f"/w/{version}", manifest_digest=digest
        ),
    )


def announcements(context: AppContext, job_id: str) -> int:
    return int(context.redis.xlen(redis_keys.weights(job_id)))


def test_a_job_is_leased_to_one_trainer_only(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running(context, document)

    first = context.leases.wait_for_job("first", 0)
    second = context.leases.wait_for_job("second", 0)

    assert (first.run_id, first.epoch, first.next_weight_version) == (job_id, 1, 1)
    assert first.checkpoint_path.endswith(f"checkpoints/{job_id}")
    assert second.run_id == ""


def test_a_job_that_does_not_run_is_not_leased(context: AppContext, document: dict[str, Any]) -> None:
    context.jobs.submit(parse_job_spec(document))

    assert context.leases.wait_for_job("trainer", 0).run_id == ""


def test_a_waiting_trainer_gets_the_job_when_it_begins_to_run(context: AppContext, document: dict[str, Any]) -> None:
    threading.Timer(0.5, running, (context, document)).start()

    assert context.leases.wait_for_job("trainer", 10).run_id


def test_an_expired_lease_goes_to_the_next_trainer_and_the_stale_one_can_do_nothing(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(lease_seconds=0.2)
    job_id = running(context, document)
    stale = owner(context.leases.wait_for_job("stale", 0), "stale")
    publish(context, stale, 1)
    fresh = context.leases.wait_for_job("fresh", 10)

    assert (fresh.epoch, fresh.next_weight_version) == (2, 2)
    with pytest.raises(LeaseLost):
        context.leases.renew(wire.RenewLeaseRequest(**stale, reports=[wire.StepReport(step=1)]))
    with pytest.raises(LeaseLost):
        publish(context, stale, 2)
    with pytest.raises(LeaseLost):
        context.leases.checkpoint(wire.ReportCheckpointRequest(**stale, step=1))
    with pytest.raises(LeaseLost):
        context.leases.finish(wire.FinishRunRequest(**stale, error_code="x", error_message="x"))
    assert (announcements(context, job_id), context.jobs.state(job_id)) == (1, JobState.RUNNING)
    assert training_series(context.redis, job_id).steps == []


def test_a_lease_that_is_renewed_stays(open_context: Callable[..., AppContext], document: dict[str, Any]) -> None:
    context = open_context(lease_seconds=0.4)
    running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        assert context.leases.renew(wire.RenewLeaseRequest(**mine)) == wire.DIRECTIVE_CONTINUE
        assert context.leases.wait_for_job("other", 0).run_id == ""


def test_step_reports_are_idempotent_by_step(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")
    for loss in (1.0, 2.0):
        reports = [wire.StepReport(step=step, metrics={"loss": loss * step}) for step in (1, 2, 3)]
        context.leases.renew(wire.RenewLeaseRequest(**mine, reports=reports))

    series = training_series(context.redis, job_id)
    assert (series.steps, series.columns) == ([1, 2, 3], {"loss": [2.0, 4.0, 6.0]})


def test_a_long_curve_is_thinned_and_keeps_its_newest_point(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")
    reports = [wire.StepReport(step=step, metrics={"loss": float(step)}) for step in range(1, 101)]
    context.leases.renew(wire.RenewLeaseRequest(**mine, reports=reports))

    series = training_series(context.redis, job_id, from_step=11, max_points=10)
    assert len(series.steps) <= 10
    assert series.steps[-1] == 100
    assert series.steps[0] >= 11


def test_a_checkpoint_a_person_asked_for_is_passed_on_until_it_is_there(
    context: AppContext, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")

    assert api.post(f"/v1/jobs/{job_id}/checkpoint").status_code == 202
    assert context.leases.renew(wire.RenewLeaseRequest(**mine)) == wire.DIRECTIVE_CHECKPOINT
    context.leases.checkpoint(wire.ReportCheckpointRequest(**mine, step=7, path="p", manifest_digest="d"))
    assert context.leases.renew(wire.RenewLeaseRequest(**mine)) == wire.DIRECTIVE_CONTINUE
    checkpoint_folder(context, job_id, 7).mkdir(parents=True)
    assert [head["step"] for head in api.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]] == [7]


def checkpoint_folder(context: AppContext, job_id: str, step: int) -> Path:
    return context.settings.state_path / "checkpoints" / job_id / f"{step:010d}"


def save(context: AppContext, who: dict[str, Any], step: int, resumed_step: int = 0) -> list[int]:
    """Report a checkpoint of which the newest two are kept."""
    request = wire.ReportCheckpointRequest(
        **who, step=step, path="p", manifest_digest=f"{who['epoch']}:{step}", keep=2, resumed_step=resumed_step
    )
    return context.leases.checkpoint(request)


def test_a_lease_names_the_checkpoints_to_resume_from_newest_first_and_those_of_a_stale_trainer_are_not_among_them(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(lease_seconds=0.2)
    running(context, document)
    stale = owner(context.leases.wait_for_job("stale", 0), "stale")
    save(context, stale, 80)
    assert save(context, stale, 100) == [80, 100]
    assert save(context, stale, 110) == [100, 110]
    fresh = owner(context.leases.wait_for_job("fresh", 10), "fresh")

    with pytest.raises(LeaseLost):
        save(context, stale, 120)
    # It found 110 damaged and began at 100: what lies beyond is not of its line.
    assert save(context, fresh, 105, resumed_step=100) == [100, 105]
    third = context.leases.wait_for_job("third", 10)

    told = [(item.epoch, item.step, item.manifest_digest) for item in third.checkpoints.items]
    assert told == [(2, 105, "2:105"), (1, 100, "1:100")]


def test_a_checkpoint_of_a_newer_lease_goes_before_one_of_a_higher_step(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(lease_seconds=0.2)
    running(context, document)
    save(context, owner(context.leases.wait_for_job("first", 0), "first"), 100)
    second = owner(context.leases.wait_for_job("second", 10), "second")
    # As a trainer from before pruning was recorded says it.
    context.leases.checkpoint(wire.ReportCheckpointRequest(**second, step=50, path="p", manifest_digest="d"))

    third = context.leases.wait_for_job("third", 10)

    assert [(item.epoch, item.step) for item in third.checkpoints.items] == [(2, 50), (1, 100)]


def test_pruned_checkpoints_are_not_listed(context: AppContext, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")
    for step in range(1, 16):
        checkpoint_folder(context, job_id, step).mkdir(parents=True)
        save(context, mine, step)

    listed = api.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]

    assert [(head["step"], head["parent"], head["epoch"]) for head in listed] == [(14, None, 1), (15, 14, 1)]


def test_a_version_published_twice_is_announced_once(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")

    assert [publish(context, mine, 1), publish(context, mine, 1)] == [True, True]
    with pytest.raises(Conflict):
        publish(context, mine, 1, digest="other")
    assert announcements(context, job_id) == 1


@pytest.fixture
def orchestrator(context: AppContext) -> Any:
    server = RpcServer("127.0.0.1", 0)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), server.server)
    server.start()
    client = RpcClient("orchestrator", server.address, OrchestratorServiceStub)
    yield client
    client.close()
    server.stop(1)


def beat(orchestrator: RpcClient, **fields: Any) -> wire.HeartbeatResponse:
    request = wire.HeartbeatRequest(**{"replica_id": "r1", "pool": "inference", **fields})
    response: wire.HeartbeatResponse = orchestrator.call("Heartbeat", request, deadline_seconds=5)
    return response


def test_a_heartbeat_brings_an_inference_replica_its_run_and_its_weights(
    context: AppContext, orchestrator: RpcClient, document: dict[str, Any]
) -> None:
    assert beat(orchestrator).run_id == ""
    job_id = running(context, document)
    answer = beat(orchestrator)
    assert (answer.run_id, answer.model_path) == (job_id, document["model"]["path"])
    assert not answer.HasField("weights")

    publish(context, owner(context.leases.wait_for_job("mine", 0), "mine"), 1)

    assert beat(orchestrator).weights.version == 1
    assert beat(orchestrator, replica_id="j1", pool="sandbox-judge").run_id == ""


def test_the_versions_list_says_who_applied_which(
    context: AppContext, orchestrator: RpcClient, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    publish(context, owner(context.leases.wait_for_job("mine", 0), "mine"), 1)
    beat(orchestrator, replica_id="fast", run_id=job_id)
    for version in (1, 0, 1):
        beat(orchestrator, replica_id="fast", run_id=job_id, policy_version=version)
    beat(orchestrator, replica_id="slow", run_id=job_id)
    beat(orchestrator, replica_id="broken", run_id=job_id, problem="digest mismatch")

    (version,) = api.get(f"/v1/jobs/{job_id}/weights").json()["items"]
    assert (version["applied"], version["pending"], version["failed"]) == (["fast"], ["slow"], ["broken"])
    assert api.get(f"/v1/jobs/{job_id}/weights/1").json() == version
    assert api.get(f"/v1/jobs/{job_id}/weights/2").json()["code"] == "weight_version_not_found"
    kinds = [event.kind for event in context.jobs.events(job_id)]
    assert kinds.count("weights_applied") == 1
    assert kinds.count("replica_problem") == 1


def test_a_rollback_announces_the_older_version_again(
    context: AppContext, orchestrator: RpcClient, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    mine = owner(context.leases.wait_for_job("mine", 0), "mine")
    publish(context, mine, 1)
    publish(context, mine, 2)

    assert api.post(f"/v1/jobs/{job_id}/weights/rollback", json={"version": 1}).status_code == 202
    assert beat(orchestrator).weights.version == 1
    assert api.post(f"/v1/jobs/{job_id}/weights/rollback", json={"version": 9}).status_code == 404


def test_a_silent_replica_is_dropped_and_the_run_is_told(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(replica_silence_seconds=1)
    job_id = running(context, document)
    context.replicas.beat(wire.HeartbeatRequest(replica_id="r1", pool="inference", run_id=job_id))
    assert [replica.replica_id for replica in context.replicas.live()] == ["r1"]

    wait_until(lambda: context.replicas.live() == [], "the replica is silent for too long")
    context.replicas.drop_silent()

    assert context.redis.hlen(redis_keys.replicas()) == 0
    assert context.jobs.events(job_id)[-1].kind == "replica_lost"
