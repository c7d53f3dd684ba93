"""Runs for tests: specs of the toy contest's size, a model folder without weights, judged trajectories, doubles of
scorer, engine and judge.
"""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from spo import redis_keys
from spo.errors import InvalidInput, NotReady, PreconditionFailed
from spo.messaging.redis_client import RedisClient
from spo.model.chat import action_mask
from spo.rpc.server import RpcServer
from spo.spec.job_spec import PAPER_BETA, JobSpec, parse_job_spec, spec_to_json
from spo.spec.section import JobState
from spo.v1 import inference_service_pb2 as inference, judge_service_pb2 as judge, value_service_pb2 as value
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup, Source
from spo.v1.trajectory_pb2 import (
    SEGMENT_KIND_ACTION,
    SEGMENT_KIND_OBSERVATION,
    RolloutGroup,
    Segment,
    Trajectory,
)
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer, add_ValueServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

TOY: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32", "max_prompt_tokens": 64, "max_response_tokens": 44},
    "algorithm": {"beta": PAPER_BETA},
    "value": {"samples": 128, "unsolved": "keep"},
    "rollout": {"temperature": (0.1, 0.8), "top_p": 0.95},
    "replay": {
        "mix": (
            {"source": "online", "share": 0.5},
            {"source": "reference", "share": 0.25, "correct_only": True},
            {"source": "human", "share": 0.25},
        )
    },
    "trainer": {
        "steps": 100,
        "batch_size": 64,
        "micro_batch_size": 64,
        "learning_rate": 4e-4,
        "adam_betas": (0.9, 0.98),
    },
}

HEADER = b"{}"

RUN = "job_TEST"
PROMPTS = tuple(f"prompt-{number}" for number in range(4))
FOREIGN_TOKEN = 999

# Texts that the toy contest's tokenizer keeps as they are.
RIGHT, WRONG = "b=[", "print("


def toy_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the toy's numbers where its sections, or members of them, are missing."""
    filled = dict(document)
    for name, section in TOY.items():
        own = document.get(name, {})
        filled[name] = {**section, **own} if isinstance(own, Mapping) else own
    return filled


def toy_spec(document: Mapping[str, Any]) -> JobSpec:
    """The spec of such a document. Raises InvalidInput (code "invalid_job_spec")."""
    return parse_job_spec(toy_document(document))


def distilled(document: Mapping[str, Any], teacher: Path) -> dict[str, Any]:
    """The document of a job that a model in another folder teaches, on its own samples alone."""
    return {
        **document,
        "algorithm": {"losses": [{"objective": "distillation"}], "teacher": {"path": str(teacher)}},
        "rollout": {"temperature": 1.0, "top_p": 1.0},
        "offline": {"human_solutions": False, "keep_reference_samples": False},
        "replay": {"mix": [{"source": "online", "share": 1.0}]},
        "value": None,
    }


def write_model_without_weights(folder: Path, **config: object) -> None:
    """Write the folder; `config` are fields of its config.json in place of those of a small Llama."""
    from spo.tasks.toy_tokenizer import build_tokenizer, save_tokenizer

    folder.mkdir(parents=True)
    chosen = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(build_tokenizer()),
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(chosen | config))
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(HEADER)) + HEADER)
    # The orchestrator knows weights by their time: of equal folders it then tries the first, in a process, for all.
    os.utime(weights, (0, 0))
    save_tokenizer(folder)


def start_run(client: RedisClient, run_id: str = RUN, **sections: Any) -> JobSpec:
    """Store the spec of a running run and a value for each of PROMPTS: 0, 10, 20 and 30 successes of 100."""
    spec = toy_spec({"model": {"path": "/pi0"}, **sections})
    client.set(redis_keys.run_spec(run_id), spec_to_json(spec))
    for number, prompt_id in enumerate(PROMPTS):
        found = PromptValue(prompt_id=prompt_id, samples=100, successes=10 * number)
        client.hset(redis_keys.run_values(run_id), prompt_id, found.SerializeToString())
    return spec


def trajectory(
    number: int,
    source: Source.ValueType = SOURCE_ONLINE,
    *,
    run_id: str = RUN,
    right: bool = True,
    text: str = "",
    version: int = 0,
    scored: bool = True,
    group_size: int = 1,
) -> Trajectory:
    """A judged trajectory of group number // group_size, each group of the next of PROMPTS.

    Equal numbers and sources are the same trajectory.
    """
    group = number // group_size
    return Trajectory(
        trajectory_id=f"traj_{Source.Name(source)}_{number}",
        run_id=run_id,
        group_id=f"group-{group}",
        sample_index=number % group_size,
        prompt_id=PROMPTS[group % len(PROMPTS)],
        source=source,
        prompt_token_ids=[1, 2],
        response_token_ids=[3, 4, 5],
        sampling_logprobs=[-0.1, -0.2, -0.3],
        reference_logprobs=[-0.1, -0.2, -0.4] if scored else [],
        reference_hash="pi0" if scored else "",
        response_text=text or f"print({number})",
        verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER),
        reward=0.0 if right else -1.0,
        policy_version_first=version,
        policy_version_last=version,
    )


def conversation(number: int, source: Source.ValueType = SOURCE_ONLINE, *, scored: bool = True) -> Trajectory:
    """A judged trajectory of two turns with an observation of two tokens between them."""
    made = trajectory(number, source, text=f"try({number})no: wrongprint({number})", scored=scored)
    made.response_token_ids[:] = [3, 4, 5, 6, 7, 8]
    made.sampling_logprobs[:] = [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4]
    made.reference_logprobs[:] = [-0.1, -0.3, 0.0, 0.0, -0.3, -0.5] if scored else []
    first, said = len(f"try({number})"), len("no: wrong")
    made.segments.extend(
        [
            Segment(kind=SEGMENT_KIND_ACTION, tokens=2, characters=first, score=0.25, label="python"),
            Segment(kind=SEGMENT_KIND_OBSERVATION, tokens=2, characters=said),
            Segment(kind=SEGMENT_KIND_ACTION, tokens=2, characters=len(made.response_text) - first - said),
        ]
    )
    return made


def judged_group(numbers: list[int], *, run_id: str = RUN) -> RolloutGroup:
    """An entry of the stream `verdicts`."""
    return RolloutGroup(
        request=PromptGroup(group_id=f"group-{numbers[0]}", run_id=run_id),
        trajectories=[trajectory(number, run_id=run_id, scored=False) for number in numbers],
    )


class ScorerDouble(ValueServiceServicer):
    """Gives every action token -0.5; `away`: answers like a service that still starts; `before` is called first."""

    def __init__(self) -> None:
        self.before: Callable[[value.ComputeReferenceLogprobsRequest], None] = lambda request: None
        self.away = threading.Event()
        self.refused = 0
        self.scored = 0

    def ComputeReferenceLogprobs(
        self, request: value.ComputeReferenceLogprobsRequest, context: grpc.ServicerContext
    ) -> value.ComputeReferenceLogprobsResponse:
        self.before(request)
        if self.away.is_set():
            self.refused += 1
            raise NotReady("the model still loads")
        if any(FOREIGN_TOKEN in sequence.response_token_ids for sequence in request.sequences):
            raise InvalidInput("a token id is outside the vocabulary")
        self.scored += len(request.sequences)
        return value.ComputeReferenceLogprobsResponse(
            sequences=[
                value.TokenLogprobs(
                    logprobs=-0.5 * action_mask(sequence.segments, len(sequence.response_token_ids)).astype(float)
                )
                for sequence in request.sequences
            ],
            reference_hash="pi0",
        )


@contextmanager
def served_scorer(scorer: ScorerDouble) -> Iterator[str]:
    """The address of a running value-estimation with this double."""
    server = RpcServer("127.0.0.1", 0)
    add_ValueServiceServicer_to_server(scorer, server.server)
    server.start()
    server.set_serving(True)
    try:
        yield server.address
    finally:
        server.stop(1)


# The log-prob of every token of the double's.
SAMPLED = -1.0


class EngineDouble(InferenceServiceServicer):
    """Every fourth sample is right where it is hot enough; refuses the first `unready` calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.unready = 0
        self.serves_others = 0
        self.right_from_temperature = 0.0
        self.refused = threading.Event()
        self.calls: list[PromptGroup] = []

    def Generate(self, request: inference.GenerateRequest, context: grpc.ServicerContext) -> inference.GenerateResponse:
        if self.unready:
            self.unready -= 1
            self.refused.set()
            raise NotReady("the model still loads")
        if self.serves_others:
            self.serves_others -= 1
            raise PreconditionFailed("this replica serves run job_BEFORE", code="other_run")
        self.calls.append(request.group)
        samples = [self._sample(request.group, index) for index in range(request.group.sampling.samples)]
        return inference.GenerateResponse(group=RolloutGroup(request=request.group, trajectories=samples))

    def _sample(self, group: PromptGroup, index: int) -> Trajectory:
        is_hot = group.sampling.temperature_min >= self.right_from_temperature
        text = RIGHT if is_hot and index % 4 == 0 else WRONG
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(group.run_id, group.group_id, index, 0, 0),
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            source=group.source,
            prompt_token_ids=[1, 2, 3],
            response_token_ids=tokens,
            sampling_logprobs=[SAMPLED] * len(tokens),
            temperature=group.sampling.temperature_min,
            top_p=group.sampling.top_p,
            response_text=text,
        )


class JudgeDouble(JudgeServiceServicer):
    """Accepts RIGHT; remembers how many programs it was sent."""

    def __init__(self) -> None:
        self.programs = 0

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        self.programs += len(request.programs)
        outcomes = [OUTCOME_ACCEPTED if program == RIGHT else OUTCOME_WRONG_ANSWER for program in request.programs]
        return judge.JudgeResponse(verdicts=[Verdict(outcome=outcome) for outcome in outcomes])

    def DescribeJudge(
        self, request: judge.DescribeJudgeRequest, context: grpc.ServicerContext
    ) -> judge.DescribeJudgeResponse:
        return judge.DescribeJudgeResponse(judge_version="test")


@dataclass(frozen=True)
class Surroundings:
    """What value-estimation and stored experience need in tests: engine, judge, a real replay buffer and ValueService.

    All of them are behind one server at `address`.

    peers, references, settings and store are those of the services, which nothing in `spo` may import.
    """

    client: RedisClient
    address: str
    model_path: Path
    engine: Any
    judge: Any
    store: Any
    weights: Any
    clients: Any
    references: Any
    settings: Any

    def start(self, run_id: str, state: JobState = JobState.ESTIMATING, **sections: Any) -> None:
        """A run of the random pi0 with these sections of its spec."""
        spec = toy_spec({"model": {"path": str(self.model_path)}, **sections})
        self.client.set(redis_keys.run_spec(run_id), spec_to_json(spec))
        self.client.set(redis_keys.run_state(run_id), state)
