"""What the replay buffer's tests need: runs, judged trajectories, and a value-estimation that scores by rule."""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from spo import redis_keys
from spo.errors import InvalidInput, NotReady
from spo.messaging.redis_client import RedisClient
from spo.model.segments import action_mask
from spo.rpc.server import RpcServer
from spo.spec.job_spec import JobSpec, spec_to_json
from spo.testing.toy_spec import toy_spec
from spo.v1 import value_service_pb2 as value
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

RUN = "job_TEST"
PROMPTS = tuple(f"prompt-{number}" for number in range(4))
FOREIGN_TOKEN = 999


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
