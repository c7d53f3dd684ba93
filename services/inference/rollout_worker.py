"""From the stream of prompts through the engine to the stream of rollouts, many groups at once to keep batches full.

A group's entry is acknowledged in the same step that writes its rollouts, so a replica that dies loses nothing: its
entries are no longer kept alive, and another replica claims them.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

import redis
from google.protobuf.message import DecodeError

from services.inference.replica import ServingReplica
from services.inference.rollouts import StartedGroup, start_group
from services.inference.settings import Settings
from spo import redis_keys
from spo.errors import SpoError
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import Consumer, Entry
from spo.observability import tracing
from spo.observability.logs import get_logger
from spo.v1.prompt_pb2 import PromptGroup

log = get_logger("rollouts")

BLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class InFlightGroup:
    """A stream entry and the group that the engine samples for it."""

    consumer: Consumer
    entry: Entry
    started: StartedGroup
    span: tracing.Span


class RolloutWorker:
    """Two loops: `read` takes prompts, `forward` passes finished groups to the judges."""

    def __init__(self, client: RedisClient, replica: ServingReplica, replica_id: str, settings: Settings) -> None:
        self._client = client
        self._replica = replica
        self._replica_id = replica_id
        self._settings = settings
        self._in_flight: dict[str, InFlightGroup] = {}
        self._lock = threading.Lock()
        self._room = threading.Event()
        self._finished: queue.SimpleQueue[InFlightGroup] = queue.SimpleQueue()

    def read(self, stop: threading.Event) -> None:
        """Take prompt groups of the assigned run until stop, at most `groups_in_flight` at once."""
        consumer: Consumer | None = None
        while not stop.is_set():
            assignment = self._replica.current()
            if assignment is None:
                stop.wait(BLOCK_SECONDS / 4)
                continue
            if consumer is None or consumer.stream != redis_keys.prompts(assignment.run_id):
                consumer = self._consumer(assignment.run_id)
            self._room.clear()
            room = self._settings.groups_in_flight - len(self._in_flight)
            if room <= 0:
                self._room.wait(BLOCK_SECONDS)
                continue
            try:
                entries = consumer.read(room, BLOCK_SECONDS)
            except redis.RedisError as error:
                log.warning("cannot read prompts; trying again", reason=str(error))
                # A server that came back empty has no consumer group: a new consumer makes it.
                consumer = None
                stop.wait(BLOCK_SECONDS)
                continue
            for entry in entries:
                self._start(consumer, entry)

    def forward(self, stop: threading.Event) -> None:
        """Forward finished groups; after stop, go on for drain_seconds with those that are in flight."""
        keep_alive_seconds = self._settings.reclaim_after_seconds / 4
        next_keep_alive = time.monotonic() + keep_alive_seconds
        deadline = float("inf")
        while time.monotonic() < deadline:
            if stop.is_set():
                deadline = min(deadline, time.monotonic() + self._settings.drain_seconds)
                if not self._in_flight:
                    return
            if time.monotonic() >= next_keep_alive:
                self._keep_alive()
                next_keep_alive = time.monotonic() + keep_alive_seconds
            try:
                group = self._finished.get(timeout=min(BLOCK_SECONDS, keep_alive_seconds))
            except queue.Empty:
                continue
            self._finish(group)
        log.warning("drain time is over; unfinished groups are left to other replicas", groups=len(self._in_flight))

    def _consumer(self, run_id: str) -> Consumer:
        return Consumer(
            self._client,
            redis_keys.prompts(run_id),
            redis_keys.INFERENCE_GROUP,
            self._replica_id,
            reclaim_after_seconds=self._settings.reclaim_after_seconds,
        )

    def _start(self, consumer: Consumer, entry: Entry) -> None:
        if entry.entry_id in self._in_flight:
            return
        try:
            started = start_group(self._replica, PromptGroup.FromString(entry.payload))
        except DecodeError as error:
            consumer.dead_letter(entry, f"not a PromptGroup: {error}")
            return
        except SpoError as error:
            self._give_up(consumer, entry, error)
            return
        span = _span(entry, started)
        group = InFlightGroup(consumer, entry, started, span)
        with self._lock:
            self._in_flight[entry.entry_id] = group
        started.future.add_done_callback(lambda _: self._finished.put(group))

    def _finish(self, group: InFlightGroup) -> None:
        try:
            rollouts = group.started.result(timeout_seconds=0)
            group.span.note(tokens=sum(len(trajectory.response_token_ids) for trajectory in rollouts.trajectories))
            group.consumer.forward(
                group.entry,
                redis_keys.rollouts(),
                rollouts.SerializeToString(),
                group.span.header,
                run_id=rollouts.request.run_id,
            )
            group.span.end()
        except redis.RedisError as error:
            log.warning("cannot write rollouts; trying again", reason=str(error))
            time.sleep(BLOCK_SECONDS)
            self._finished.put(group)
            return
        except SpoError as error:
            group.span.end(error.code)
            self._give_up(group.consumer, group.entry, error)
        with self._lock:
            del self._in_flight[group.entry.entry_id]
        self._room.set()

    def _give_up(self, consumer: Consumer, entry: Entry, error: SpoError) -> None:
        """Dead-letter what can never work; leave the rest pending, to be delivered again."""
        # It was read just before this replica was assigned to another run: that run's next replica claims it.
        if error.retryable or error.code == "other_run":
            log.warning("group left for redelivery", entry=entry.entry_id, reason=str(error))
        else:
            consumer.dead_letter(entry, str(error))

    def _keep_alive(self) -> None:
        with self._lock:
            groups = list(self._in_flight.values())
        for consumer in {id(group.consumer): group.consumer for group in groups}.values():
            try:
                consumer.keep_alive([group.entry for group in groups if group.consumer is consumer])
            except redis.RedisError as error:
                log.warning("keep-alive failed; will try again", reason=str(error))


def _span(entry: Entry, started: StartedGroup) -> tracing.Span:
    group = started.request
    if not entry.trace:
        return tracing.Span()
    return tracing.begin(
        "sample", parent=entry.trace, kind="CONSUMER", run=group.run_id, group=group.group_id, delivery=entry.deliveries
    )
