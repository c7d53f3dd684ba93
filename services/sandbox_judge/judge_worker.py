"""The sandbox judge's place in the pipeline: it reads the rollouts whose prompts name no pool of verifiers."""

from __future__ import annotations

from services.sandbox_judge.scheduler import JudgeScheduler
from services.sandbox_judge.settings import Settings
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import Consumer
from spo.service.judge_stage import JudgeStage


class JudgeWorker(JudgeStage):
    """Judges rollout groups from the stream; call it with a stop event."""

    def __init__(self, client: RedisClient, scheduler: JudgeScheduler, consumer_name: str, settings: Settings) -> None:
        stream, group = redis_keys.rollouts(), redis_keys.JUDGE_GROUP
        consumer = Consumer(client, stream, group, consumer_name, settings.reclaim_seconds)
        super().__init__("sandbox-judge", consumer, scheduler, settings.stream_groups)
