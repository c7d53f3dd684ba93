"""TRL's GRPO on the toy contest, as the yardstick of benchmarks.learning; needs requirements-trl.txt on the path.

    python -m benchmarks.peers.trl_grpo <pi0> <judge host:port> <seed> <steps> <steps per checkpoint> <folder>

Settings: what suited TRL best on this contest (64 completions per step in groups of 8, learning rate 5e-4, KL .087,
temperature 1). Same problems, same judge; a program is sent to it once. Writes a model folder per checkpoint and one
JSON object per line: {"step", "cpu_seconds", "folder"}; step 0 is there when training begins.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from spo.model.logprobs import load_policy
from spo.model.tokenizer import load_tokenizer
from spo.rpc.client import RpcClient
from spo.tasks.problem import Problem, extract_program
from spo.tasks.toy.problems import toy_tasks
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

TRAIN, HELD_OUT, TASK_SEED = 160, 80, 0
COMPLETIONS, GROUP = 64, 8
JUDGE_SECONDS = 120.0


class Rewards:
    """1 for a right program, 0 for another, as GRPO is usually given; SPO's -1 and 0 have the same advantages."""

    __name__ = "right"

    def __init__(self, judge: RpcClient, problems: list[Problem]) -> None:
        self._judge = judge
        self._problems = {each.problem_id: each for each in problems}
        self._known: dict[tuple[str, str], bool] = {}
        judge.call("UploadTests", UploadTestsRequest(test_sets=[each.tests for each in problems]), JUDGE_SECONDS)

    def __call__(self, completions: list[Any], problem_id: list[str], **_: Any) -> list[float]:
        """Rewards of completions, each on the problem at its place."""
        programs = [extract_program(each[0]["content"], "raw") for each in completions]
        asked = list(zip(problem_id, programs, strict=True))
        for problem in dict.fromkeys(problem_id):
            new = list(dict.fromkeys(p for i, p in asked if i == problem and (i, p) not in self._known))
            if new:
                self._learn(self._problems[problem], new)
        return [float(self._known[pair]) for pair in asked]

    def _learn(self, problem: Problem, programs: list[str]) -> None:
        request = JudgeRequest(
            programs=programs,
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=PRIORITY_TRAINING,
        )
        answer: JudgeResponse = self._judge.call("Judge", request, JUDGE_SECONDS)
        for program, verdict in zip(programs, answer.verdicts, strict=True):
            self._known[problem.problem_id, program] = verdict.outcome == OUTCOME_ACCEPTED


class Checkpoints(TrainerCallback):
    """Writes the policy every few steps and says what it had cost by then; writing is not counted."""

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


def main(arguments: list[str]) -> None:
    """Train; the process's CPU counts from its start."""
    pi0, judge_address, seed, steps, every, folder = arguments
    torch.set_num_threads(1)
    problems = list(toy_tasks(TRAIN, HELD_OUT, TASK_SEED).train)
    tokenizer = load_tokenizer(pi0)
    # TRL pads prompts on the left.
    tokenizer.padding_side = "left"
    judge = RpcClient("sandbox-judge", judge_address, JudgeServiceStub)
    rows = [
        {"prompt": [{"role": "user", "content": each.statement}], "problem_id": each.problem_id} for each in problems
    ]
    trainer = GRPOTrainer(
        model=load_policy(pi0, "float32"),
        reward_funcs=Rewards(judge, problems),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=COMPLETIONS,
            num_generations=GROUP,
            max_completion_length=44,
            temperature=1.0,
            learning_rate=5e-4,
            beta=0.087,
            adam_beta1=0.9,
            adam_beta2=0.98,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            max_grad_norm=1.0,
            max_steps=int(steps),
            seed=int(seed),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Checkpoints(int(every), Path(folder), tokenizer)],
    )
    trainer.train()
    judge.close()


if __name__ == "__main__":
    main(sys.argv[1:])
