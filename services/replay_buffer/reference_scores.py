"""Reference log-probs: log pi0 of the response tokens, computed by value-estimation."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spo.rpc.client import RpcClient
from spo.rpc.message_sizes import chunks_by_bytes
from spo.v1.trajectory_pb2 import Hop, Trajectory
from spo.v1.value_service_pb2 import (
    ComputeReferenceLogprobsRequest,
    ComputeReferenceLogprobsResponse,
    TokenSequence,
)
from spo.v1.value_service_pb2_grpc import ValueServiceStub


@dataclass(frozen=True)
class ReferenceScores:
    """Asks value-estimation for log-probs; deadline_seconds is that of one call."""

    values: RpcClient
    deadline_seconds: float

    @staticmethod
    def at(address: str, deadline_seconds: float) -> ReferenceScores:
        """The client of the service at an address."""
        return ReferenceScores(RpcClient("value-estimation", address, ValueServiceStub), deadline_seconds)

    def add(
        self, run_id: str, trajectories: Sequence[Trajectory], *, patience_seconds: float, stop: threading.Event
    ) -> None:
        """Write reference log-probs (nats) and the reference's hash into the trajectories, in calls cut by bytes.

        Raises SpoError when value-estimation refuses them, or stays away for longer than patience_seconds.
        """
        # Tokens go there and log-probs come back: four bytes or fewer each.
        sizes = [4 * (len(each.prompt_token_ids) + 2 * len(each.response_token_ids)) for each in trajectories]
        for chunk in chunks_by_bytes(sizes):
            self._add(run_id, trajectories[chunk], patience_seconds, stop)

    def _add(
        self, run_id: str, trajectories: Sequence[Trajectory], patience_seconds: float, stop: threading.Event
    ) -> None:
        request = ComputeReferenceLogprobsRequest(
            run_id=run_id,
            sequences=[
                TokenSequence(
                    prompt_token_ids=trajectory.prompt_token_ids,
                    response_token_ids=trajectory.response_token_ids,
                    segments=trajectory.segments,
                )
                for trajectory in trajectories
            ],
        )
        response: ComputeReferenceLogprobsResponse = self.values.call_patiently(
            "ComputeReferenceLogprobs", request, self.deadline_seconds, patience_seconds=patience_seconds, stop=stop
        )
        for trajectory, scored in zip(trajectories, response.sequences, strict=True):
            trajectory.reference_logprobs[:] = scored.logprobs
            trajectory.reference_hash = response.reference_hash


def note_hop(trajectories: Sequence[Trajectory]) -> None:
    """Add the replay buffer and the time to the trajectories' hops."""
    now = int(time.time() * 1000)
    for trajectory in trajectories:
        trajectory.hops.append(Hop(service="replay-buffer", at_unix_ms=now))
