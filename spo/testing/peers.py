"""Doubles of the services the orchestrator talks to: real gRPC servers in this process, with answers a test can set."""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
from blake3 import blake3

from spo.errors import NotReady
from spo.rpc.server import RpcServer
from spo.v1 import inference_service_pb2 as inference
from spo.v1 import judge_service_pb2 as judge
from spo.v1 import replay_service_pb2 as replay
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, OUTCOME_WRONG_ANSWER, Verdict

RIGHT = "right"
# What the verifier of a person fails on, and how.
BREAKS, FAULT = "breaks", "score: ValueError: no number"


class JudgeServiceDouble(JudgeServiceServicer):
    """Accepts programs that start with `right`; on `breaks` it has no verdict. parts: of every score, by name."""

    def __init__(self) -> None:
        self.uploaded: set[str] = set()
        self.version = "test"
        self.programs = 0
        self.parts: dict[str, float] = {}

    def UploadTests(
        self, request: judge.UploadTestsRequest, context: grpc.ServicerContext
    ) -> judge.UploadTestsResponse:
        digests = [blake3(tests.SerializeToString(deterministic=True)).hexdigest() for tests in request.test_sets]
        self.uploaded.update(digests)
        return judge.UploadTestsResponse(digests=digests)

    def DescribeJudge(
        self, request: judge.DescribeJudgeRequest, context: grpc.ServicerContext
    ) -> judge.DescribeJudgeResponse:
        return judge.DescribeJudgeResponse(judge_version=self.version)

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        self.programs += len(request.programs)
        outcomes = [
            OUTCOME_ACCEPTED if program.startswith(RIGHT) else OUTCOME_WRONG_ANSWER for program in request.programs
        ]
        verdicts = [Verdict(outcome=outcome, judge_version=self.version) for outcome in outcomes]
        for program, verdict in zip(request.programs, verdicts, strict=True):
            if program == BREAKS:
                verdict.outcome, verdict.detail = OUTCOME_INTERNAL_ERROR, FAULT
            for name, score in self.parts.items():
                verdict.parts.add(name=name, score=score)
                verdict.score = score
        if request.want_details:
            for verdict in verdicts:
                verdict.tests.add(outcome=verdict.outcome, output="<b>printed</b>")
        return judge.JudgeResponse(verdicts=verdicts)


class InferenceDouble(InferenceServiceServicer):
    """Answers each sample with the text that `respond` gives; `unready` calls are refused first.

    Completions say what `says` does, a word a part and token, until `goes_on` is set where they wait for it.
    """

    def __init__(self) -> None:
        self.respond: Callable[[PromptGroup, int], str] = lambda group, index: RIGHT if index % 2 else "wrong"
        self.unready = 0
        self.says: Callable[[inference.ServeRequest], str] = lambda request: "one two three"
        self.goes_on: threading.Event | None = None
        self.serving = 0
        self.versions: list[int] = []
        self._lock = threading.Lock()

    def Serve(
        self, request: inference.ServeRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.ServeResponse]:
        self.serving += 1
        ended = threading.Event()
        context.add_callback(ended.set)
        words = self.says(request).split()
        first = inference.ServeResponse(prompt_token_ids=[1, 2], model_hash="f" * 64, sampler="double")
        try:
            for number, word in enumerate(words, 1):
                text = word if number == len(words) else f"{word} "
                for index in range(request.samples):
                    part = first.parts.add(index=index, text=text, token_ids=[number])
                    part.finish_reason = "stop" if number == len(words) else ""
                yield first
                first = inference.ServeResponse()
                while self.goes_on and not self.goes_on.wait(0.02) and not ended.is_set():
                    pass
        finally:
            self.serving -= 1

    def Generate(self, request: inference.GenerateRequest, context: grpc.ServicerContext) -> inference.GenerateResponse:
        group = request.group
        with self._lock:
            if self.unready > 0:
                self.unready -= 1
                raise NotReady("the model still loads")
            self.versions.append(group.policy_version)
        samples = [
            Trajectory(
                sample_index=index,
                response_text=self.respond(group, index),
                response_token_ids=[1, 2],
                sampling_logprobs=[-0.5, -0.5],
            )
            for index in range(group.sampling.samples)
        ]
        return inference.GenerateResponse(group=RolloutGroup(request=group, trajectories=samples))


class ReplayDouble(ReplayServiceServicer):
    """Admits what the test says and lists the trajectories it was given."""

    def __init__(self) -> None:
        self.admissible = 0
        self.groups_per_replica = 0
        self.asked = replay.GetReplayStatusRequest()
        self.backpressure = ""
        self.counts: list[replay.SourceCount] = []
        self.trajectories: list[Trajectory] = []

    def GetReplayStatus(
        self, request: replay.GetReplayStatusRequest, context: grpc.ServicerContext
    ) -> replay.GetReplayStatusResponse:
        self.asked = request
        return replay.GetReplayStatusResponse(
            admissible_inserts=self.admissible,
            counts=self.counts,
            backpressure=self.backpressure,
            groups_per_replica=self.groups_per_replica,
        )

    def ListTrajectories(
        self, request: replay.ListTrajectoriesRequest, context: grpc.ServicerContext
    ) -> replay.ListTrajectoriesResponse:
        return replay.ListTrajectoriesResponse(trajectories=self.trajectories[: request.limit])

    def GetTrajectory(
        self, request: replay.GetTrajectoryRequest, context: grpc.ServicerContext
    ) -> replay.GetTrajectoryResponse:
        found = next(
            trajectory for trajectory in self.trajectories if trajectory.trajectory_id == request.trajectory_id
        )
        steps = range(request.steps_from, 7)[: request.steps_limit]
        return replay.GetTrajectoryResponse(trajectory=found, steps=steps, times_sampled=7)

    def GetBatch(self, request: replay.GetBatchRequest, context: grpc.ServicerContext) -> replay.GetBatchResponse:
        return replay.GetBatchResponse(trajectory_ids=[trajectory.trajectory_id for trajectory in self.trajectories])


class ServiceDoubles:
    """One server that plays inference, judge and replay buffer; use as a context manager. port: 0 for any."""

    def __init__(self, port: int = 0) -> None:
        # Calls that no test of the orchestrator makes stay unimplemented, and say so when made.
        self.judge = JudgeServiceDouble()  # type: ignore[abstract]
        self.inference = InferenceDouble()  # type: ignore[abstract]
        self.replay = ReplayDouble()  # type: ignore[abstract]
        self._server = RpcServer("127.0.0.1", port)
        server: grpc.Server = self._server.server
        add_JudgeServiceServicer_to_server(self.judge, server)
        add_InferenceServiceServicer_to_server(self.inference, server)
        add_ReplayServiceServicer_to_server(self.replay, server)

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> ServiceDoubles:
        self._server.start()
        self._server.set_serving(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1)
