"""TRL's SFT on the people's solutions that `toy/thrifty` learns from.

    python -m benchmarks.race.peers.sft MODEL JUDGE SEED STEPS STEPS_PER_CHECKPOINT FOLDER SETTINGS

MODEL is a folder, SETTINGS a JSON object of SFTConfig's fields; the judge is not asked. See peers/written.py for what
it says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.race.peers.written import COMMON, Checkpoints, weights
from benchmarks.race.problems import race_problems
from spo.model.tokenizer import encode_prompt, encode_response, load_tokenizer

SOLUTIONS_PER_PROBLEM = 12


def main(arguments: list[str]) -> None:
    """Train; the loss is on the solutions' tokens alone."""
    model, _, seed, steps, every, folder, settings = arguments
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(model)
    rows = []
    for problem in race_problems().train:
        prompt = encode_prompt(tokenizer, problem.statement)
        for solution in problem.human_solutions[:SOLUTIONS_PER_PROBLEM]:
            response = encode_response(tokenizer, solution)
            rows.append({"input_ids": prompt + response, "labels": [-100] * len(prompt) + response})
    own = {"output_dir": folder, "max_steps": int(steps), "seed": int(seed), **json.loads(settings)}
    trainer = SFTTrainer(
        model=weights(model),
        args=SFTConfig(**{**COMMON, **own}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Checkpoints(int(every), Path(folder), tokenizer)],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
