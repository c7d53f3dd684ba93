"""What `benchmarks.value` takes for the truth: many samples of the toy contest's pi0 per problem, judged.

    python scripts/value_pool.py MODEL_FOLDER [SAMPLES]     writes benchmarks/value_pool.json; about an hour of a core

The model is drawn from directly, without an engine, at temperature 1: a batch of one prompt costs a fraction of as many
requests. A judge of the command's own runs the programs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from spo.local.judge_client import EmbeddedJudge
from spo.model.logprobs import load_policy, response_logprobs
from spo.model.tokenizer import encode_prompt, encode_response, load_tokenizer
from spo.rpc.client import RpcClient
from spo.tasks.problem import Problem
from spo.tasks.toy import toy_tasks
from spo.v1.judge_service_pb2 import JudgeRequest, JudgeResponse, Priority, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

PROBLEMS, HELD_OUT = 160, 80
MOST_TOKENS = 44
BATCH = 1024
PROGRAMS_PER_CALL = 128
OUTPUT = Path(__file__).parents[1] / "benchmarks" / "value_pool.json"


@torch.no_grad()
def sample_programs(model: Any, tokenizer: Any, prompt: list[int], count: int, rng: torch.Generator) -> Counter[str]:
    """Finished responses of pi0 at temperature 1 by text; the unfinished ones under the empty text."""
    begun = model(input_ids=torch.tensor([prompt]), use_cache=True)
    cache = begun.past_key_values
    cache.batch_repeat_interleave(count)
    logits_BV = begun.logits[:, -1].repeat(count, 1)
    rows: list[list[int]] = [[] for _ in range(count)]
    alive = list(range(count))
    finished: Counter[str] = Counter()
    for _ in range(MOST_TOKENS):
        chosen_B = torch.multinomial(torch.softmax(logits_BV.float(), dim=-1), 1, generator=rng)[:, 0]
        for row, token in zip(alive, chosen_B.tolist(), strict=True):
            rows[row].append(token)
        going_on = (chosen_B != tokenizer.eos_token_id).nonzero()[:, 0]
        ended = set(range(len(alive))) - set(going_on.tolist())
        finished.update(tokenizer.decode(rows[alive[each]][:-1]) for each in ended)
        if not len(going_on):
            return finished
        alive = [alive[each] for each in going_on.tolist()]
        cache.batch_select_indices(going_on)
        logits_BV = model(input_ids=chosen_B[going_on][:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    finished[""] += len(alive)
    return finished


def accepted(judge: RpcClient, problem: Problem, programs: list[str]) -> set[str]:
    """The programs that pass all tests."""
    judge.call("UploadTests", UploadTestsRequest(test_sets=[problem.tests]), 60)
    right: set[str] = set()
    for start in range(0, len(programs), PROGRAMS_PER_CALL):
        part = programs[start : start + PROGRAMS_PER_CALL]
        request = JudgeRequest(
            programs=part,
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=Priority.PRIORITY_TRAINING,
        )
        reply: JudgeResponse = judge.call("Judge", request, 600)
        verdicts = zip(part, reply.verdicts, strict=True)
        right |= {program for program, verdict in verdicts if verdict.outcome == OUTCOME_ACCEPTED}
    return right


def main(arguments: list[str]) -> None:
    """Sample, judge and write."""
    folder, samples = arguments[0], int(arguments[1]) if len(arguments) > 1 else 2048
    torch.set_num_threads(1)
    model: Any = load_policy(folder, "float32")
    tokenizer = load_tokenizer(folder)
    rng = torch.Generator().manual_seed(1)
    embedded = EmbeddedJudge()
    embedded.start()
    judge = RpcClient("sandbox-judge", embedded.address, JudgeServiceStub)
    found = []
    for number, problem in enumerate(toy_tasks(PROBLEMS, HELD_OUT, seed=0).train):
        prompt = encode_prompt(tokenizer, problem.statement)
        programs: Counter[str] = Counter()
        for start in range(0, samples, BATCH):
            programs += sample_programs(model, tokenizer, prompt, min(BATCH, samples - start), rng)
        right = accepted(judge, problem, [program for program in programs if program])
        solutions = [encode_response(tokenizer, each) for each in problem.human_solutions]
        logprobs = response_logprobs(model, [prompt] * len(solutions), solutions, 16_384)
        found.append(
            {
                "prompt_id": problem.problem_id,
                "successes": sum(programs[program] for program in right),
                "solution_logprobs": [round(sum(each), 4) for each in logprobs],
                "words": sorted(set(prompt)),
            }
        )
        print(f"{number + 1}/{PROBLEMS} {problem.statement}: {found[-1]['successes']} of {samples}", flush=True)
    judge.close()
    embedded.stop()
    OUTPUT.write_text(json.dumps({"samples": samples, "prompts": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
