"""Run by torchrun on two ranks: steps from scratch whose state is saved, and a step from what one rank had saved.

two_rank_steps.py MODEL FOLDER
"""

from __future__ import annotations

import errno
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.trainer import deepspeed_engine, weights
from services.trainer.checkpoints import write_tensors
from services.trainer.deepspeed_engine import DeepSpeedEngine, leave_deepspeed, prepare_deepspeed
from services.trainer.ranks import Ranks, join_ranks
from services.trainer.weights import NewVersion
from spo.errors import ResourceExhausted
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import TrainerSpec
from spo.weights.store import WeightStore

STAGES = (0, 1, 2, 3)
# How often a version is stored whole, by the store's name.
INTERVALS = {"whole": 1, "deltas": 10}
TOKENS_BL = torch.arange(4, 28).reshape(2, 12)


def engine_for(model: Path, stage: int) -> DeepSpeedEngine:
    return DeepSpeedEngine(load_policy(model, "float32"), TrainerSpec(zero_stage=stage, weight_decay=0.1), passes=1)


def step(engine: DeepSpeedEngine) -> None:
    """The same on any number of ranks: each gives the whole batch, and ZeRO takes the mean."""
    loss = -token_logprobs(engine.model, TOKENS_BL, torch.ones_like(TOKENS_BL)).mean()
    engine.backward(loss, last=True)
    assert engine.step(learning_rate=1e-2) is not None


def save_state(engine: DeepSpeedEngine, folder: Path, rank: int) -> Path:
    path = folder / f"rank-{rank:05d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in engine.state_tensors().items()}, path)
    return path


def save_parameters(engine: DeepSpeedEngine, path: Path, ranks: Ranks) -> None:
    parameters = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    if ranks.leads:
        save_file(parameters, path)


def publish(
    engine: DeepSpeedEngine, store: WeightStore, version: int, ranks: Ranks, spoilt_rank: int = -1
) -> list[str]:
    """Store the weights in files of few bytes; the names of those that this rank wrote."""
    written: list[str] = []

    def save(path: Path, tensors: dict[str, Tensor]) -> None:
        written.append(path.name)
        write_tensors(path, tensors)
        if ranks.rank == spoilt_rank:
            raise OSError(errno.ENOSPC, "No space left on device")

    new = NewVersion("job", version, parent=version - 1, step=version, epoch=1)
    with mock.patch.object(deepspeed_engine, "SHARD_BYTES", 20_000), mock.patch.object(weights, "write_tensors", save):
        stored = weights.store_weights(ranks, engine, store, new)
    assert (stored.version is not None) == ranks.leads
    return written


def publish_twice(engine: DeepSpeedEngine, folder: Path, stage: int, ranks: Ranks) -> None:
    """As version stage + 1 of two stores; who wrote which files is noted."""
    written = []
    for name, interval in INTERVALS.items():
        store = WeightStore(folder / name, cache_path=str(folder / "cache"), anchor_interval=interval)
        written += publish(engine, store, stage + 1, ranks)
    (folder / f"wrote-{stage}-{ranks.rank}.json").write_text(json.dumps(written))


def publish_in_vain(engine: DeepSpeedEngine, folder: Path, ranks: Ranks) -> None:
    """Rank 1 has no room: rank 0 says so, and the version is not there."""
    refused = pytest.raises(ResourceExhausted, match="no space is left") if ranks.leads else nullcontext()
    # The other rank comes back without a version, as ever.
    with refused:
        assert publish(engine, WeightStore(folder / "whole"), 9, ranks, spoilt_rank=1)


def main(model: Path, folder: Path) -> None:
    ranks = join_ranks(timeout_seconds=60)
    prepare_deepspeed(folder)
    for stage in STAGES:
        engine = engine_for(model, stage)
        step(engine)
        step(engine)
        save_state(engine, folder / f"two-{stage}", ranks.rank)
        step(engine)
        save_parameters(engine, folder / f"two-{stage}-next.safetensors", ranks)
        if stage == 3:
            publish_in_vain(engine, folder, ranks)
        publish_twice(engine, folder, stage, ranks)
        engine.close()
        engine = engine_for(model, stage)
        engine.load_state_tensors(engine.reshard([folder / f"one-{stage}" / "rank-00000.safetensors"], "", ranks))
        step(engine)
        save_parameters(engine, folder / f"one-{stage}-by-two.safetensors", ranks)
        engine.close()
    leave_deepspeed()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
