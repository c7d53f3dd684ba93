"""Several entries of a stream at once, one thread each, so that engine and judge overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable

import redis

from services.value_estimation.settings import Settings
from spo import redis_keys
from spo.service import keep_alive_while
from spo.streams import Consumer, Entry, consume


def work_through(
    client: redis.Redis,
    stream: str,
    name: str,
    settings: Settings,
    do: Callable[[bytes], None],
    stop: threading.Event,
) -> None:
    """Do what the stream's entries ask until stop; an entry is finished when `do` returns, kept alive until then."""
    threads = [
        threading.Thread(
            target=_work, args=(client, stream, f"{name}-{number}", settings, do, stop), name=f"{name}-{number}"
        )
        for number in range(settings.prompts_in_hand)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join()


def _work(
    client: redis.Redis, stream: str, name: str, settings: Settings, do: Callable[[bytes], None], stop: threading.Event
) -> None:
    consumer = Consumer(client, stream, redis_keys.VALUE_GROUP, name, settings.reclaim_seconds)

    def finish(entries: list[Entry]) -> None:
        with keep_alive_while(lambda: consumer.keep_alive(entries), settings.reclaim_seconds / 4):
            for entry in entries:
                do(entry.payload)
            consumer.finish(entries)

    consume(consumer, finish, stop, count=1)
