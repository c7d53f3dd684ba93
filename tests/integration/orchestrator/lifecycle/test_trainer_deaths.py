"""A job whose trainer dies again and again says so each time, and fails by name."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.service import OrchestratorService
from spo.errors import LeaseLost
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import toy_spec
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server

ROOM_BYTES = 48 << 20
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 199,
}


def running(context: AppContext, spec: Any) -> str:
    job_id = context.jobs.submit(spec)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def told(context: AppContext, job_id: str) -> list[dict[str, Any]]:
    return [each.body for each in context.jobs.events(job_id) if each.kind == "trainer_died"]


def tell(context: AppContext, job_id: str, epoch: int, **death: Any) -> wire.RenewLeaseResponse:
    """The trainer under this lease tells what the one before died of."""
    fields = {"stage": "train", "step": 3, "ranks": 2, "memory_bytes": 4 << 30, **death}
    request = wire.RenewLeaseRequest(
        run_id=job_id, trainer_id="t", epoch=epoch, death=wire.TrainerDeath(epoch=epoch - 1, **fields)
    )
    return OrchestratorService(context).RenewLease(request, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("death", "code"),
    [
        ({"cause": "OutOfMemoryError: CUDA out of memory", "out_of_memory": True}, "trainer_out_of_memory"),
        ({"cause": "RuntimeError: shapes"}, "trainer_dies"),
        # Without a word, where the plan says that a rank has far too little.
        ({"cause": "", "memory_bytes": 1 << 20}, "trainer_out_of_memory"),
    ],
)
def test_after_the_most_deaths_without_a_step_the_job_fails_by_name(
    open_context: Callable[..., AppContext], document: dict[str, Any], death: dict[str, Any], code: str
) -> None:
    context = open_context(most_trainer_deaths=2)
    config = Path(document["model"]["path"]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
    job_id = running(context, parse_job_spec(document))
    context.leases.wait_for_job("t", 0)
    context.leases.wait_for_job("t", 0)

    assert tell(context, job_id, 2, **death).directive == wire.DIRECTIVE_CONTINUE
    again = tell(context, job_id, 2, **death)

    assert again.directive == wire.DIRECTIVE_CONTINUE
    (first,) = told(context, job_id)
    assert (first["deaths"], first["most"], first["step"]) == (1, 2, 3)
    assert "at step 3 (training)" in context.monitor.waits(job_id, JobState.RUNNING)[-1]
    assert context.leases.wait_for_job("t", 0).epoch == 3
    # The count is in Redis: another orchestrator goes on with it.
    assert tell(open_context(most_trainer_deaths=2), job_id, 3, **death).directive == wire.DIRECTIVE_CANCEL
    record = context.jobs.record(job_id)
    assert (context.jobs.state(job_id), record.failure_code) == (JobState.FAILED, code)
    assert ("by `spo plan`" in record.failure_message) == (code == "trainer_out_of_memory")
    assert [each["deaths"] for each in told(context, job_id)] == [1, 2]


def test_a_job_that_makes_progress_between_deaths_goes_on(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(most_trainer_deaths=2)
    job_id = running(context, parse_job_spec(document))
    for epoch in range(1, 9):
        assert context.leases.wait_for_job("t", 0).epoch == epoch
        if epoch > 1:
            answer = tell(context, job_id, epoch, step=3 * epoch, steps_done=1, cause="killed")
            assert answer.directive == wire.DIRECTIVE_CONTINUE

    assert {each["deaths"] for each in told(context, job_id)} == {1}


def test_a_stale_trainer_tells_nothing(context: AppContext, document: dict[str, Any]) -> None:
    job_id = running(context, parse_job_spec(document))
    context.leases.wait_for_job("t", 0)
    context.leases.wait_for_job("t", 0)

    with pytest.raises(LeaseLost):
        tell(context, job_id, 1, cause="late")

    assert told(context, job_id) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_trainer_without_memory_is_told_at_the_first_restart_and_ends_the_job_by_name(
    open_context: Callable[..., AppContext], tmp_path: Path
) -> None:
    from spo.testing.trainer import TrajectoryPool, sampled_trajectories, served, write_random_llama

    write_random_llama(tmp_path / "wide", seed=0, width=1024)
    pool = TrajectoryPool(sampled_trajectories(tmp_path / "wide", 8))  # type: ignore[abstract]
    context = open_context(most_trainer_deaths=2, lease_seconds=2)
    spec = toy_spec({"model": {"path": str(tmp_path / "wide")}, "trainer": {"batch_size": 8, "steps": 3}})
    job_id = running(context, spec)
    trainers: list[subprocess.Popen[bytes]] = []

    def leave_little_room(step: int, batch: Any) -> None:
        # The model is loaded; its gradients and moments are 250 MB more.
        process = psutil.Process(trainers[-1].pid)
        limit = process.memory_info().vms + ROOM_BYTES
        process.rlimit(resource.RLIMIT_AS, (limit, limit))

    pool.spoil = leave_little_room
    server = RpcServer("127.0.0.1", 0)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), server.server)
    server.start()
    with served(pool) as replay:
        environment = {
            **os.environ,
            "SPO_ORCHESTRATOR_ADDRESS": server.address,
            "SPO_REPLAY_BUFFER_ADDRESS": replay,
            "SPO_STATE_PATH": str(tmp_path),
            "SPO_TRAINER_LEASE_WAIT_SECONDS": "0.5",
            "SPO_TRAINER_DRAIN_SECONDS": "1",
            "OMP_NUM_THREADS": "1",
        }

        def start() -> subprocess.Popen[bytes]:
            trainers.append(subprocess.Popen([sys.executable, "-m", "services.trainer"], env=environment))
            return trainers[-1]

        try:
            assert start().wait(100) != 0
            assert told(context, job_id) == []
            assert start().wait(100) != 0
            (first,) = told(context, job_id)
            start()
            wait_until(lambda: context.jobs.state(job_id) is JobState.FAILED, "the job fails", 100)
        finally:
            for trainer in trainers:
                trainer.kill()
                trainer.wait(10)
            server.stop(1)

    assert (first["deaths"], first["step"], first["stage"]) == (1, 1, "train")
    assert first["out_of_memory"] == 1, first
    assert first["needed_bytes"] > 250e6
    record = context.jobs.record(job_id)
    assert record.failure_code == "trainer_out_of_memory"
    assert record.failure_message.startswith("2 times without a step in between: the trainer died at step 1 (training)")
    assert "with trainer." in record.failure_message
