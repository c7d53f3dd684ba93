"""What a heartbeat is answered: the run an inference replica is to serve, its model, and the weights to be at."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.registry import HEARTBEAT_SECONDS
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo.v1 import orchestrator_service_pb2 as wire

# Replicas ask every HEARTBEAT_SECONDS and learn of new weights from the run's stream: none is later for it.
LOOK_SECONDS = 0.5
# More of them in a second are asked to come less often, as long as two lost ones make nobody silent.
BEATS_PER_SECOND = 200
_ALONE = wire.HeartbeatResponse(next_heartbeat_seconds=HEARTBEAT_SECONDS).SerializeToString()


@dataclass(frozen=True)
class _Look:
    """Everybody's assignment and each run's answer, as Redis had them at a time."""

    at: float = float("-inf")
    assignments: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)


class HeartbeatResponder:
    """One look at Redis answers all replicas that go on as they were told; news are read for the asker alone."""

    def __init__(self, jobs: JobStore, assigner: ReplicaAssigner, weights: WeightAnnouncements) -> None:
        self.jobs = jobs
        self.assigner = assigner
        self.weights = weights
        self._lock = threading.Lock()
        self._look = _Look()

    def answer(self, request: wire.HeartbeatRequest) -> bytes:
        """The HeartbeatResponse, serialized."""
        if request.pool != "inference":
            return _ALONE
        if request.run_id:
            look = self._latest()
            told = look.answers.get(request.run_id)
            if told is not None and look.assignments.get(request.replica_id) == request.run_id:
                return told
        return self._told(self.assigner.run_of(request.replica_id))

    def _latest(self) -> _Look:
        look = self._look
        # Who finds somebody looking already goes on with what is known, instead of waiting for Redis too.
        if time.monotonic() - look.at > LOOK_SECONDS and self._lock.acquire(blocking=False):
            try:
                at = time.monotonic()
                assignments = self.assigner.assignments()
                pause = self._pause_seconds(len(assignments))
                answers = {run_id: self._told(run_id, pause) for run_id in self.assigner.wanted()}
                self._look = look = _Look(at, assignments, answers)
            finally:
                self._lock.release()
        return look

    def _pause_seconds(self, replicas: int) -> float:
        seldom = min(replicas / BEATS_PER_SECOND, self.assigner.replicas.silence_seconds / 3)
        return max(HEARTBEAT_SECONDS, seldom)

    def _told(self, run_id: str, pause_seconds: float = HEARTBEAT_SECONDS) -> bytes:
        response = wire.HeartbeatResponse(next_heartbeat_seconds=pause_seconds)
        if run_id:
            response.run_id = run_id
            response.model_path = self.jobs.spec(run_id).model.path
            announced = self.weights.announced(run_id)
            if announced is not None:
                response.weights.CopyFrom(announced)
        return response.SerializeToString()
