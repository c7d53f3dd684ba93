"""The services value-estimation asks; a peer that is away is waited for, with a limit and by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.value_estimation.settings import Settings
from spo.errors import NotReady, SpoError
from spo.logs import get_logger
from spo.rpc import Client
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import (
    PRIORITY_TRAINING,
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    JudgeResponse,
)
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.replay_service_pb2 import AppendRequest
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Verdict

log = get_logger("peers")

PAUSE_SECONDS = 1.0
SAY_EVERY_SECONDS = 10.0
SHORT_DEADLINE_SECONDS = 30.0


@dataclass(frozen=True)
class Peers:
    """Inference, judge and replay buffer."""

    inference: Client
    judge: Client
    replay: Client
    settings: Settings
    stop: threading.Event

    def generate(self, group: PromptGroup) -> list[Trajectory]:
        """Sample a group. Raises NotReady when inference stays away for patience_seconds."""
        response: GenerateResponse = self._ask(
            self.inference, "Generate", GenerateRequest(group=group), self.settings.generate_deadline_seconds
        )
        return list(response.group.trajectories)

    def judge_programs(self, prompt: Prompt, programs: Sequence[str]) -> list[Verdict]:
        """A verdict per program; equal programs are sent once."""
        unique = list(dict.fromkeys(programs))
        request = JudgeRequest(
            programs=unique, language=prompt.language, tests_digest=prompt.tests_digest, priority=PRIORITY_TRAINING
        )
        response: JudgeResponse = self._ask(self.judge, "Judge", request, self.settings.judge_deadline_seconds)
        by_program = dict(zip(unique, response.verdicts, strict=True))
        return [by_program[program] for program in programs]

    def judge_version(self) -> str:
        """The version under which verdicts and values are kept."""
        response: DescribeJudgeResponse = self._ask(
            self.judge, "DescribeJudge", DescribeJudgeRequest(), SHORT_DEADLINE_SECONDS
        )
        return response.judge_version

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Store judged and scored trajectories; repeating it changes nothing."""
        request = AppendRequest(run_id=run_id, trajectories=trajectories)
        self._ask(self.replay, "Append", request, SHORT_DEADLINE_SECONDS)

    def _ask(self, client: Client, method: str, request: Any, deadline_seconds: float) -> Any:
        give_up = time.monotonic() + self.settings.patience_seconds
        say_next = time.monotonic() + SAY_EVERY_SECONDS
        while True:
            try:
                return client.call(method, request, deadline_seconds)
            except SpoError as error:
                if not error.retryable or time.monotonic() > give_up:
                    raise
                if time.monotonic() > say_next:
                    say_next += SAY_EVERY_SECONDS
                    log.info("waiting for a peer", peer=client.service, method=method, reason=error.message)
                if self.stop.wait(PAUSE_SECONDS):
                    raise NotReady(f"stopping while waiting for {client.service}") from None
