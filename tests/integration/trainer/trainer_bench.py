"""A trainer at work in the test's process, and the doubles it talks to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from services.trainer.controller import TrainerContext
from spo.spec.job_spec import JobSpec
from spo.testing.runs import toy_spec
from spo.testing.trainer import OneJob, TrajectoryPool
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.store import WeightStore
from tests.support.budget import sampled

# ZeRO stages of tables that ask the same of each: 3, which alone parts the weights, and one of the others by the day,
# two where what trains has changed.
STAGES = (*sampled((0, 1, 2), 1, lambda _: ("services/trainer", "spo/algorithm", "constraints")), 3)
LIMIT_SECONDS = 60.0


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
    return toy_spec({"model": {"path": str(model_path)}, "trainer": {**defaults, **trainer}})


@dataclass
class Bench:
    """A trainer at work in this process, and the doubles it talks to."""

    job: OneJob
    pool: TrajectoryPool
    start: Callable[..., threading.Event]
    contexts: list[TrainerContext]
    threads: list[tuple[threading.Thread, threading.Event]]

    def train_until_finished(self, **settings: Any) -> wire.FinishRunRequest:
        stop = self.start(**settings)
        self.job.wait_until(lambda: bool(self.job.finished), LIMIT_SECONDS, "the run finishes")
        stop.set()
        # It may be asking for work: what comes next is not for this trainer.
        self.threads[-1][0].join(LIMIT_SECONDS)
        return self.job.finished[-1]

    def stop_at_step(self, last: int, **settings: Any) -> None:
        """Train, stop the process's work while it has step `last` in hand, and wait for its last checkpoint."""
        stop = threading.Event()

        def set_stop(step: int, batch: Any) -> None:
            if step == last:
                stop.set()

        self.pool.spoil = set_stop
        self.start(stop, **settings)
        self.job.wait_until(
            lambda: any(each.step == last for each in self.job.checkpoints), LIMIT_SECONDS, "the last checkpoint"
        )
        self.pool.spoil = lambda step, batch: None


def final_weights(bench: Bench) -> dict[str, torch.Tensor]:
    store = WeightStore(bench.job.state_path / "weights")
    files = store.open(bench.job.run_id, store.versions(bench.job.run_id)[-1]).files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
