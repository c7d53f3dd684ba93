"""pass@k of model weights on the toy contest's held-out problems, by the platform's engine, judge and protocol.

    python -m benchmarks.race.held_out <pi0> <judge host:port>

Reads a folder of safetensors per line, answers each with {"pass_at_1", "pass_at_10", "low", "high"}: every contestant
is examined by the same process, with the same seeds. The last two bound pass@10: a 95 % bootstrap over problems.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.race.problems import MAX_RESPONSE_TOKENS, race_problems
from services.inference.engine import Engine, EngineSpec, SampleRequest
from services.inference.settings import Settings
from services.orchestrator.jobs import seed_of
from spo.algorithm.values import ProblemCounts, mean_pass_at_k
from spo.model.tokenizer import decode_response, encode_prompt, load_tokenizer
from spo.rpc.client import RpcClient
from spo.spec.section import EvaluationSpec
from spo.tasks.problem import Problem, extract_program
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

MAX_TOKENS = 64
JUDGE_SECONDS = 300.0
PROTOCOL = EvaluationSpec()


def sampled(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]
) -> list[list[str]]:
    """The texts of each prompt's samples."""
    texts: list[list[str]] = [[] for _ in prompts]
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        for sample in range(PROTOCOL.samples):
            request = SampleRequest(prompt, PROTOCOL.temperature, PROTOCOL.top_p, MAX_RESPONSE_TOKENS, seed + sample)
            engine.add(f"{index}-{sample}", request)
    left = len(prompts) * PROTOCOL.samples
    while left:
        for name, sample_found in engine.step():
            texts[int(name.split("-")[0])].append(decode_response(tokenizer, sample_found.token_ids))
            left -= 1
    return texts


def counted(judge: RpcClient, problems: Sequence[Problem], texts: Sequence[Sequence[str]]) -> Iterator[ProblemCounts]:
    """How many of each problem's programs are right."""
    for problem, responses in zip(problems, texts, strict=True):
        programs = [extract_program(text, "raw") for text in responses]
        unique = list(dict.fromkeys(programs))
        request = JudgeRequest(
            programs=unique,
            language=problem.language,
            tests_digest=problem.tests_digest,
            priority=PRIORITY_EVALUATION,
        )
        answer: JudgeResponse = judge.call("Judge", request, JUDGE_SECONDS)
        verdicts = zip(unique, answer.verdicts, strict=True)
        right = {program for program, verdict in verdicts if verdict.outcome == OUTCOME_ACCEPTED}
        yield ProblemCounts(len(programs), sum(program in right for program in programs))


def main(arguments: Sequence[str]) -> None:
    """Answer until the input ends."""
    pi0, judge = Path(arguments[0]), RpcClient("sandbox-judge", arguments[1], JudgeServiceStub)
    problems = race_problems().evaluation
    judge.call("UploadTests", UploadTestsRequest(test_sets=[each.tests for each in problems]), JUDGE_SECONDS)
    tokenizer = load_tokenizer(pi0)
    prompts = [tuple(encode_prompt(tokenizer, each.statement)) for each in problems]
    seeds = [seed_of(0, "evaluation", each.problem_id) for each in problems]
    engine = Engine(EngineSpec(pi0, "", "float32", MAX_TOKENS), Settings())
    for number, line in enumerate(sys.stdin, start=1):
        engine.load(sorted(Path(line.strip()).glob("*.safetensors")), number)
        counts = list(counted(judge, problems, sampled(engine, tokenizer, prompts, seeds)))
        one, ten = (mean_pass_at_k(counts, k, seed=0) for k in (1, 10))
        answer = {"pass_at_1": one.mean, "pass_at_10": ten.mean, "low": ten.low, "high": ten.high}
        print(json.dumps(answer), flush=True)
    judge.close()


if __name__ == "__main__":
    main(sys.argv[1:])
