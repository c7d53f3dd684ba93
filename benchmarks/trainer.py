"""What DeepSpeed, the trainer's bookkeeping and a reference model in the trainer cost per step, in CPU time and bytes.

The plain loop is what one would write by hand in torch for the same model, batch and loss, and nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame import CpuClock, Row, compare, run
from services.trainer.batches import Row as Sampled
from services.trainer.batches import token_batch
from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks, join_ranks
from services.trainer.shares import Minibatch, Piece
from spo.algorithm.losses import spo_loss
from spo.algorithm.types import LossTerm
from spo.job_spec import JobSpec, RewardSpec, parse_job_spec
from spo.policy_model import load_policy, token_logprobs
from spo.testing_models import write_random_llama
from spo.testing_trainer import sampled_trajectories

WIDTH, LAYERS = 192, 4
BATCH = 32
LONGEST = 48
STEPS = 3


def measure() -> list[Row]:
    """All claims, on one small model in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        model_path = Path(folder) / "pi0"
        write_random_llama(model_path, seed=0, width=WIDTH, layers=LAYERS)
        rows = [
            Sampled(each.trajectory, each.qhat_0, index)
            for index, each in enumerate(sampled_trajectories(model_path, BATCH, longest=LONGEST))
        ]
        ranks = join_ranks(timeout_seconds=60)
        prepare_deepspeed(Path(folder))
        found = [step_cost(ranks, model_path, rows), *reference_costs(ranks, model_path, rows)]
        leave_deepspeed()
    return found


def step_cost(ranks: Ranks, model_path: Path, rows: Sequence[Sampled]) -> Row:
    """The trainer's step at ZeRO-0 against the plain loop."""
    learner, plain = Learner(ranks, _spec(model_path)), PlainLoop(model_path)
    row = compare(
        "step, ZeRO-0",
        "CPU s per step",
        "plain torch loop",
        lambda: _cpu_per_step(lambda: learner.learn(_whole(rows), 1e-4)),
        lambda: _cpu_per_step(lambda: plain.step(rows)),
        goal=1 / 1.10,
        lower_is_better=True,
    )
    learner.close()
    return row


def reference_costs(ranks: Ranks, model_path: Path, rows: Sequence[Sampled]) -> list[Row]:
    """Cached reference log-probs against a reference model in the trainer: CPU time and bytes of tensors."""
    before = _tensor_bytes()
    cached = Learner(ranks, _spec(model_path))
    cached_bytes = _tensor_bytes() - before
    in_trainer = Learner(ranks, _spec(model_path, reference="in_trainer"))
    in_trainer_bytes = _tensor_bytes() - before - cached_bytes
    cpu = compare(
        "step, cached reference",
        "CPU s per step",
        "reference in the trainer",
        lambda: _cpu_per_step(lambda: cached.learn(_whole(rows), 1e-4)),
        lambda: _cpu_per_step(lambda: in_trainer.learn(_whole(rows), 1e-4)),
        goal=1.2,
        lower_is_better=True,
    )
    size = compare(
        "models held before the first step, cached reference",
        "bytes",
        "reference in the trainer",
        lambda: float(cached_bytes),
        lambda: float(in_trainer_bytes),
        goal=1.9,
        rounds=1,
        lower_is_better=True,
    )
    cached.close()
    in_trainer.close()
    return [cpu, size]


class PlainLoop:
    """The same step in torch alone."""

    def __init__(self, model_path: Path) -> None:
        self._model: Any = load_policy(model_path, "float32")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.0)
        self._beta = _spec(model_path).algorithm.beta

    def step(self, rows: Sequence[Sampled]) -> None:
        batch = token_batch(rows, self._beta, RewardSpec())
        logprobs_BL = token_logprobs(self._model, batch.input_ids_BL, batch.attention_mask_BL)
        loss, _ = spo_loss(logprobs_BL, batch, [LossTerm("terminal_squared")], self._beta)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _spec(model_path: Path, **trainer: Any) -> JobSpec:
    defaults = {"batch_size": BATCH, "micro_batch_size": BATCH, "zero_stage": 0}
    return parse_job_spec({"model": {"path": str(model_path)}, "trainer": {**defaults, **trainer}})


def _whole(rows: Sequence[Sampled]) -> list[Minibatch]:
    """The batch as one piece."""
    return [Minibatch([Piece(rows)], len(rows))]


def _cpu_per_step(step: Any) -> float:
    clock = CpuClock()
    before = clock.seconds()
    for _ in range(STEPS):
        step()
    return (clock.seconds() - before) / STEPS


def _tensor_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run("trainer", measure))
