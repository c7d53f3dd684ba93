"""Reads judged groups from the stream, adds the reference log-probs, inserts the trajectories, then acknowledges."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import redis
from google.protobuf.message import DecodeError

from services.replay_buffer.admission import check_judged, check_live, check_scored, split_by
from services.replay_buffer.anchors import brings_logprobs, note_anchors
from services.replay_buffer.reference_scores import ReferenceScores, note_hop
from services.replay_buffer.store import ReplayStore
from spo.errors import InvalidInput, SpoError
from spo.messaging.connection import as_spo_error, refuses_writes
from spo.messaging.streams import Consumer, Entry, RunLanes
from spo.observability import metrics, tracing
from spo.observability.logs import get_logger
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory

log = get_logger("ingest")

FULL_PAUSE_SECONDS = 0.5
LOG_SECONDS = 10.0
SCORE_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class JudgedGroup:
    """An entry of the stream, and what it holds."""

    entry: Entry
    group: RolloutGroup
    spans: Sequence[tracing.Span]


@dataclass
class IngestWorker:
    """One consumer of the stream `verdicts`."""

    store: ReplayStore
    consumer: Consumer
    scores: ReferenceScores
    groups_per_read: int
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, stop: threading.Event) -> None:
        """Ingest until stop is set, each run by itself; whatever fails stays pending and is tried again."""
        self._stop = stop
        RunLanes(self.consumer, self.ingest, count=self.groups_per_read).run(stop)

    def ingest(self, entries: list[Entry]) -> None:
        """Insert the groups of these entries and acknowledge them.

        Raises InvalidInput when some trajectories are refused, after the valid ones of all entries are inserted:
        the entries are then tried one by one, and those that fail alone become dead letters with the reason. Groups of
        one run are inserted, and fail, without those of another.
        """
        by_run: dict[str, list[JudgedGroup]] = defaultdict(list)
        for entry in entries:
            group = _decode(entry.payload)
            by_run[group.request.run_id].append(JudgedGroup(entry, group, _spans(entry, group)))
        failures = [failure for run_id, groups in by_run.items() for failure in self._ingest_run(run_id, groups)]
        if failures:
            raise failures[0]

    def _ingest_run(self, run_id: str, groups: Sequence[JudgedGroup]) -> Sequence[SpoError]:
        """Insert groups of one run and acknowledge them; returns why that failed."""
        trajectories = [trajectory for judged in groups for trajectory in judged.group.trajectories]
        spans = [span for judged in groups for span in judged.spans]
        try:
            refusals = self._insert(run_id, trajectories, spans)
        except SpoError as failure:
            return [failure]
        if not refusals:
            self.consumer.finish([judged.entry for judged in groups])
            for span in spans:
                span.end()
        return refusals

    def _insert(
        self, run_id: str, trajectories: Sequence[Trajectory], spans: Sequence[tracing.Span]
    ) -> list[InvalidInput]:
        """Score and insert the valid trajectories; returns why the others are refused."""
        spec = self.store.spec(run_id)
        prompts = self.store.known_prompts(run_id, [trajectory.prompt_id for trajectory in trajectories])

        def check(trajectory: Trajectory) -> None:
            check_judged(run_id, spec, trajectory)
            check_live(spec, prompts, trajectory)

        judged, refusals = split_by(check, trajectories)
        note_anchors(spec, judged)
        unscored = [trajectory for trajectory in judged if not brings_logprobs(trajectory)]
        if spec.trainer.reference == "cached" and unscored:
            self._score(run_id, unscored, spans)
        note_hop(judged)
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
        """Add the reference log-probs.

        Every group gets a span of that length; the calls themselves are traced in the first one. While value-estimation
        is away this waits a little: the entries are then tried again later, and the job says what it waits for.
        """
        scoring = [tracing.begin("reference log-probs", parent=span.header, groups=len(spans)) for span in spans]
        with tracing.within(scoring[0]) if scoring else nullcontext():
            self.scores.add(run_id, trajectories, patience_seconds=SCORE_PATIENCE_SECONDS, stop=self._stop)
        for span in scoring:
            span.end()


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
