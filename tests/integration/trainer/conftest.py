"""Fixtures of the trainer's tests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.trainer.controller import TrainerContext
from services.trainer.loop import lead_jobs
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.rpc.client import RpcClient
from spo.testing.trainer import OneJob, TrajectoryPool, served
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from tests.integration.trainer.trainer_bench import LIMIT_SECONDS, Bench, job_spec


@pytest.fixture(autouse=True, scope="module")
def earlier_tests_set_aside() -> None:
    """An engine that closes collects garbage: not through all that a worker's earlier tests imported and left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def bench(ranks: Ranks, tiny_model_path: Path, trajectories: list[Any], tmp_path: Path) -> Iterator[Bench]:
    job = OneJob(job_spec(tiny_model_path), tmp_path)
    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    threads: list[tuple[threading.Thread, threading.Event]] = []
    contexts: list[TrainerContext] = []
    with ExitStack() as stack:
        orchestrator = RpcClient("orchestrator", stack.enter_context(served(job)), OrchestratorServiceStub)
        replay = RpcClient("replay-buffer", stack.enter_context(served(pool)), ReplayServiceStub)

        def start(stop: threading.Event | None = None, **chosen: Any) -> threading.Event:
            context = TrainerContext(orchestrator, replay, f"trainer-{len(threads)}", stop or threading.Event())
            short: dict[str, Any] = {"lease_wait_seconds": 0.2, "batch_wait_seconds": 0.2, "checkpoint_share": 0}
            settings = Settings(**short, max_quarantined=3, **chosen)
            thread = threading.Thread(target=lead_jobs, args=(ranks, settings, context), daemon=True)
            thread.start()
            contexts.append(context)
            threads.append((thread, context.stop))
            return context.stop

        yield Bench(job, pool, start, contexts, threads)
        for thread, stop in threads:
            stop.set()
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()
        orchestrator.close()
        replay.close()
