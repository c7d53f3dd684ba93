"""OrchestratorService: decode, call, encode."""

from __future__ import annotations

import grpc

from services.orchestrator.container import AppContext
from services.orchestrator.monitor import note_alarms, note_death
from services.orchestrator.replicas import publish_version, serving
from services.orchestrator.values import reference_in_force, reference_values
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS
from spo.rpc.server import LongPolls
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceServicer


class OrchestratorService(OrchestratorServiceServicer):
    """What replicas and trainers ask of the orchestrator."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        # Messages one after the other are one message: what does not change is written once.
        self._platform = wire.HeartbeatResponse(platform_id=context.platform_id).SerializeToString()
        self.long_polls = LongPolls(context.settings.long_polls)

    def _leads(self) -> None:
        """A standby answers nobody, so that callers try again and find the leader. Raises NotLeading."""
        self.context.leadership.require()

    def Heartbeat(self, request: wire.HeartbeatRequest, context: grpc.ServicerContext) -> bytes:  # type: ignore[override]
        self._leads()
        self.context.replicas.beat(request)
        return self.context.heartbeats.answer(request) + self._platform

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
