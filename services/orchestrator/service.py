"""OrchestratorService: decode, call, encode."""

from __future__ import annotations

import grpc

from services.orchestrator.container import AppContext
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceServicer


class OrchestratorService(OrchestratorServiceServicer):
    """What replicas and trainers ask of the orchestrator."""

    def __init__(self, context: AppContext) -> None:
        self.context = context

    def Heartbeat(self, request: wire.HeartbeatRequest, context: grpc.ServicerContext) -> bytes:  # type: ignore[override]
        self.context.replicas.beat(request)
        return self.context.heartbeats.answer(request)

    def LeaseJob(self, request: wire.LeaseJobRequest, context: grpc.ServicerContext) -> wire.LeaseJobResponse:
        return self.context.leases.wait_for_job(request.trainer_id, request.wait_seconds, wanted=context.is_active)

    def RenewLease(self, request: wire.RenewLeaseRequest, context: grpc.ServicerContext) -> wire.RenewLeaseResponse:
        directive = self.context.leases.renew(request)
        # In the same answer: the trainer that told of an alarm must learn what became of it.
        paused = self.context.alarms.note(request)
        return wire.RenewLeaseResponse(
            directive=wire.DIRECTIVE_PAUSE if paused else directive,
            reference_version=self.context.references.in_force(request.run_id),
        )

    def GetReferenceValues(
        self, request: wire.GetReferenceValuesRequest, context: grpc.ServicerContext
    ) -> wire.GetReferenceValuesResponse:
        return wire.GetReferenceValuesResponse(qhat_0=self.context.references.values(request.run_id, request.version))

    def PublishWeights(
        self, request: wire.PublishWeightsRequest, context: grpc.ServicerContext
    ) -> wire.PublishWeightsResponse:
        return wire.PublishWeightsResponse(announced=self.context.weights.publish(request))

    def ReportCheckpoint(
        self, request: wire.ReportCheckpointRequest, context: grpc.ServicerContext
    ) -> wire.ReportCheckpointResponse:
        self.context.leases.checkpoint(request)
        return wire.ReportCheckpointResponse()

    def FinishRun(self, request: wire.FinishRunRequest, context: grpc.ServicerContext) -> wire.FinishRunResponse:
        self.context.leases.finish(request)
        return wire.FinishRunResponse()
