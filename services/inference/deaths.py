"""What engines died of: a request, version or model that kills them is done alone, and refused in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.inference import redis_keys as own_keys
from spo.errors import NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.work_deaths import WorkDeaths, last_line
from spo.v1.prompt_pb2 import PromptGroup

# What the library raises of what a folder is made of; an engine that dies of its device raises others.
HOPELESS_ERRORS = (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, AssertionError)


class EngineDeaths(WorkDeaths):
    """The notes of all inference replicas."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client, own_keys.engine_deaths, "the engine", code="kills_engine")

    @contextmanager
    def building(self, work: str) -> Iterator[None]:
        """As `during`; a model that vLLM does not know, or whose tensors do not fit, is refused from then on."""
        with self.during(work, ends_process=True):
            try:
                yield
            except HOPELESS_ERRORS as error:
                # For want of memory it may go better the next time.
                if "memory" not in str(error).lower():
                    self.give_up(work, error)
                raise


def engine_failed(error: Exception) -> NotReady:
    """What the groups in an engine fail with that died: it is tried again, and found out which one it was."""
    return NotReady(f"the engine of this replica failed: {last_line(error)}", code="engine_failed")


def sampling_of(group: PromptGroup) -> str:
    """The work of sampling a group, by name."""
    return f"group {group.group_id} of run {group.run_id}"
