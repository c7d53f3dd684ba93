"""The answer to a heartbeat: the run that an inference replica is to serve, its model, and its weight version."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from services.orchestrator.jobs import JobStore
from services.orchestrator.replicas import HEARTBEAT_SECONDS, GroupsInHand, ReplicaAssigner, announced_version
from spo.messaging.redis_client import only_this_job
from spo.v1 import orchestrator_service_pb2 as wire

# Replicas learn of new weights from the run's stream, so an answer may be this old.
LOOK_SECONDS = 0.5
# With more heartbeats a second than this, replicas are asked to send them less often; two lost ones still drop nobody.
BEATS_PER_SECOND = 200
_ALONE = wire.HeartbeatResponse(next_heartbeat_seconds=HEARTBEAT_SECONDS).SerializeToString()


@dataclass(frozen=True)
class _Snapshot:
    """A snapshot of Redis: every replica's assignment and the answer for every run."""

    at: float = float("-inf")
    assignments: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)


class HeartbeatResponder:
    """Answers from one snapshot all replicas whose assignment is unchanged; only a change is read from Redis anew."""

    def __init__(self, jobs: JobStore, assigner: ReplicaAssigner, in_hand: GroupsInHand) -> None:
        self.in_hand = in_hand
        self.jobs = jobs
        self.assigner = assigner
        self._lock = threading.Lock()
        self._snapshot = _Snapshot()

    def answer(self, request: wire.HeartbeatRequest) -> bytes:
        """The HeartbeatResponse, serialized."""
        if request.pool != "inference":
            return _ALONE
        if request.run_id:
            snapshot = self._latest()
            answer = snapshot.answers.get(request.run_id)
            if answer is not None and snapshot.assignments.get(request.replica_id) == request.run_id:
                return answer
        return self._answer_for(self.assigner.run_of(request.replica_id))

    def _latest(self) -> _Snapshot:
        snapshot = self._snapshot
        # While another thread reads Redis, the older snapshot does: no heartbeat waits for another's read.
        if time.monotonic() - snapshot.at > LOOK_SECONDS and self._lock.acquire(blocking=False):
            try:
                at = time.monotonic()
                assignments = self.assigner.assignments()
                pause = self._pause_seconds(len(assignments))
                answers: dict[str, bytes] = {}
                for run_id in self.assigner.wanted():
                    with only_this_job():
                        answers[run_id] = self._answer_for(run_id, pause)
                self._snapshot = snapshot = _Snapshot(at, assignments, answers)
            finally:
                self._lock.release()
        return snapshot

    def _pause_seconds(self, replicas: int) -> float:
        seldom = min(replicas / BEATS_PER_SECOND, self.assigner.replicas.silence_seconds / 3)
        return max(HEARTBEAT_SECONDS, seldom)

    def _answer_for(self, run_id: str, pause_seconds: float = HEARTBEAT_SECONDS) -> bytes:
        response = wire.HeartbeatResponse(next_heartbeat_seconds=pause_seconds)
        if run_id:
            response.run_id = run_id
            response.groups_in_hand = self.in_hand.of(run_id)
            response.model_path = self.jobs.spec(run_id).model.path
            announced = announced_version(self.jobs, run_id)
            if announced is not None:
                response.weights.CopyFrom(announced)
        return response.SerializeToString()
