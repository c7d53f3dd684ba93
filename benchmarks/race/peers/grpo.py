"""TRL's GRPO on the toy contest.

    python -m benchmarks.race.peers.grpo MODEL JUDGE SEED STEPS STEPS_PER_CHECKPOINT FOLDER SETTINGS

MODEL is a folder, JUDGE is host:port, SETTINGS a JSON object of GRPOConfig's fields; with `replay_buffer_size` it is
the experimental trainer with a replay buffer, with `task_seed` it learns on other problems. Same kind of judge as the
platform's; a program is sent to it once. See peers/written.py for what it says.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.race.peers.written import COMMON, Checkpoints, weights
from benchmarks.race.problems import MAX_RESPONSE_TOKENS, TASK_SEED, race_problems
from spo.model.tokenizer import load_tokenizer
from spo.rpc.client import RpcClient
from spo.tasks.problem import Problem, extract_program
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

JUDGE_SECONDS = 120.0
TIE = 1e-9


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


def main(arguments: list[str]) -> None:
    """Train."""
    model, judge_address, seed, steps, every, folder, settings = arguments
    torch.set_num_threads(1)
    own: dict[str, Any] = json.loads(settings)
    problems = list(race_problems(own.pop("task_seed", TASK_SEED)).train)
    tokenizer = load_tokenizer(model)
    # TRL pads prompts on the left.
    tokenizer.padding_side = "left"
    judge = RpcClient("sandbox-judge", judge_address, JudgeServiceStub)
    rows = [
        {"prompt": [{"role": "user", "content": each.statement}], "problem_id": each.problem_id} for each in problems
    ]
    config, trainer_of = GRPOConfig, GRPOTrainer
    if "replay_buffer_size" in own:
        from trl.experimental import grpo_with_replay_buffer as replaying  # type: ignore[import-not-found]

        config, trainer_of = replaying.GRPOWithReplayBufferConfig, replaying.GRPOWithReplayBufferTrainer
    given = {"output_dir": folder, "max_completion_length": MAX_RESPONSE_TOKENS, "temperature": 1.0}
    given |= {"max_steps": int(steps), "seed": int(seed), **own}
    trainer = trainer_of(
        model=weights(model),
        reward_funcs=Rewards(judge, problems),
        args=config(**{**COMMON, **given}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Checkpoints(int(every), Path(folder), tokenizer)],
    )
    if "replay_buffer_size" in own:
        _tell_ties_apart(trainer.replay_buffer)
    trainer.train()
    judge.close()


def _tell_ties_apart(buffer: Any) -> None:
    """TRL 1.13 pushes (score, tensors) onto a heap, which compares tensors of equal scores and fails; newer is higher.

    Rewards of 0 and 1 give equal scores all the time.
    """
    add, number = buffer.add, itertools.count()
    buffer.add = lambda scores, data: add([score + TIE * next(number) for score in scores], data)


if __name__ == "__main__":
    main(sys.argv[1:])
