"""The trainer with real DeepSpeed on a tiny model, against an orchestrator and a replay buffer over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.deepspeed_engine import prepare_deepspeed
from services.trainer.ranks import Ranks, join_ranks, leave_ranks
from services.trainer.settings import Settings
from services.trainer.train import Desk, serve_jobs
from spo.job_spec import JobSpec, parse_job_spec
from spo.rpc import Client
from spo.testing_models import write_random_llama
from spo.testing_trainer import OneJob, Pool, sampled_trajectories, served
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weight_store import WeightStore

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

LIMIT_SECONDS = 60.0


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "pi0"
    write_random_llama(folder, seed=0, width=32)
    return folder


@pytest.fixture(scope="session")
def trajectories(model_path: Path) -> list[Any]:
    return sampled_trajectories(model_path, 24)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    torch.set_num_threads(1)
    joined = join_ranks(timeout_seconds=60)
    prepare_deepspeed(tmp_path_factory.mktemp("state"))
    yield joined
    leave_ranks()


def job_spec(model_path: Path, **trainer: Any) -> JobSpec:
    defaults = {
        "steps": 10,
        "batch_size": 8,
        "micro_batch_size": 4,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "update_interval": 5,
        "checkpoint_interval": 5,
    }
    return parse_job_spec({"model": {"path": str(model_path)}, "trainer": {**defaults, **trainer}})


@dataclass
class Bench:
    """A trainer at work in this process, and the doubles it talks to."""

    job: OneJob
    pool: Pool
    start: Callable[[], threading.Event]

    def train_until_finished(self) -> wire.FinishRunRequest:
        stop = self.start()
        self.job.wait_until(lambda: bool(self.job.finished), LIMIT_SECONDS, "the run finishes")
        stop.set()
        return self.job.finished[-1]


@pytest.fixture
def bench(ranks: Ranks, model_path: Path, trajectories: list[Any], tmp_path: Path) -> Iterator[Bench]:
    job = OneJob(job_spec(model_path), tmp_path)
    pool = Pool(trajectories)  # type: ignore[abstract]
    threads: list[tuple[threading.Thread, threading.Event]] = []
    with ExitStack() as stack:
        orchestrator = Client("orchestrator", stack.enter_context(served(job)), OrchestratorServiceStub)
        replay = Client("replay-buffer", stack.enter_context(served(pool)), ReplayServiceStub)

        def start() -> threading.Event:
            desk = Desk(orchestrator, replay, f"trainer-{len(threads)}", threading.Event())
            settings = Settings(lease_wait_seconds=0.2, batch_wait_seconds=0.2, max_quarantined=3, checkpoint_share=0)
            thread = threading.Thread(target=serve_jobs, args=(ranks, settings, desk), daemon=True)
            thread.start()
            threads.append((thread, desk.stop))
            return desk.stop

        yield Bench(job, pool, start)
        for thread, stop in threads:
            stop.set()
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()
        orchestrator.close()
        replay.close()


def final_weights(bench: Bench) -> dict[str, torch.Tensor]:
    store = WeightStore(bench.job.state_path / "weights")
    files = store.open(bench.job.run_id, store.versions(bench.job.run_id)[-1]).files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_lowers_the_loss_and_publishes_weights_that_load(bench: Bench, model_path: Path, stage: int) -> None:
    bench.job.spec = job_spec(model_path, zero_stage=stage, steps=20)

    finish = bench.train_until_finished()

    assert (finish.error_code, finish.final_step) == ("", 20)
    losses = [bench.job.metrics[step]["loss"] for step in range(1, 21)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert [(each.version, each.step) for each in bench.job.published] == [(1, 5), (2, 10), (3, 15), (4, 20)]
    assert [each.step for each in bench.job.checkpoints] == [5, 10, 15, 20]
    weights, reference = final_weights(bench), load_file(model_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in reference.items()
    }
    assert not torch.equal(weights["lm_head.weight"], reference["lm_head.weight"])
