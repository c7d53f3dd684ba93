"""Takes judged groups off the belt, adds the reference log-probs and enters them, then acknowledges."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from services.replay_buffer.store import ReplayStore
from spo.errors import InvalidInput
from spo.rpc import Client
from spo.service import keep_alive_while
from spo.streams import Consumer, Entry, consume
from spo.v1.trajectory_pb2 import Hop, RolloutGroup, Trajectory
from spo.v1.value_service_pb2 import (
    ComputeReferenceLogprobsRequest,
    ComputeReferenceLogprobsResponse,
    TokenSequence,
)


@dataclass
class IngestWorker:
    """One consumer of the stream `verdicts`."""

    store: ReplayStore
    consumer: Consumer
    values: Client
    groups_per_read: int
    deadline_seconds: float

    def run(self, stop: threading.Event) -> None:
        """Ingest until stop is set; whatever fails stays pending and is tried again."""
        consume(self.consumer, self.ingest, stop, count=self.groups_per_read)

    def ingest(self, entries: list[Entry]) -> None:
        """Enter the groups of these entries. Raises InvalidInput when one of them is poison, NotReady to try again."""
        with keep_alive_while(lambda: self.consumer.keep_alive(entries), self.consumer.reclaim_after_seconds / 4):
            by_run: dict[str, list[Trajectory]] = defaultdict(list)
            for entry in entries:
                group = _decode(entry.payload)
                by_run[group.request.run_id] += group.trajectories
            for run_id, trajectories in by_run.items():
                self.add_reference_logprobs(run_id, trajectories)
                self.store.append(run_id, trajectories)
            self.consumer.finish(entries)

    def add_reference_logprobs(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Ask value-estimation for log pi0 of every response token, all trajectories in one call."""
        self.store.spec(run_id)
        request = ComputeReferenceLogprobsRequest(
            run_id=run_id,
            sequences=[
                TokenSequence(prompt_token_ids=each.prompt_token_ids, response_token_ids=each.response_token_ids)
                for each in trajectories
            ],
        )
        response: ComputeReferenceLogprobsResponse = self.values.call(
            "ComputeReferenceLogprobs", request, deadline_seconds=self.deadline_seconds
        )
        now = int(time.time() * 1000)
        for trajectory, scored in zip(trajectories, response.sequences, strict=True):
            trajectory.reference_logprobs[:] = scored.logprobs
            trajectory.reference_hash = response.reference_hash
            trajectory.hops.append(Hop(service="replay-buffer", at_unix_ms=now))


def _decode(payload: bytes) -> RolloutGroup:
    try:
        return RolloutGroup.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"not a RolloutGroup: {error}", code="malformed_entry") from None
