"""What value-estimation works among in tests: doubles of engine and judge, where every fourth sample is right."""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import spec_to_json
from spo.spec.job_state import JobState
from spo.testing.toy_spec import toy_spec
from spo.v1 import inference_service_pb2 as inference
from spo.v1 import judge_service_pb2 as judge
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

# Texts that the toy contest's tokenizer keeps as they are.
RIGHT, WRONG = "b=[", "print("


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
            sampling_logprobs=[-1.0] * len(tokens),
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
    """The fixture `surroundings`: engine, judge, a real replay buffer and ValueService behind one server at `address`.

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
