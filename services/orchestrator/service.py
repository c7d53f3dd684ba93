"""OrchestratorService: decode, call, encode; and the answer to a heartbeat, which is encoded once for all replicas of a
run: the run that an inference replica is to serve, its model, and its weight version.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import grpc

from services.orchestrator.container import AppContext
from services.orchestrator.jobs import JobStore
from services.orchestrator.monitor import note_alarms, note_death
from services.orchestrator.replicas import HEARTBEAT_SECONDS, GroupsInHand, ReplicaAssigner, serving
from services.orchestrator.values import reference_in_force, reference_values
from services.orchestrator.versions import announced_version, publish_version
from spo.messaging.redis_client import only_this_job
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS
from spo.rpc.server import LongPolls
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceServicer

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


class OrchestratorService(OrchestratorServiceServicer):
    """What replicas and trainers ask of the orchestrator."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        # Messages one after the other are one message: what does not change is written once.
        self._platform = wire.HeartbeatResponse(platform_id=context.platform_id).SerializeToString()
        self.heartbeats = HeartbeatResponder(context.jobs, context.assigner, context.in_hand)
        self.long_polls = LongPolls(context.settings.long_polls)

    def _leads(self) -> None:
        """A standby answers nobody, so that callers try again and find the leader. Raises NotLeading."""
        self.context.leadership.require()

    def Heartbeat(self, request: wire.HeartbeatRequest, context: grpc.ServicerContext) -> bytes:  # type: ignore[override]
        self._leads()
        self.context.replicas.beat(request)
        return self.heartbeats.answer(request) + self._platform

    def LeaseJob(self, request: wire.LeaseJobRequest, context: grpc.ServicerContext) -> wire.LeaseJobResponse:
        self._leads()
        with self.long_polls.place():
            seconds, wanted = request.wait_seconds, context.is_active
            grant = self.context.leases.wait_for_job(request.trainer_id, seconds, wanted=wanted)
        grant.platform_id = self.context.platform_id
        return grant

    def RenewLease(self, request: wire.RenewLeaseRequest, context: grpc.ServicerContext) -> wire.RenewLeaseResponse:
        self._leads()
        if request.HasField("death"):
            note_death(self.context.jobs, request, self.context.settings.most_trainer_deaths)
        directive = self.context.leases.renew(request)
        # In the same answer: the trainer that told of an alarm must learn what became of it.
        paused = note_alarms(self.context.jobs, request)
        return wire.RenewLeaseResponse(
            directive=wire.DIRECTIVE_PAUSE if paused else directive,
            reference_version=reference_in_force(self.context.jobs, request.run_id),
        )

    def GetReferenceValues(
        self, request: wire.GetReferenceValuesRequest, context: grpc.ServicerContext
    ) -> wire.GetReferenceValuesResponse:
        self._leads()
        return wire.GetReferenceValuesResponse(
            qhat_0=reference_values(self.context.jobs, request.run_id, request.version)
        )

    def PublishWeights(
        self, request: wire.PublishWeightsRequest, context: grpc.ServicerContext
    ) -> wire.PublishWeightsResponse:
        self._leads()
        announced = publish_version(self.context.jobs, request)
        return wire.PublishWeightsResponse(
            announced=announced, replicas=len(serving(self.context.replicas.live(), request.run_id))
        )

    def ReportCheckpoint(
        self, request: wire.ReportCheckpointRequest, context: grpc.ServicerContext
    ) -> wire.ReportCheckpointResponse:
        self._leads()
        return wire.ReportCheckpointResponse(kept_steps=self.context.leases.checkpoint(request))

    def FinishRun(self, request: wire.FinishRunRequest, context: grpc.ServicerContext) -> wire.FinishRunResponse:
        self._leads()
        self.context.leases.finish(request)
        return wire.FinishRunResponse()

    def CompleteServed(
        self, request: wire.CompleteServedRequest, context: grpc.ServicerContext
    ) -> wire.CompleteServedResponse:
        self._leads()
        left = context.time_remaining()
        # A little less than the caller waits, so that it is told why.
        seconds = max(0.5, (DEFAULT_DEADLINE_SECONDS if left is None else left) - 1.0)
        with self.long_polls.place():
            return wire.CompleteServedResponse(texts=self.context.served_judges.complete(request, seconds))
