"""Workers on the entries of a stream: each run has threads of its own, so that sampling and judging overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from services.value_estimation.settings import Settings
from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import run_state
from spo.messaging.streams import Consumer, Entry, RunLanes
from spo.spec.job_state import WANTED

Request = TypeVar("Request", bound=Message)


def is_wanted(client: RedisClient, run_id: str) -> bool:
    """Whether the run may still use the results of its requests."""
    return run_state(client, run_id) in WANTED


def decoded(kind: type[Request], payload: bytes) -> Request:
    """The request that an entry holds. Raises InvalidInput."""
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"not a {kind.__name__}: {error}", code="malformed_entry") from None


def work_through(
    client: RedisClient,
    stream: str,
    name: str,
    settings: Settings,
    process: Callable[[bytes], bytes | None],
    stop: threading.Event,
) -> None:
    """Call `process` with the payload of each of the stream's entries until stop, so many of each run at once.

    An entry is kept alive until `process` returns. None finishes it; a payload goes to the end of the stream instead.
    """
    consumer = Consumer(client, stream, redis_keys.VALUE_GROUP, name, settings.reclaim_seconds)

    def finish(entries: list[Entry]) -> None:
        for entry in entries:
            remaining = process(entry.payload)
            if remaining is None:
                consumer.finish([entry])
            else:
                consumer.forward(entry, stream, remaining)

    RunLanes(consumer, finish, threads=settings.prompts_in_flight).run(stop)
