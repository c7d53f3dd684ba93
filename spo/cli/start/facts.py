"""What `spo init` looks at before it writes: the model's folder, the problems, the machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spo.cli.preview import prompt_counter
from spo.errors import InvalidInput
from spo.spec.plan.plan import GIGABYTE
from spo.spec.plan.shapes import ModelShape, shape_of_folder
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.problem import Problem

PROBE_SECONDS = 10
# So many problems are read through the tokenizer; the longest of more is guessed by characters.
MOST_TOKENIZED = 2000


@dataclass(frozen=True)
class ModelFacts:
    """Of the model: its sizes, its most positions (0: it does not say), whether it has a chat template."""

    path: Path
    shape: ModelShape
    positions: int
    has_template: bool
    count_tokens: Callable[[str], int]
    counted_by: str


@dataclass(frozen=True)
class TaskFacts:
    """Of the problems: how many, tokens of the longest prompt and solution (0: none has one), what decides."""

    path: Path
    kind: str
    problems: int
    prompt_tokens: int
    solution_tokens: int
    with_solutions: int
    decided_by: str


@dataclass(frozen=True)
class MachineFacts:
    """Devices of the trainer, bytes of each that it may have; accelerated: GPUs and no CPU."""

    devices: int
    device_bytes: int
    accelerated: bool
    words: str


def look_at_model(folder: Path) -> ModelFacts:
    """Raises InvalidInput where the folder tells no sizes."""
    shape = shape_of_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    positions = config.get("max_position_embeddings")
    count, how, template = prompt_counter(folder)
    return ModelFacts(folder.absolute(), shape, positions if isinstance(positions, int) else 0, template, count, how)


def look_at_problems(path: Path, kind: str, problems: Sequence[Problem], model: ModelFacts) -> TaskFacts:
    """Raises InvalidInput where there are none."""
    if not problems:
        raise InvalidInput(f"{path} holds no problem", code="invalid_tasks")
    read = sorted(problems, key=lambda problem: -len(problem.statement))[:MOST_TOKENIZED]
    solutions = [solution for problem in read for solution in problem.human_solutions[:1]]
    answers = sum(problem.language == ANSWER_LANGUAGE for problem in problems)
    decided = {0: "tests of programs", len(problems): "answers"}.get(answers, "tests of programs, and answers")
    return TaskFacts(
        path.absolute(),
        kind,
        len(problems),
        max(model.count_tokens(problem.statement) for problem in read),
        max(map(model.count_tokens, solutions), default=0),
        sum(bool(problem.human_solutions) for problem in problems),
        decided,
    )


def look_at_machine() -> MachineFacts:
    """Its GPUs as the driver tells them; where there is none, processors and memory, which all services share."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
        sizes = [int(line) << 20 for line in asked.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        sizes = []
    if sizes:
        words = f"{len(sizes)} GPUs of {min(sizes) / GIGABYTE:.0f} GB"
        if len(sizes) == 1:
            # Rollouts, values and training share it.
            return MachineFacts(1, min(sizes) // 2, accelerated=True, words=f"{words}, half of it for the trainer")
        return MachineFacts(
            len(sizes) // 2, min(sizes), accelerated=True, words=f"{words}, half of them for the trainer"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = f"no GPU, {os.cpu_count()} cores, {memory / GIGABYTE:.0f} GB, a third of it for the trainer"
    return MachineFacts(1, memory // 3, accelerated=False, words=words)
