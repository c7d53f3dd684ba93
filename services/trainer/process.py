"""Rank 0 is the service others see; the other ranks only follow it."""

from __future__ import annotations

import threading

from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.train import Desk, serve_jobs
from spo.rpc import Client
from spo.service import ServiceProcess
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub


def lead(ranks: Ranks, settings: Settings) -> int:
    """Serve health, send heartbeats and train until SIGTERM; returns the exit status."""
    process = ServiceProcess("trainer", settings)
    desk = Desk(
        Client("orchestrator", settings.orchestrator_address, OrchestratorServiceStub),
        Client("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        process.replica_id,
        process.stop,
    )

    def report(request: HeartbeatRequest) -> None:
        request.run_id, request.policy_version = desk.run_id, desk.weight_version
        request.load = 1.0 if desk.run_id else 0.0

    def train(stop: threading.Event) -> None:
        serve_jobs(ranks, settings, desk)

    process.report = report
    process.workers = [train]
    return process.run()


def follow(ranks: Ranks, settings: Settings) -> int:
    """Carry out rank 0's orders until it stops."""
    serve_jobs(ranks, settings, None)
    return 0
