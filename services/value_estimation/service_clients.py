"""Clients of the services that value-estimation calls; each call waits for a service that is away, with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from services.value_estimation.settings import Settings
from spo.errors import NotFound, NotReady
from spo.messaging.redis_client import RedisClient
from spo.rpc.client import Answer, RpcClient
from spo.rpc.inference_client import InferenceClient
from spo.rpc.judge_pools import JudgePools
from spo.rpc.long_calls import generate, judge
from spo.rpc.message_sizes import chunks_by_bytes
from spo.spec.reward import require_decided
from spo.v1.judge_service_pb2 import (
    PRIORITY_TRAINING,
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    JudgeResponse,
)
from spo.v1.prompt_pb2 import SOURCE_REFERENCE, Prompt, PromptGroup, Source
from spo.v1.replay_service_pb2 import (
    AppendRequest,
    GetTrajectoryRequest,
    GetTrajectoryResponse,
    ListTrajectoriesRequest,
    ListTrajectoriesResponse,
)
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_INTERNAL_ERROR, Verdict

SHORT_DEADLINE_SECONDS = 30.0
PAGE = 500
# The replicas still serve another run: one of them will be assigned to this one.
PASSING_CODES = frozenset({"other_run"})


@dataclass
class Signs:
    """Signs of life of a call, over all its attempts."""

    count: int = 0

    def note(self) -> None:
        """One more."""
        self.count += 1


@dataclass(frozen=True)
class ServiceClients:
    """Inference, judge and replay buffer; calls give up once `wanted` is false."""

    inference: RpcClient
    judge: JudgePools
    replay: RpcClient
    settings: Settings
    stop: threading.Event
    wanted: Callable[[], bool] = lambda: True

    def generate(self, group: PromptGroup) -> list[Trajectory]:
        """Sample a group. Raises NotReady when inference stays away for patience_seconds."""
        kept: dict[int, Trajectory] = {}
        signs = Signs()
        return self._insist(
            self.inference,
            lambda: generate(self.inference, group, kept=kept, wanted=self._is_wanted, alive=signs.note),
            signs,
        )

    def judge_programs(self, prompt: Prompt, programs: Sequence[str], *, all_tests: bool, run_id: str) -> list[Verdict]:
        """A verdict per program; equal programs are sent once. all_tests: go on after a failed test."""
        unique = list(dict.fromkeys(programs))
        if not unique:
            return []
        request = JudgeRequest(
            programs=unique,
            language=prompt.language,
            tests_digest=prompt.tests_digest,
            priority=PRIORITY_TRAINING,
            want_details=all_tests,
            run_id=run_id,
        )
        judges, signs = self.judge.of(prompt.verifier_pool), Signs()
        response: JudgeResponse = self._insist(
            judges, lambda: judge(judges, request, wanted=self._is_wanted, alive=signs.note), signs
        )
        by_program = dict(zip(unique, response.verdicts, strict=True))
        require_decided(response.verdicts)
        if any(verdict.outcome == OUTCOME_INTERNAL_ERROR for verdict in response.verdicts):
            # No verdict on the program, so no reward: the prompt is tried again.
            raise NotReady("the judge could not decide on a program", code="judge_fault")
        return [by_program[program] for program in programs]

    def judge_version(self, prompt: Prompt) -> str:
        """The version under which verdicts and values of a prompt are kept."""
        response: DescribeJudgeResponse = self._ask(
            self.judge.of(prompt.verifier_pool), "DescribeJudge", DescribeJudgeRequest(), SHORT_DEADLINE_SECONDS
        )
        return response.judge_version

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Store judged and scored trajectories; repeating it changes nothing."""
        for chunk in chunks_by_bytes([trajectory.ByteSize() for trajectory in trajectories]):
            request = AppendRequest(run_id=run_id, trajectories=trajectories[chunk])
            self._ask(self.replay, "Append", request, SHORT_DEADLINE_SECONDS)

    def stored_samples(
        self, run_id: str, prompt_id: str, source: Source.ValueType = SOURCE_REFERENCE
    ) -> list[Trajectory]:
        """The samples of a prompt in a run's buffer, oldest first; none when the run is gone."""
        request = ListTrajectoriesRequest(run_id=run_id, prompt_id=prompt_id, source=source, limit=PAGE)
        found: list[Trajectory] = []
        try:
            while True:
                page: ListTrajectoriesResponse = self._ask(
                    self.replay, "ListTrajectories", request, SHORT_DEADLINE_SECONDS
                )
                found += page.trajectories
                request.cursor = page.next_cursor
                if not page.next_cursor:
                    return found[::-1]
        except NotFound:
            return []

    def some_samples(self, run_id: str, prompt_id: str, limit: int) -> list[Trajectory]:
        """The newest samples of pi0 on a prompt in a run's buffer."""
        request = ListTrajectoriesRequest(run_id=run_id, prompt_id=prompt_id, source=SOURCE_REFERENCE, limit=limit)
        page: ListTrajectoriesResponse = self._ask(self.replay, "ListTrajectories", request, SHORT_DEADLINE_SECONDS)
        return list(page.trajectories)

    def trajectory(self, run_id: str, trajectory_id: str) -> Trajectory:
        """One trajectory of a run's buffer. Raises NotFound."""
        request = GetTrajectoryRequest(run_id=run_id, trajectory_id=trajectory_id)
        found: GetTrajectoryResponse = self._ask(self.replay, "GetTrajectory", request, SHORT_DEADLINE_SECONDS)
        return found.trajectory

    def _is_wanted(self) -> bool:
        return not self.stop.is_set() and self.wanted()

    def _insist(self, client: RpcClient, attempt: Callable[[], Answer], signs: Signs) -> Answer:
        return client.patiently(
            attempt,
            patience_seconds=self.settings.patience_seconds,
            stop=self.stop,
            wanted=self.wanted,
            passing=PASSING_CODES,
            signs=lambda: signs.count,
        )

    def _ask(self, client: RpcClient, method: str, request: Message, deadline_seconds: float) -> Any:
        return client.call_patiently(
            method,
            request,
            deadline_seconds,
            patience_seconds=self.settings.patience_seconds,
            stop=self.stop,
            wanted=self.wanted,
            passing=PASSING_CODES,
        )


def connect_clients(settings: Settings, stop: threading.Event, registry: RedisClient) -> ServiceClients:
    """Clients at the addresses of the settings; inference also at those in the registry of replicas."""
    return ServiceClients(
        InferenceClient(settings.inference_address, registry),
        JudgePools(settings.sandbox_judge_address, settings.verifier_address),
        RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        settings,
        stop,
    )
