"""Rank 0 is the service others see; the other ranks only follow it, and tell it when they are to stop.

A pod of several may be told to go alone, when its node is drained. Its ranks tell rank 0, by torchrun's own store, and
all write a last checkpoint together. Ranks that nobody told to go end with status 1, for which their torchrun starts
them anew at once: with 0 it would wait five minutes for the pod that left.
"""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.trainer.attempts.attempt import rank_memory_bytes
from services.trainer.controller import TrainerContext
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.train import follow_jobs, lead_jobs
from spo.observability.logs import get_logger
from spo.observability.metrics import serve_metrics
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.service.process import ServiceProcess
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weights.broadcast.broadcaster import Broadcaster

log = get_logger("trainer")

LOOK_SECONDS = 1.0


class GroupStop:
    """What the ranks of one trainer know of a SIGTERM that any of them got."""

    def __init__(self, ranks: Ranks) -> None:
        self.told = threading.Event()
        self._store: TCPStore | None = None
        launch = os.environ.get("TORCHELASTIC_RUN_ID")
        if launch is not None and ranks.world_size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
        # Each start of the ranks has its own: what stopped the last one does not stop the next.
        self._key = f"spo/stop/{launch}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def tell(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM of every rank but 0: rank 0 ends the run, and with it this rank's work."""
        self.told.set()
        if self._store:
            self._store.set(self._key, "1")

    def look(self, stop: threading.Event) -> None:
        """Rank 0's worker: stop once any rank was told to."""
        while self._store and not stop.wait(LOOK_SECONDS):
            try:
                told = self._store.check([self._key])
            except RuntimeError as error:
                # The store goes with the torchrun that keeps it, which ends this process too.
                log.warning("the other ranks can no longer be heard", reason=str(error)[:200])
                return
            if told:
                log.info("another pod of this trainer is told to stop: all stop, after a checkpoint")
                stop.set()


def lead(process: ServiceProcess, ranks: Ranks, settings: Settings) -> int:
    """Serve health, send heartbeats and train until SIGTERM; returns the exit status."""
    context = TrainerContext(
        RpcClient("orchestrator", settings.orchestrator_address, OrchestratorServiceStub),
        RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        process.replica_id,
        process.stop,
        broadcaster=_broadcaster(settings),
        belongs_to=process.belongs_to,
    )

    devices = [rank_memory_bytes(ranks.device)] * ranks.world_size

    def report(request: HeartbeatRequest) -> None:
        request.run_id, request.policy_version = context.run_id, context.weight_version
        request.problem = context.problem or (context.attempt.long_stage if context.attempt else "")
        request.load = 1.0 if context.run_id else 0.0
        request.device_memory_bytes.extend(devices)
        request.accelerated = ranks.device.type == "cuda"

    def train(stop: threading.Event) -> None:
        lead_jobs(ranks, settings, context)

    group = GroupStop(ranks)
    process.report = report
    process.workers = [train, group.look]
    process.hold_state_when_known()
    status = process.run()
    if context.attempt and not process.failed:
        context.attempt.stopped()
    if context.broadcaster:
        context.broadcaster.close()
    return status or int(process.stopped_by is None)


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
    group = GroupStop(ranks)
    signal.signal(signal.SIGTERM, group.tell)
    follow_jobs(ranks, settings)
    if server:
        server.stop(1.0)
    return 0 if group.told.is_set() else 1
