"""Reads judged groups from the stream, adds the reference log-probs, inserts the trajectories, then acknowledges."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

import redis
from google.protobuf.message import DecodeError

from services.replay_buffer.admission import check_judged, check_scored, split_by
from services.replay_buffer.reference_scores import ReferenceScores, note_hop
from services.replay_buffer.store import ReplayStore
from spo.errors import InvalidInput
from spo.messaging.connection import as_spo_error, refuses_writes
from spo.messaging.streams import Consumer, Entry, consume
from spo.observability import metrics, tracing
from spo.observability.logs import get_logger
from spo.service.process import keep_alive_while
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory

log = get_logger("ingest")

FULL_PAUSE_SECONDS = 0.5
LOG_SECONDS = 10.0


@dataclass
class IngestWorker:
    """One consumer of the stream `verdicts`."""

    store: ReplayStore
    consumer: Consumer
    scores: ReferenceScores
    groups_per_read: int
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, stop: threading.Event) -> None:
        """Ingest until stop is set; whatever fails stays pending and is tried again."""
        self._stop = stop
        consume(self.consumer, self.ingest, stop, count=self.groups_per_read)

    def ingest(self, entries: list[Entry]) -> None:
        """Insert the groups of these entries and acknowledge them.

        Raises InvalidInput when some trajectories are refused, after the valid ones of all entries are inserted:
        `consume` then retries the entries one by one, and those that fail alone become dead letters with the reason.
        """
        with keep_alive_while(lambda: self.consumer.keep_alive(entries), self.consumer.reclaim_after_seconds / 4):
            by_run: dict[str, list[Trajectory]] = defaultdict(list)
            spans: dict[str, list[tracing.Span]] = defaultdict(list)
            for entry in entries:
                group = _decode(entry.payload)
                by_run[group.request.run_id] += group.trajectories
                spans[group.request.run_id] += _spans(entry, group)
            refusals = [
                refusal
                for run_id, trajectories in by_run.items()
                for refusal in self._insert(run_id, trajectories, spans[run_id])
            ]
            if refusals:
                raise refusals[0]
            self.consumer.finish(entries)
            for span in chain.from_iterable(spans.values()):
                span.end()

    def _insert(
        self, run_id: str, trajectories: Sequence[Trajectory], spans: Sequence[tracing.Span]
    ) -> list[InvalidInput]:
        """Score and insert the valid trajectories; returns why the others are refused."""
        spec = self.store.spec(run_id)
        judged, refusals = split_by(lambda trajectory: check_judged(run_id, spec, trajectory), trajectories)
        if spec.trainer.reference == "cached" and judged:
            self._score(run_id, judged, spans)
        scored, more_refusals = split_by(lambda trajectory: check_scored(spec, trajectory), judged)
        self._insert_patiently(run_id, scored)
        metrics.REPLAY_INSERTS.labels(result="refused").inc(len(refusals + more_refusals))
        return refusals + more_refusals

    def _insert_patiently(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Insert them; while Redis is full, wait and log: a redelivered entry would find it just as full."""
        log_next = 0.0
        while True:
            try:
                self.store.insert(run_id, trajectories)
                return
            except redis.ResponseError as error:
                if not refuses_writes(error):
                    raise
                if time.monotonic() >= log_next:
                    log_next = time.monotonic() + LOG_SECONDS
                    log.error(
                        "judged groups wait: Redis is full and refuses writes", run=run_id, reason=str(error)[:300]
                    )
                if self._stop.wait(FULL_PAUSE_SECONDS):
                    raise as_spo_error(error) from None

    def _score(self, run_id: str, trajectories: Sequence[Trajectory], spans: Sequence[tracing.Span]) -> None:
        """Add the reference log-probs, all in one call.

        Every group gets a span of that length; the call itself is traced in the first one.

        While value-estimation is away this waits: the entries are kept alive, the stream fills up behind them, and the
        dispatcher stops. Leaving them to be redelivered instead would use up their deliveries.
        """
        scoring = [tracing.begin("reference log-probs", parent=span.header, groups=len(spans)) for span in spans]
        with tracing.within(scoring[0]) if scoring else nullcontext():
            self.scores.add(run_id, trajectories, patience_seconds=math.inf, stop=self._stop)
        for span in scoring:
            span.end()
        note_hop(trajectories)


def _decode(payload: bytes) -> RolloutGroup:
    try:
        return RolloutGroup.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"not a RolloutGroup: {error}", code="malformed_entry") from None


def _spans(entry: Entry, group: RolloutGroup) -> list[tracing.Span]:
    if not entry.trace:
        return []
    begun = tracing.begin("ingest", parent=entry.trace, kind="CONSUMER")
    begun.note(run=group.request.run_id, group=group.request.group_id, trajectories=len(group.trajectories))
    return [begun]
