"""The collapse guard end to end: a real trainer with DeepSpeed, the real orchestrator over gRPC, a forced alarm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.desk import Desk
from services.orchestrator.jobs import Event
from services.orchestrator.service import OrchestratorService
from services.orchestrator.states import RESUME, JobState
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.train import Desk as TrainerDesk
from services.trainer.train import serve_jobs
from spo.job_spec import parse_job_spec
from spo.metrics import TRAINER_COLLAPSE_ALARMS
from spo.rpc import Client, RpcServer
from spo.testing_trainer import Pool, served
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub, add_OrchestratorServiceServicer_to_server
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH
from spo.weight_store import WeightStore

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

LIMIT_SECONDS = 100.0
STEPS, WINDOW, TURNS_AT = 10, 2, 7


@dataclass
class Platform:
    """A job that may run, the orchestrator that has it, and the pool its batches come from."""

    desk: Desk
    pool: Pool
    model_path: Path
    start_trainer: Callable[[], None]

    def run_job(self, policy: str) -> str:
        trainer = {"steps": STEPS, "batch_size": 8, "update_interval": 2, "checkpoint_interval": 2}
        guard = {"policy": policy, "window": WINDOW, "log_ratio_nats": 100, "grad_norm": 1e6, "reward_fall": 100}
        document = {"model": {"path": str(self.model_path)}, "trainer": trainer, "collapse_guard": guard}
        job_id = self.desk.jobs.submit(parse_job_spec({**document, "tasks": {"evaluation_problems": 0}}))
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            self.desk.jobs.transition(job_id, state, "test")
        self.start_trainer()
        return job_id

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Turn the orchestrator's wheel until something holds."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited {LIMIT_SECONDS:g} s in vain until {what}"
            self.desk.runner.tick()
            time.sleep(0.05)

    def wait_trained(self, job_id: str) -> None:
        self.wait_until(lambda: self.desk.jobs.state(job_id) is JobState.SUCCEEDED, "the job is trained")

    def events(self, job_id: str, kind: str) -> list[Event]:
        return [each for each in self.desk.jobs.events(job_id) if each.kind == kind]


@pytest.fixture
def platform(desk: Desk, ranks: Ranks, tiny_model_path: Path, trajectories: list[Any]) -> Iterator[Platform]:
    pool = Pool(trajectories, spoil=cut_off_from_step_seven)  # type: ignore[abstract]
    server = RpcServer("127.0.0.1", 0)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(desk), server.server)
    server.start()
    stop = threading.Event()
    threads: list[threading.Thread] = []
    with served(pool) as address:
        orchestrator = Client("orchestrator", server.address, OrchestratorServiceStub)
        replay = Client("replay-buffer", address, ReplayServiceStub)

        def start() -> None:
            settings = Settings(lease_wait_seconds=0.2, batch_wait_seconds=0.2, checkpoint_share=0)
            trainer_desk = TrainerDesk(orchestrator, replay, "trainer-1", stop)
            threads.append(threading.Thread(target=serve_jobs, args=(ranks, settings, trainer_desk), daemon=True))
            threads[-1].start()

        yield Platform(desk, pool, tiny_model_path, start)
        stop.set()
        desk.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        orchestrator.close()
        replay.close()
        server.stop(1)


def cut_off_from_step_seven(step: int, batch: Any) -> None:
    for each in batch.batch:
        if step >= TURNS_AT and each.trajectory.source == SOURCE_ONLINE:
            each.trajectory.finish_reason = FINISH_REASON_LENGTH


def alarms_counted() -> float:
    return float(TRAINER_COLLAPSE_ALARMS.labels(alarm="truncation")._value.get())


def test_by_policy_pause_an_alarm_pauses_the_job_at_the_last_good_weights(platform: Platform) -> None:
    desk, counted = platform.desk, alarms_counted()
    job_id = platform.run_job("pause")

    platform.wait_until(lambda: desk.jobs.state(job_id) is JobState.PAUSED, "the job is paused")

    (alarm,) = platform.events(job_id, "alarm")
    assert alarm.body | {"reason": ""} == {"step": 7, "alarm": "truncation", "reason": "", "policy": "pause"}
    pausing = next(each for each in platform.events(job_id, "state") if each.body["to"] == "pausing")
    assert pausing.actor == "collapse guard"
    why = "collapse guard at step 7: truncated responses rose from 0% to 50%; inference is at weight version 2"
    assert pausing.body["reason"] == why
    # Published after steps 2, 4 and 6; the window of the alarm began after step 5.
    assert [each["version"] for each in desk.weights.versions(job_id)] == [1, 2, 3]
    announced = desk.weights.announced(job_id)
    assert announced is not None
    assert (announced.version, announced.step) == (2, 4)
    stored = WeightStore(desk.settings.state_path / "weights").open(job_id, 2)
    assert stored.manifest_digest == announced.manifest_digest
    assert [each.step for each in platform.pool.asked][-1] == 7
    assert [each.seq for each in desk.jobs.events(job_id)] == list(range(1, len(desk.jobs.events(job_id)) + 1))
    assert alarms_counted() == counted + 1

    desk.jobs.act(job_id, RESUME)
    platform.wait_trained(job_id)

    assert len(platform.events(job_id, "alarm")) == 1
    announced = desk.weights.announced(job_id)
    assert announced is not None
    assert (announced.version, announced.step) == (5, STEPS)


def test_by_policy_warn_an_alarm_is_an_event_and_training_goes_on(platform: Platform) -> None:
    job_id = platform.run_job("warn")

    platform.wait_trained(job_id)

    (alarm,) = platform.events(job_id, "alarm")
    assert (alarm.body["step"], alarm.body["alarm"], alarm.body["policy"]) == (7, "truncation", "warn")
    assert [each.body["to"] for each in platform.events(job_id, "state")][-2:] == ["running", "succeeded"]


def test_a_quarantined_batch_is_an_event_with_the_ids_and_the_reason(platform: Platform) -> None:
    def spoil(step: int, batch: Any) -> None:
        if step == 3:
            batch.batch[5].trajectory.reward = float("nan")

    platform.pool.spoil = spoil
    job_id = platform.run_job("warn")

    platform.wait_trained(job_id)

    (quarantine,) = platform.events(job_id, "quarantine")
    assert quarantine.body["step"] == 3
    assert len(quarantine.body["trajectory_ids"]) == 8
    assert "the reward is missing or not finite" in quarantine.body["reason"]


def test_a_report_that_arrives_twice_is_told_of_once_and_pauses_once(desk: Desk, document: dict[str, Any]) -> None:
    job_id = desk.jobs.submit(parse_job_spec({**document, "collapse_guard": {"policy": "pause"}}))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        desk.jobs.transition(job_id, state, "test")
    grant = desk.leases.wait_for_job("first", 0)
    report = wire.StepReport(step=30, alarms={"log_ratio": "far", "grad_norm": "high"}, metrics={"loss": 1.0})
    renewal = wire.RenewLeaseRequest(run_id=job_id, trainer_id="first", epoch=grant.epoch, reports=[report])
    service = OrchestratorService(desk)

    first = service.RenewLease(renewal, None)  # type: ignore[arg-type]
    desk.jobs.act(job_id, RESUME)
    second = service.RenewLease(renewal, None)  # type: ignore[arg-type]

    assert (first.directive, second.directive) == (wire.DIRECTIVE_PAUSE, wire.DIRECTIVE_CONTINUE)
    kinds = [each.kind for each in desk.jobs.events(job_id)]
    assert kinds.count("alarm") == 2
    reasons = [each.body["reason"] for each in desk.jobs.events(job_id) if each.body.get("to") == "pausing"]
    assert reasons == ["collapse guard at step 30: high; far; inference is at weight version 0"]
