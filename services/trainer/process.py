"""Rank 0 is the service others see; the other ranks only follow it."""

from __future__ import annotations

import os
import threading

from services.trainer.attempts.attempt import rank_memory_bytes
from services.trainer.controller import TrainerContext
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.train import follow_jobs, lead_jobs
from spo.observability.metrics import serve_metrics
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.service.process import ServiceProcess
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weights.broadcast.broadcaster import Broadcaster


def lead(process: ServiceProcess, ranks: Ranks, settings: Settings) -> int:
    """Serve health, send heartbeats and train until SIGTERM; returns the exit status."""
    context = TrainerContext(
        RpcClient("orchestrator", settings.orchestrator_address, OrchestratorServiceStub),
        RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        process.replica_id,
        process.stop,
        broadcaster=_broadcaster(settings),
    )

    devices = [rank_memory_bytes(ranks.device)] * ranks.world_size

    def report(request: HeartbeatRequest) -> None:
        request.run_id, request.policy_version = context.run_id, context.weight_version
        request.problem = context.problem
        request.load = 1.0 if context.run_id else 0.0
        request.device_memory_bytes.extend(devices)
        request.accelerated = ranks.device.type == "cuda"

    def train(stop: threading.Event) -> None:
        lead_jobs(ranks, settings, context)

    process.report = report
    process.workers = [train]
    status = process.run()
    if context.attempt and not process.failed:
        context.attempt.stopped()
    if context.broadcaster:
        context.broadcaster.close()
    return status


def _broadcaster(settings: Settings) -> Broadcaster | None:
    if settings.weight_transfer == "files":
        return None
    return Broadcaster(
        settings.broadcast_host or settings.host,
        settings.broadcast_port,
        window_seconds=settings.broadcast_window_seconds,
        transfer_seconds=settings.broadcast_seconds,
    )


def follow(ranks: Ranks, settings: Settings) -> int:
    """Carry out rank 0's commands until it stops."""
    # On another machine than rank 0 the first process answers the probes of its pod.
    server = RpcServer(settings.host, settings.port, 2) if os.environ.get("LOCAL_RANK") == "0" else None
    if server:
        serve_metrics(settings.host, settings.metrics_port)
        server.start()
        server.set_serving(True)
    follow_jobs(ranks, settings)
    if server:
        server.stop(1.0)
    return 0
