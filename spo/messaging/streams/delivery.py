"""The loop of a stream's worker: reads entries, gives them to a handler, and keeps one failure from becoming many."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import redis

from spo.errors import NotFound
from spo.messaging.streams.consumer import Consumer
from spo.messaging.streams.entries import Entry

Handler = Callable[[list[Entry]], None]

# After so many failures in a row of entries on their own it is not the entries.
OUTAGE_AFTER_FAILURES = 3


def consume(
    consumer: Consumer,
    handler: Handler,
    stop: threading.Event,
    *,
    count: int = 16,
    block_seconds: float = 1.0,
    retry_seconds: float = 1.0,
) -> None:
    """Feed batches of entries to handler until stop is set.

    The handler finishes entries itself (forward or finish) and may let an error decide on one (`Consumer.fail`), so
    that the others of its batch go on. When it raises, what it left unfinished is handled again one by one: each entry
    that fails on its own is failed by itself, and the others are finished. An entry whose holders vanished comes alone,
    while no other thread of the process handles any.
    """
    while not stop.is_set():
        try:
            entries = consumer.read(count, block_seconds)
        except (redis.RedisError, NotFound):
            # The consumer has said what it was.
            stop.wait(retry_seconds)
            continue
        try:
            deliver(consumer, handler, entries)
        except redis.RedisError as error:
            consumer.interrupted(entries, error)
            stop.wait(retry_seconds)


def deliver(consumer: Consumer, handler: Handler, entries: Sequence[Entry]) -> None:
    """Handle entries that were read. Raises redis.RedisError where Redis did not take the outcome."""
    if not entries:
        return
    if entries[0].alone:
        entry = entries[0]
        with consumer.holder.alone(while_waiting=lambda: consumer.keep_alive([entry])):
            if consumer.begin_alone(entry):
                _attempt(consumer, handler, entry)
        return
    with consumer.holder.among_others():
        failed_before = [entry for entry in entries if consumer.failures(entry)]
        fresh = [entry for entry in entries if not consumer.failures(entry)]
        if len(fresh) == 1:
            _attempt(consumer, handler, fresh[0])
        elif fresh:
            _together(consumer, handler, fresh)
        _one_by_one(consumer, handler, failed_before)


def _together(consumer: Consumer, handler: Handler, entries: list[Entry]) -> None:
    try:
        handler(entries)
    except redis.RedisError:
        raise
    except Exception:
        # Which of them it was shows when each is on its own, and so does the error.
        _one_by_one(consumer, handler, consumer.unfinished(entries))


def _one_by_one(consumer: Consumer, handler: Handler, entries: Sequence[Entry]) -> None:
    # In another order each time: an outage that is taken for granted early never hides the same entries twice.
    order = random.sample(entries, len(entries))
    failures = 0
    for at, entry in enumerate(order):
        failures = 0 if _attempt(consumer, handler, entry) else failures + 1
        if failures == OUTAGE_AFTER_FAILURES:
            consumer.release(order[at + 1 :], after_seconds=1.0)
            return


def _attempt(consumer: Consumer, handler: Handler, entry: Entry) -> bool:
    """Whether the entry was finished, in whatever way, or given back by its handler."""
    before = consumer.failures(entry)
    with consumer.isolated(entry):
        handler([entry])
    return consumer.failures(entry) <= before
