"""What DeepSpeed, the trainer's bookkeeping, a reference in the trainer and PPO's value model cost: CPU time and bytes.

Also what a batch of long responses costs rank 0 from its message to the tensors, while the devices wait.

The plain loop is what one would write by hand in torch for the same model, batch and loss, and nothing else. Peak
memory is the most that a process of its own took while it trained, over what it had before it loaded the model:
weights, gradients, optimiser state and activations. On a CPU that is resident memory (Linux), on a GPU what torch
allocates there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame import CpuClock, Measure, Row, compare, run, within
from benchmarks.gpu.training import random_rows
from services.trainer.batches import (
    ForwardLimits,
    MicroBatch,
    Minibatch,
    TrainingSample,
    batch_metrics,
    cut_into_minibatches,
    faults,
    token_batch,
)
from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks, join_ranks
from spo.algorithm.objectives import spo_loss
from spo.algorithm.registry import LossTerm
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import JobSpec, RewardSpec
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories, write_random_llama
from spo.v1.replay_service_pb2 import SampleBatchResponse, SampledTrajectory

WIDTH, LAYERS = 192, 4
BATCH = 32
LONGEST = 48
STEPS = 3
LOSS_STEPS = 10
# Large enough that what training keeps outweighs what libraries allocate by the way, as it does in earnest.
MEMORY_WIDTH, MEMORY_LAYERS = 1024, 2
MEMORY_BATCH, MEMORY_MICRO_BATCH = 8, 2
MEMORY_SECONDS = 600.0
LONG_ROWS, LONG_TOKENS, LONG_RANKS = 64, 8192, 8
# 128 trajectories of 32,768 tokens then take half a second of a step.
LONG_LIMIT = 120.0
HALF_ONLINE = {"algorithm": {"losses": [{"objective": "terminal_squared"}]}}
PPO = {
    "algorithm": {"losses": [{"objective": "ppo"}], "critic": {}},
    "rollout": {"temperature": 1.0, "top_p": 1.0},
    "replay": {"mix": [{"source": "online", "share": 1.0}]},
}


def measure() -> list[Row]:
    """All claims, on one small model in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        model_path = Path(folder) / "pi0"
        write_random_llama(model_path, seed=0, width=WIDTH, layers=LAYERS)
        rows = _sampled(model_path, BATCH)
        ranks = join_ranks(timeout_seconds=60)
        prepare_deepspeed(Path(folder))
        found = [step_cost(ranks, model_path, rows), *reference_costs(ranks, model_path, rows)]
        found.append(same_losses(ranks, model_path, rows))
        leave_deepspeed()
        found += [reference_memory(Path(folder)), peak_memory(Path(folder))]
    return [*found, long_batch()]


def long_batch() -> Row:
    """From the message to the tensors of rank 0's own rows, with the checks and metrics of all rows."""
    made = random_rows(LONG_ROWS, LONG_TOKENS)
    message = SampleBatchResponse(
        batch=[SampledTrajectory(trajectory=row.trajectory, qhat_0=row.qhat_0) for row in made]
    ).SerializeToString()

    def per_token() -> float:
        clock = CpuClock()
        before = clock.seconds()
        batch = SampleBatchResponse.FromString(message).batch
        rows = [TrainingSample(each.trajectory, each.qhat_0, index) for index, each in enumerate(batch)]
        assert not faults(rows, cached_reference=True, behaviour=True)
        own = cut_into_minibatches(rows, 1, LONG_RANKS, ForwardLimits(2 * LONG_TOKENS), whole_groups=False)[0]
        for minibatch in own:
            for micro_batch in minibatch.micro_batches:
                token_batch(micro_batch.rows, 0.2, RewardSpec())
        batch_metrics(rows, 1)
        return 1e9 * (clock.seconds() - before) / (LONG_ROWS * LONG_TOKENS)

    name = f"batch of {LONG_ROWS} x {LONG_TOKENS:,} on {LONG_RANKS} ranks, before the first forward"
    return within(name, "CPU ns per token", per_token, limit=LONG_LIMIT)


def step_cost(ranks: Ranks, model_path: Path, rows: Sequence[TrainingSample]) -> Row:
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


def reference_costs(ranks: Ranks, model_path: Path, rows: Sequence[TrainingSample]) -> list[Row]:
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


def same_losses(ranks: Ranks, model_path: Path, rows: Sequence[TrainingSample]) -> Row:
    """The largest difference of a loss over a few steps, reference cached or in the trainer, both in float32."""
    curves = []
    for reference in ("cached", "in_trainer"):
        learner = Learner(ranks, _spec(model_path, reference=reference))
        curves.append([learner.learn(_whole(rows), 1e-4).metrics["loss"] for _ in range(LOSS_STEPS)])
        learner.close()
    largest = max(abs(cached - own) for cached, own in zip(*curves, strict=True))
    return within(
        "largest difference of a loss, cached or in the trainer", "loss", lambda: largest, limit=1e-6, rounds=1
    )


def reference_memory(folder: Path) -> Row:
    """Cached reference log-probs against a reference model in the trainer: peak memory of the step."""
    model_path, rows = _larger(folder)
    in_trainer = {**HALF_ONLINE, "trainer": {"reference": "in_trainer"}}
    return _compared_memory(
        "peak memory of training, cached reference",
        "reference in the trainer",
        lambda: _alone(HALF_ONLINE, model_path, rows),
        lambda: _alone(in_trainer, model_path, rows),
        goal=1.1,
    )


def peak_memory(folder: Path) -> Row:
    """Half-online SPO, which holds one model, against PPO, which holds two, on the same batch."""
    model_path, rows = _larger(folder)
    return _compared_memory(
        "peak memory of training, SPO half-online",
        "PPO, same model and batch",
        lambda: _alone(HALF_ONLINE, model_path, rows),
        lambda: _alone(PPO, model_path, rows),
        goal=1 / 0.6,
    )


def _larger(folder: Path) -> tuple[Path, list[TrainingSample]]:
    model_path = folder / "larger"
    if not model_path.exists():
        write_random_llama(model_path, seed=0, width=MEMORY_WIDTH, layers=MEMORY_LAYERS)
    return model_path, _sampled(model_path, MEMORY_BATCH)


def _compared_memory(name: str, yardstick: str, product: Measure, peer: Measure, goal: float) -> Row:
    return compare(
        name,
        "bytes",
        yardstick,
        product,
        peer,
        goal=goal,
        # It hardly varies, and each is measured in a fresh process.
        rounds=1,
        warm_up=False,
        lower_is_better=True,
    )


def _alone(method: dict[str, Any], model_path: Path, rows: Sequence[TrainingSample]) -> float:
    """`training_bytes` of a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(training_bytes, method, model_path, rows).result(MEMORY_SECONDS)


def training_bytes(method: dict[str, Any], model_path: Path, rows: Sequence[TrainingSample]) -> float:
    """The most memory that two steps of a method take in this process, over what it has before it loads the model."""
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_seconds=60)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        prepare_deepspeed(Path(folder))
        small = Path(folder) / "small"
        write_random_llama(small, seed=0, width=32)
        # What libraries load and allocate once is no part of a method.
        _two_steps(ranks, method, small, rows)
        memory = PeakMemory(ranks.device)
        _two_steps(ranks, method, model_path, rows)
        peak = memory.bytes_above_start()
        leave_deepspeed()
    return peak


def _two_steps(ranks: Ranks, method: dict[str, Any], model_path: Path, rows: Sequence[TrainingSample]) -> None:
    """Two: the optimiser's state comes into being in the first."""
    size = {"batch_size": MEMORY_BATCH, "micro_batch_size": MEMORY_MICRO_BATCH}
    learner = Learner(ranks, _spec(model_path, method, **size))
    limits = ForwardLimits(MEMORY_BATCH * 2 * LONGEST, MEMORY_MICRO_BATCH)
    ((minibatch,),) = cut_into_minibatches(rows, 1, 1, limits, whole_groups=False)
    for _ in range(2):
        learner.learn([minibatch], 1e-4)
    learner.close()


class PeakMemory:
    """The most memory taken since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # Resets the high-water mark that VmHWM tells, see proc(5).
            Path("/proc/self/clear_refs").write_text("5")
        self._start = self._bytes()

    def bytes_above_start(self) -> float:
        return self._bytes() - self._start

    def _bytes(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        status = Path("/proc/self/status").read_text()
        return float(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


class PlainLoop:
    """The same step in torch alone."""

    def __init__(self, model_path: Path) -> None:
        self._model: Any = load_policy(model_path, "float32")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.0)
        self._beta = _spec(model_path).algorithm.beta

    def step(self, rows: Sequence[TrainingSample]) -> None:
        batch = token_batch(rows, self._beta, RewardSpec())
        logprobs_BL = token_logprobs(self._model, batch.input_ids_BL, batch.attention_mask_BL)
        loss, _ = spo_loss(logprobs_BL, batch, [LossTerm(objective="terminal_squared")], self._beta)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _spec(model_path: Path, method: dict[str, Any] | None = None, **trainer: Any) -> JobSpec:
    defaults = {"batch_size": BATCH, "micro_batch_size": BATCH, "zero_stage": 0}
    sections = {**(method or {})}
    own: dict[str, Any] = sections.pop("trainer", {})
    return toy_spec({"model": {"path": str(model_path)}, **sections, "trainer": {**defaults, **own, **trainer}})


def _sampled(model_path: Path, count: int) -> list[TrainingSample]:
    found = sampled_trajectories(model_path, count, longest=LONGEST)
    return [TrainingSample(each.trajectory, each.qhat_0, index) for index, each in enumerate(found)]


def _whole(rows: Sequence[TrainingSample]) -> list[Minibatch]:
    """The batch as one piece."""
    return [Minibatch([MicroBatch(rows)], len(rows))]


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
