"""Reference log-probs: log pi0 of the response tokens, computed by value-estimation."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spo.errors import NotReady
from spo.rpc.client import RpcClient, UnknownMethod
from spo.rpc.message_sizes import chunks_by_bytes
from spo.v1.trajectory_pb2 import Hop, Trajectory
from spo.v1.value_service_pb2 import (
    ComputeReferenceLogprobsRequest,
    ComputeReferenceLogprobsResponse,
    ReferenceLogprobsPart,
    TokenSequence,
)
from spo.v1.value_service_pb2_grpc import ValueServiceStub


@dataclass(frozen=True)
class ReferenceScores:
    """Asks value-estimation for log-probs; deadline_seconds: how long a call lives without a sign of life."""

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

        What one call has found stays when it breaks off: the next asks for the rest. Raises SpoError when
        value-estimation refuses them, or gives no sign of life for longer than patience_seconds.
        """
        # Tokens go there and log-probs come back: four bytes or fewer each.
        sizes = [4 * (len(each.prompt_token_ids) + 2 * len(each.response_token_ids)) for each in trajectories]
        for chunk in chunks_by_bytes(sizes):
            asked = _AskedLogprobs(self, run_id, trajectories[chunk], stop)
            self.values.patiently(
                asked.attempt,
                patience_seconds=patience_seconds,
                stop=stop,
                signs=lambda asked=asked: asked.signs,  # type: ignore[misc]
            )


class _AskedLogprobs:
    """The log-probs of some trajectories, over several attempts."""

    def __init__(
        self, scores: ReferenceScores, run_id: str, trajectories: Sequence[Trajectory], stop: threading.Event
    ) -> None:
        self.signs = 0
        self._scores = scores
        self._run_id = run_id
        self._left = list(trajectories)
        self._stop = stop

    def attempt(self) -> None:
        """Ask for what is left. Raises what `RpcClient.parts` raises."""
        request = ComputeReferenceLogprobsRequest(
            run_id=self._run_id,
            sequences=[
                TokenSequence(
                    prompt_token_ids=each.prompt_token_ids,
                    response_token_ids=each.response_token_ids,
                    segments=each.segments,
                )
                for each in self._left
            ],
        )
        asked, done = self._left, set[int]()
        try:
            self._note(asked, done, request)
        finally:
            self._left = [each for place, each in enumerate(asked) if place not in done]
        if self._left:
            raise NotReady("value-estimation did not answer with every sequence")

    def _note(self, asked: Sequence[Trajectory], done: set[int], request: ComputeReferenceLogprobsRequest) -> None:
        values, silent = self._scores.values, self._scores.deadline_seconds
        try:
            part: ReferenceLogprobsPart
            for part in values.parts("ReferenceLogprobsParts", request, self._is_wanted, silent):
                self.signs += 1
                for scored in part.scored:
                    _write(asked[scored.index], scored.logprobs, part.reference_hash)
                    done.add(scored.index)
        except UnknownMethod:
            whole = values.call_while(
                "ComputeReferenceLogprobs", request, self._is_wanted, ComputeReferenceLogprobsResponse
            )
            for place, (trajectory, found) in enumerate(zip(asked, whole.sequences, strict=True)):
                _write(trajectory, found.logprobs, whole.reference_hash)
                done.add(place)

    def _is_wanted(self) -> bool:
        return not self._stop.is_set()


def _write(trajectory: Trajectory, logprobs: Sequence[float], reference_hash: str) -> None:
    trajectory.reference_logprobs[:] = logprobs
    trajectory.reference_hash = reference_hash


def note_hop(trajectories: Sequence[Trajectory]) -> None:
    """Add the replay buffer and the time to the trajectories' hops."""
    now = int(time.time() * 1000)
    for trajectory in trajectories:
        trajectory.hops.append(Hop(service="replay-buffer", at_unix_ms=now))
