"""What engines died of: a request, version or model that kills them is done alone, and refused in the end."""

from __future__ import annotations

from services.inference import redis_keys as own_keys
from spo.errors import NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.work_deaths import WorkDeaths, last_line
from spo.v1.prompt_pb2 import PromptGroup


class EngineDeaths(WorkDeaths):
    """The notes of all inference replicas."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client, own_keys.engine_deaths, "the engine", code="kills_engine")


def engine_failed(error: Exception) -> NotReady:
    """What the groups in an engine fail with that died: it is tried again, and found out which one it was."""
    return NotReady(f"the engine of this replica failed: {last_line(error)}", code="engine_failed")


def sampling_of(group: PromptGroup) -> str:
    """The work of sampling a group, by name."""
    return f"group {group.group_id} of run {group.run_id}"
