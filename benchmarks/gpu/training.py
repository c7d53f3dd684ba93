"""The trainer's step against a plain loop over Hugging Face's model: tokens per second and share of the peak."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.result import report
from benchmarks.gpu.shapes import SHAPES, write_shape
from services.trainer.batches import MicroBatch, Minibatch, TrainingSample
from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks, join_ranks
from spo.spec.job_spec import parse_job_spec
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory

STEPS = 3
# Dense bfloat16, from the vendors' data sheets; a device that is not here has its FLOP/s but no share.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "A10": 125e12}


def measure(dry_run: bool) -> dict[str, object]:
    """For each shape: tokens per second, FLOP/s (6 per parameter and token) and share of the peak, of both."""
    ranks = join_ranks(timeout_seconds=300)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare_deepspeed(Path(folder))
        for shape in ("tiny",) if dry_run else ("0.5B", "1.5B"):
            model = Path(folder) / shape
            write_shape(model, shape)
            batch, length = (4, 32) if dry_run else (16, 1024)
            found[shape] = {"batch": batch, "length": length} | _both(ranks, model, batch, length)
        leave_deepspeed()
    return found


def _both(ranks: Ranks, model: Path, batch: int, length: int) -> dict[str, object]:
    rows = random_rows(batch, length)
    spec = parse_job_spec(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "algorithm": {"losses": [{"objective": "terminal_squared"}]},
            "trainer": {"batch_size": batch, "micro_batch_size": batch // 4, "activation_checkpointing": False},
        }
    )
    learner = Learner(ranks, spec)
    parameters = sum(learner.engine.parameter_bytes().values()) // 2
    pieces = [MicroBatch(rows[start : start + batch // 4]) for start in range(0, batch, batch // 4)]
    ours = _speed(lambda: learner.learn([Minibatch(pieces, batch)], 1e-5), batch * length)
    learner.close()
    gc.collect()
    plain = PlainHuggingFace(model, rows, ranks.device)
    theirs = _speed(plain.step, batch * length)
    return {
        "trainer": _figures(ours, parameters),
        "plain_loop": _figures(theirs, parameters),
        "ratio": round(ours / theirs, 3),
    }


class PlainHuggingFace:
    """The model's own loss, AdamW on bfloat16 weights, and nothing else."""

    def __init__(self, path: Path, rows: list[TrainingSample], device: torch.device) -> None:
        model: Any = AutoModelForCausalLM
        self._model = model.from_pretrained(path, dtype=torch.bfloat16).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        tokens = [[*row.trajectory.prompt_token_ids, *row.trajectory.response_token_ids] for row in rows]
        self._pieces = torch.tensor(tokens, device=device).chunk(4)

    def step(self) -> None:
        for piece in self._pieces:
            (self._model(input_ids=piece, labels=piece).loss / 4).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def random_rows(batch: int, length: int) -> list[TrainingSample]:
    """Random trajectories of equal length, a quarter of each a prompt; their reference log-probs mean nothing."""
    draw = random.Random(0)
    highest = SHAPES["tiny"][-1]
    rows = []
    for index in range(batch):
        prompt = [draw.randrange(4, highest) for _ in range(length // 4)]
        response = [draw.randrange(4, highest) for _ in range(length - length // 4)]
        trajectory = Trajectory(
            trajectory_id=str(index),
            prompt_id=str(index),
            source=SOURCE_ONLINE,
            prompt_token_ids=prompt,
            response_token_ids=response,
            reward=-float(index % 2),
            reference_logprobs=[-1.0] * len(response),
            sampling_logprobs=[-1.0] * len(response),
        )
        rows.append(TrainingSample(trajectory, -0.5, index))
    return rows


def _speed(step: Callable[[], object], tokens: int) -> float:
    """Tokens per second, after one step that allocates."""
    step()
    _wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    _wait()
    return STEPS * tokens / (time.perf_counter() - began)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figures(tokens_per_second: float, parameters: int) -> dict[str, object]:
    flops = 6 * parameters * tokens_per_second
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((value for name, value in PEAK_FLOPS.items() if name in device), None)
    return {
        "tokens_per_second": round(tokens_per_second, 1),
        "flops": f"{flops:.3g}",
        "mfu": round(flops / peak, 4) if peak else None,
    }


if __name__ == "__main__":
    sys.exit(report(measure))
