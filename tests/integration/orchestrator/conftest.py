"""Fixtures of the orchestrator's tests: a desk on a real server, with doubles for the services it asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import redis

from services.orchestrator.commit import Leadership
from services.orchestrator.container import AppContext
from services.orchestrator.http.app import HttpServer
from services.orchestrator.jobs import JobEvent
from services.orchestrator.service import OrchestratorService
from services.orchestrator.settings import Settings
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.testing.runs import toy_document, toy_spec, write_model_without_weights
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub, add_OrchestratorServiceServicer_to_server
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from tests.conftest import NO_CERTIFICATES

if TYPE_CHECKING:
    from services.trainer.ranks import Ranks
    from spo.testing.trainer import TrajectoryPool


TRAINING_SECONDS = 100.0

Document = dict[str, Any]


@pytest.fixture
def peers() -> Iterator[ServiceDoubles]:
    with ServiceDoubles() as playing:
        yield playing


@pytest.fixture
def open_context(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, tmp_path: Path
) -> Iterator[Callable[..., AppContext]]:
    """Builds contexts on the same Redis, as a restarted orchestrator would be; keyword arguments are settings."""
    contexts: list[AppContext] = []

    def build(**settings: Any) -> AppContext:
        addresses = {
            f"{name}_address": peers.address for name in ("inference", "sandbox_judge", "verifier", "replay_buffer")
        }
        queue = {"state_path": tmp_path / "state", "tenant_paths": str(tmp_path)}
        chosen = {"redis_url": redis_server, "http_port": 0, **queue, **addresses, **settings}
        client = redis.Redis.from_url(redis_server)
        # Of one name, so that an earlier context goes on leading, and for long, since nothing renews it.
        leadership = Leadership(client, "orchestrator of the test", lease_seconds=3600)
        assert leadership.take()
        context = AppContext(Settings(**chosen), client, threading.Event(), leadership)
        contexts.append(context)
        return context

    yield build
    for context in contexts:
        context.stop.set()
        context.close()
        context.redis.close()


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context()


@pytest.fixture
def serve() -> Iterator[Callable[[AppContext], str]]:
    """Really serves a desk over HTTP; returns the URL."""
    running: list[tuple[AppContext, threading.Thread]] = []

    def start(context: AppContext) -> str:
        http = HttpServer(context)
        thread = threading.Thread(target=http.run, args=(context.stop,))
        thread.start()
        running.append((context, thread))
        wait_until(lambda: http.port > 0, "the HTTP server listens")
        return f"http://127.0.0.1:{http.port}"

    yield start
    for context, thread in running:
        context.stop.set()
        thread.join(15)
        assert not thread.is_alive()


@pytest.fixture
def api(context: AppContext, serve: Callable[[AppContext], str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve(context), timeout=30, trust_env=False, verify=NO_CERTIFICATES) as client:
        yield client


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """A spec that can be accepted: a model folder without weights to speak of and a small toy contest."""
    folder = tmp_path / "pi0"
    write_model_without_weights(folder)
    return toy_document(
        {
            "name": "test job",
            "model": {"path": str(folder)},
            "tasks": {"kind": "toy", "train_problems": 6, "evaluation_problems": 3},
            "evaluation": {"interval_steps": 10, "samples": 4, "ks": [1, 2]},
            "trainer": {"steps": 20, "update_interval": 10, "checkpoint_interval": 10},
        }
    )


@dataclass
class Training:
    """A real trainer with DeepSpeed and the real orchestrator over gRPC; batches come from a pool of trajectories."""

    context: AppContext
    pool: TrajectoryPool
    model_path: Path
    start_trainer: Callable[[], None]

    def run_job(self, trainer: dict[str, Any], **sections: Any) -> str:
        """A job in the state running, and a trainer that takes it."""
        job_id = self.context.jobs.submit(
            toy_spec(
                {
                    "model": {"path": str(self.model_path)},
                    "tasks": {"train_problems": 6, "evaluation_problems": 0},
                    "trainer": {"batch_size": 8, **trainer},
                    **sections,
                }
            )
        )
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            self.context.jobs.transition(job_id, state, "test")
        self.start_trainer()
        return job_id

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Turn the orchestrator's wheel until something holds."""
        deadline = time.monotonic() + TRAINING_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited {TRAINING_SECONDS:g} s in vain until {what}"
            self.context.runner.tick()
            time.sleep(0.05)

    def wait_trained(self, job_id: str) -> None:
        """Until all steps are done."""
        self.wait_until(lambda: self.context.jobs.state(job_id) is JobState.SUCCEEDED, "the job is trained")

    def events(self, job_id: str, kind: str) -> list[JobEvent]:
        """The job's events of a kind."""
        return [each for each in self.context.jobs.events(job_id) if each.kind == kind]


@pytest.fixture
def training(context: AppContext, ranks: Ranks, tiny_model_path: Path, trajectories: list[Any]) -> Iterator[Training]:
    # Only here: the other tests of this folder do without torch.
    from services.trainer.controller import TrainerContext
    from services.trainer.loop import lead_jobs
    from services.trainer.settings import Settings as TrainerSettings
    from spo.testing.trainer import TrajectoryPool, served

    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    server = RpcServer("127.0.0.1", 0)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), server.server)
    server.start()
    stop = threading.Event()
    threads: list[threading.Thread] = []
    with served(pool) as address:
        orchestrator = RpcClient("orchestrator", server.address, OrchestratorServiceStub)
        replay = RpcClient("replay-buffer", address, ReplayServiceStub)

        def start() -> None:
            settings = TrainerSettings(lease_wait_seconds=0.2, batch_wait_seconds=0.2, checkpoint_share=0)
            trainer_context = TrainerContext(orchestrator, replay, f"trainer-{len(threads)}", stop)
            threads.append(threading.Thread(target=lead_jobs, args=(ranks, settings, trainer_context), daemon=True))
            threads[-1].start()

        yield Training(context, pool, tiny_model_path, start)
        stop.set()
        context.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        orchestrator.close()
        replay.close()
        server.stop(1)
