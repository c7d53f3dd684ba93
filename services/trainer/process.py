"""Rank 0 is the service others see; the other ranks only follow it."""

from __future__ import annotations

import os
import threading

from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.train import Desk, serve_jobs
from spo.metrics import serve_metrics
from spo.rpc import Client, RpcServer
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
    # On another machine than rank 0 the first process answers the probes of its pod.
    server = RpcServer(settings.host, settings.port, 2) if os.environ.get("LOCAL_RANK") == "0" else None
    if server:
        serve_metrics(settings.host, settings.metrics_port)
        server.start()
        server.set_serving(True)
    serve_jobs(ranks, settings, None)
    if server:
        server.stop(1.0)
    return 0
