"""The verifiers' place in the pipeline: they read the rollouts whose prompts name them, so slow ones stall no judge."""

from __future__ import annotations

from collections.abc import Sequence

from services.verifier.guarded_post import ServiceFailed
from services.verifier.scheduler import VerifierScheduler
from services.verifier.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import Consumer
from spo.service.judge_stage import AwaitedVerdicts, JudgedEntry, JudgeStage
from spo.v1.judge_service_pb2 import Priority
from spo.v1.trajectory_pb2 import RolloutGroup


class VerifierWorker(JudgeStage):
    """Scores rollout groups from the stream; call it with a stop event."""

    def __init__(
        self, client: RedisClient, scheduler: VerifierScheduler, consumer_name: str, settings: Settings
    ) -> None:
        stream, group = redis_keys.verifier_rollouts(), redis_keys.VERIFIER_GROUP
        consumer = Consumer(client, stream, group, consumer_name, settings.reclaim_seconds)
        super().__init__("verifier", consumer, scheduler, settings.stream_groups)
        self._verifiers = scheduler
        self.most_failures = settings.group_failures

    def _decide(self, group: RolloutGroup, programs: Sequence[str]) -> AwaitedVerdicts:
        """By the pi0 of the group's run, where that is the judge."""
        prompt, run_id = group.request.prompt, group.request.run_id
        return self._verifiers.submit(
            programs, prompt.language, prompt.tests_digest, Priority.PRIORITY_TRAINING, run_id=run_id
        )

    def _forward(self, judged: JudgedEntry) -> None:
        """What a service that is there fails on time after time is set aside with its reason, and others go on."""
        try:
            super()._forward(judged)
        except ServiceFailed as error:
            failures = self.consumer.failures(judged.entry) + 1
            if failures < self.most_failures:
                raise
            raise InvalidInput(f"failed {failures} times: {error.message}", code=error.code) from error
