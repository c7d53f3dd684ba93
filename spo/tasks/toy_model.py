"""pi0 of the toy contest: a Llama of a quarter million parameters, trained to be deliberately half right.

    python -m spo.tasks.toy_model FOLDER [standard|hard] [SEED]

takes about a minute of one core and writes a folder that transformers and vLLM load. That of the difficulty standard is
shipped, in spo/tasks/data/toy_standard.
"""

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast, get_args

import torch
import transformers
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spo.tasks.toy import Difficulty, damage, sample_pair
from spo.tasks.toy_tokenizer import MAXIMUM_TOKENS, SPECIAL_TOKENS, build_tokenizer, save_tokenizer

STEPS = 600
BATCH = 64
BATCHES_PER_POOL = 16
LEARNING_RATE = 4e-3
WARMUP_STEPS = 40
IGNORED_LABEL = -100

StepCallback = Callable[[int, int], None]


def build_reference_model(
    folder: Path,
    difficulty: Difficulty = "standard",
    seed: int = 0,
    progress: StepCallback | None = None,
    steps: int = STEPS,
) -> None:
    """Train pi0 and write it to `folder` in one rename; `progress` is told (steps done, steps in all)."""
    # Its bar would be written over the caller's.
    transformers.utils.logging.disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    threads = torch.get_num_threads()
    # One thread: sums are taken in one order, so the same seed gives the same weights.
    torch.set_num_threads(1)
    try:
        tokenizer = build_tokenizer()
        model = _train(tokenizer, difficulty, seed, progress, steps)
        model.save_pretrained(staging, safe_serialization=True)
        save_tokenizer(staging)
        staging.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(staging, ignore_errors=True)


def _train(
    tokenizer: PreTrainedTokenizerFast, difficulty: Difficulty, seed: int, progress: StepCallback | None, steps: int
) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_architecture(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup_then_linear_decay(step, steps))
    batches = _batches(tokenizer, difficulty, random.Random(f"pi0 {difficulty} {seed}"))
    model.train()
    for step, (input_ids_BL, labels_BL) in zip(range(steps), batches, strict=False):
        loss = model(input_ids=input_ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps)
    model.eval()
    return model


def _architecture(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=240,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        # vLLM's CPU attention has no head narrower than 32.
        head_dim=32,
        max_position_embeddings=MAXIMUM_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _warmup_then_linear_decay(step: int, steps: int) -> float:
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def _batches(
    tokenizer: PreTrainedTokenizerFast, difficulty: Difficulty, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield input_ids_BL and labels_BL without end; rows of like length go together, as padding costs a third."""
    ordinary_ids = range(len(SPECIAL_TOKENS), len(tokenizer))
    while True:
        pairs = [sample_pair(rng, difficulty) for _ in range(BATCH * BATCHES_PER_POOL)]
        prompts = tokenizer.apply_chat_template(
            [[{"role": "user", "content": statement}] for statement, _ in pairs],
            add_generation_prompt=True,
            return_dict=False,
        )
        programs = tokenizer([program for _, program in pairs], add_special_tokens=False)["input_ids"]
        responses = [[*damage(program, ordinary_ids, rng), tokenizer.eos_token_id] for program in programs]
        rows = sorted(zip(prompts, responses, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        starts = list(range(0, len(rows), BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield _pad(rows[start : start + BATCH], tokenizer.pad_token_id)


def _pad(rows: list[tuple[list[int], list[int]]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right; only the response is to be predicted, so causal attention needs no mask."""
    length = max(len(prompt) + len(response) for prompt, response in rows)
    input_ids_BL = torch.full((len(rows), length), pad_token_id)
    labels_BL = torch.full((len(rows), length), IGNORED_LABEL)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        input_ids_BL[row, :end] = torch.tensor(prompt + response)
        labels_BL[row, len(prompt) : end] = torch.tensor(response)
    return input_ids_BL, labels_BL


def main(arguments: list[str]) -> None:
    """Build pi0 with a progress bar."""
    if not 1 <= len(arguments) <= 3 or (len(arguments) > 1 and arguments[1] not in get_args(Difficulty)):
        raise SystemExit("usage: python -m spo.tasks.toy_model FOLDER [standard|hard] [SEED]")
    folder = Path(arguments[0])
    difficulty = cast(Difficulty, arguments[1]) if len(arguments) > 1 else "standard"
    seed = int(arguments[2]) if len(arguments) > 2 else 0
    with Progress() as bar:
        task = bar.add_task("training pi0 of the toy contest", total=STEPS)
        build_reference_model(folder, difficulty, seed, lambda done, total: bar.update(task, completed=done))


if __name__ == "__main__":
    main(sys.argv[1:])
