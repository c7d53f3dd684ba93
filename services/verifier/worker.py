"""The verifiers' place in the pipeline: they read the rollouts whose prompts name them, so slow ones stall no judge."""

from __future__ import annotations

from services.verifier.guarded_post import ServiceFailed
from services.verifier.scheduler import VerifierScheduler
from services.verifier.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import Consumer
from spo.service.judge_stage import JudgedEntry, JudgeStage


class VerifierWorker(JudgeStage):
    """Scores rollout groups from the stream; call it with a stop event."""

    def __init__(
        self, client: RedisClient, scheduler: VerifierScheduler, consumer_name: str, settings: Settings
    ) -> None:
        stream, group = redis_keys.verifier_rollouts(), redis_keys.VERIFIER_GROUP
        consumer = Consumer(client, stream, group, consumer_name, settings.reclaim_seconds)
        super().__init__("verifier", consumer, scheduler, settings.stream_groups)
        self.most_failures = settings.group_failures

    def _forward(self, judged: JudgedEntry) -> None:
        """What a service that is there fails on time after time is set aside with its reason, and others go on."""
        try:
            super()._forward(judged)
        except ServiceFailed as error:
            failures = self.consumer.failures(judged.entry) + 1
            if failures < self.most_failures:
                raise
            raise InvalidInput(f"failed {failures} times: {error.message}", code=error.code) from error
