"""Checkpoints of a TRL trainer: a model folder every few steps, and a line that says what it had cost by then.

A line is {"step", "cpu_seconds", "folder"}; step 0, without a folder, is there when training begins.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback


def weights(folder: str) -> PreTrainedModel:
    """The model as transformers loads it: the platform's packed attention knows nothing of TRL's padding."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


class Checkpoints(TrainerCallback):
    """Writes the policy every few steps; the process's CPU counts from its start, writing does not."""

    def __init__(self, every: int, folder: Path, tokenizer: Any) -> None:
        self._every, self._folder, self._tokenizer = every, folder, tokenizer
        self._uncounted = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._say(0, None)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._every:
            return
        before = time.process_time()
        folder = self._folder / f"step-{state.global_step}"
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        self._uncounted += time.process_time() - before
        self._say(state.global_step, folder)

    def _say(self, step: int, folder: Path | None) -> None:
        spent = time.process_time() - self._uncounted
        print(json.dumps({"step": step, "cpu_seconds": spent, "folder": folder and str(folder)}), flush=True)


# What every trainer here gets.
COMMON: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 64,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
