"""Forks under a real trainer: they start where their parent was, and go on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from services.orchestrator.forks import ForkOptions
from services.orchestrator.versions import published_versions
from spo.spec.section import JobState
from spo.weights.store import WeightStore

if TYPE_CHECKING:
    from tests.integration.orchestrator.conftest import Training

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")
RATE = 3e-3


@pytest.fixture
def parent(training: Training) -> str:
    """A job trained for ten steps, with weights and checkpoints of steps 5 and 10."""
    steps = {"steps": 10, "update_interval": 5, "checkpoint_interval": 5, "learning_rate": RATE, "micro_batch_size": 4}
    job_id = training.run_job(steps)
    training.wait_trained(job_id)
    return job_id


def fork(training: Training, parent: str, version: int | None, checkpoint_step: int | None, **trainer: Any) -> str:
    requested = ForkOptions(version, checkpoint_step, as_reference=False, overrides={"trainer": trainer})
    job_id = training.context.forks.fork(parent, requested, lambda spec: None, None, "test", "")
    training.context.deletion.delete(parent)
    training.context.deletion.sweep()
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        training.context.jobs.transition(job_id, state, "test")
    return job_id


def weights(training: Training, job_id: str, version: int) -> dict[str, torch.Tensor]:
    store = WeightStore(Path(training.context.settings.state_path) / "weights")
    return {name: each for file in store.open(job_id, version).files for name, each in load_file(file).items()}


def test_a_fork_trains_on_from_the_weights_of_a_parent_that_is_gone(training: Training, parent: str) -> None:
    start = weights(training, parent, 1)

    job_id = fork(training, parent, 1, None, steps=2, update_interval=2, checkpoint_interval=2, learning_rate=1e-9)
    training.wait_trained(job_id)

    after = weights(training, job_id, 2)
    reference = load_file(training.model_path / "model.safetensors")
    assert all(torch.allclose(start[name], after[name], atol=1e-6) for name in start)
    assert not torch.allclose(after["lm_head.weight"], reference["lm_head.weight"], atol=1e-4)
    assert [each["step"] for each in published_versions(training.context.jobs, job_id)] == [0, 2]


def test_a_fork_of_a_checkpoint_ends_with_the_weights_its_parent_had(training: Training, parent: str) -> None:
    straight = weights(training, parent, 2)

    job_id = fork(training, parent, None, 5)
    training.wait_trained(job_id)

    assert [each["step"] for each in published_versions(training.context.jobs, job_id)] == [5, 10]
    again = weights(training, job_id, 2)
    assert all(torch.equal(straight[name], again[name]) for name in straight)
