"""The judge's stage of the pipeline: rollout groups in, the same groups with verdicts and rewards out."""

from __future__ import annotations

import threading
import time

from google.protobuf.message import DecodeError

from services.sandbox_judge.scheduler import Batch, JudgeScheduler
from services.sandbox_judge.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import RunSpecs
from spo.messaging.streams import Consumer, Entry, consume
from spo.observability import tracing
from spo.service.process import keep_alive_while
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import extract_program
from spo.v1.judge_service_pb2 import Priority
from spo.v1.trajectory_pb2 import RolloutGroup

SERVICE = "sandbox-judge"


class JudgeWorker:
    """Judges rollout groups from the stream; call it with a stop event."""

    def __init__(self, client: RedisClient, scheduler: JudgeScheduler, consumer_name: str, settings: Settings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.specs = RunSpecs(client)
        self.consumer = Consumer(
            client, redis_keys.rollouts(), redis_keys.JUDGE_GROUP, consumer_name, settings.reclaim_seconds
        )

    def __call__(self, stop: threading.Event) -> None:
        consume(self.consumer, self._judge, stop, count=self.settings.stream_groups)

    def _judge(self, entries: list[Entry]) -> None:
        with keep_alive_while(lambda: self.consumer.keep_alive(entries), self.settings.reclaim_seconds / 4):
            groups = [_decode(entry) for entry in entries]
            spans = [_span(entry, group) for entry, group in zip(entries, groups, strict=True)]
            batches = [self._submit(group) for group in groups]
            for entry, group, batch, span in zip(entries, groups, batches, spans, strict=True):
                _set_verdicts(group, batch, self._reward(group))
                self.consumer.forward(entry, redis_keys.verdicts(), group.SerializeToString(), span.header)
                span.end()

    def _submit(self, group: RolloutGroup) -> Batch:
        prompt = group.request.prompt
        programs = [
            extract_program(trajectory.response_text, prompt.response_format) for trajectory in group.trajectories
        ]
        return self.scheduler.submit(
            programs,
            prompt.language,
            prompt.tests_digest,
            Priority.PRIORITY_TRAINING,
            want_details=needs_all_tests(self._reward(group)),
        )

    def _reward(self, group: RolloutGroup) -> RewardSpec:
        return self.specs.of(group.request.run_id).tasks.reward


def _decode(entry: Entry) -> RolloutGroup:
    try:
        return RolloutGroup.FromString(entry.payload)
    except DecodeError as error:
        raise InvalidInput(f"not a RolloutGroup: {error}") from error


def _span(entry: Entry, group: RolloutGroup) -> tracing.Span:
    if not entry.trace:
        return tracing.Span()
    request = group.request
    programs = len(group.trajectories)
    return tracing.begin(
        "judge", parent=entry.trace, kind="CONSUMER", run=request.run_id, group=request.group_id, programs=programs
    )


def _set_verdicts(group: RolloutGroup, batch: Batch, reward: RewardSpec) -> None:
    for trajectory, verdict in zip(group.trajectories, batch.verdicts(), strict=True):
        trajectory.verdict.CopyFrom(verdict)
        # The counts say enough; a trajectory stays small.
        del trajectory.verdict.tests[:]
        trajectory.reward = reward_of(verdict, reward)
        trajectory.hops.add(service=SERVICE, at_unix_ms=int(time.time() * 1000))
