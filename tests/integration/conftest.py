"""Fixtures of the integration tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from services.trainer.ranks import Ranks


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama of about 20,000 parameters."""
    from spo.testing_models import write_random_llama

    folder = tmp_path_factory.mktemp("model") / "pi0"
    write_random_llama(folder, seed=0, width=32)
    return folder


@pytest.fixture(scope="module")
def trajectories(tiny_model_path: Path) -> list[Any]:
    """SampledTrajectory messages for the tiny model, with its own reference log-probs."""
    from spo.testing_trainer import sampled_trajectories

    return sampled_trajectories(tiny_model_path, 24)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """This process as the only rank of a trainer."""
    import torch

    from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
    from services.trainer.ranks import join_ranks

    if torch.distributed.is_initialized():
        # Left over from another module's in-process inference engine.
        torch.distributed.destroy_process_group()
    torch.set_num_threads(1)
    joined = join_ranks(timeout_seconds=60)
    prepare_deepspeed(tmp_path_factory.mktemp("state"))
    yield joined
    leave_deepspeed()
