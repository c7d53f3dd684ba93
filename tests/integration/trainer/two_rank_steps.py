"""Run by torchrun on two ranks: steps from scratch whose state is saved, and a step from what one rank had saved.

two_rank_steps.py MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.deepspeed_engine import DeepSpeedEngine, leave_deepspeed, prepare_deepspeed
from services.trainer.ranks import Ranks, join_ranks
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import TrainerSpec

STAGES = (0, 1, 2, 3)
TOKENS_BL = torch.arange(4, 28).reshape(2, 12)


def engine_for(model: Path, stage: int) -> DeepSpeedEngine:
    return DeepSpeedEngine(load_policy(model, "float32"), TrainerSpec(zero_stage=stage), passes=1)


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
