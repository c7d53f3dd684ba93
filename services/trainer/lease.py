"""Rank 0's lease of one job: renewed in the background, fenced by its epoch; all reports of the run go through it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypedDict

from google.protobuf.message import Message

from spo.errors import InternalError, LeaseLost, NotReady, SpoError
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("lease")

RENEW_SECONDS = 1.0
CALL_DEADLINE_SECONDS = 10.0
LOG_SECONDS = 10.0
REPORTS_PER_RENEWAL = 1000
MAX_QUARANTINED_IDS = 1000
# A service whose Redis is just restarting answers INTERNAL: worth asking again, like one that is away.
TRANSIENT = (NotReady, InternalError)


def take_lease(
    orchestrator: RpcClient, trainer_id: str, wait_seconds: float, stop: threading.Event
) -> wire.LeaseJobResponse | None:
    """Wait up to wait_seconds for a job; None when there is none, or the orchestrator is away (logged)."""
    request = wire.LeaseJobRequest(trainer_id=trainer_id, wait_seconds=wait_seconds)
    try:
        grant: wire.LeaseJobResponse = orchestrator.call(
            "LeaseJob", request, deadline_seconds=wait_seconds + 10, stop=stop
        )
    except TRANSIENT as error:
        log.warning("waiting for a job, but the orchestrator gives none", reason=error.message)
        stop.wait(1.0)
        return None
    return grant if grant.run_id else None


class _Owner(TypedDict):
    """What every request of the job's owner carries."""

    run_id: str
    trainer_id: str
    epoch: int


class JobLease:
    """One leased job. Once the orchestrator has refused its epoch every method raises LeaseLost and sends nothing."""

    def __init__(
        self,
        orchestrator: RpcClient,
        trainer_id: str,
        grant: wire.LeaseJobResponse,
        *,
        patience_seconds: float,
        stop: threading.Event,
    ) -> None:
        self.grant = grant
        self.directive: int = wire.DIRECTIVE_CONTINUE
        self.reference_version = 0
        self._orchestrator = orchestrator
        self._owner: _Owner = {"run_id": grant.run_id, "trainer_id": trainer_id, "epoch": grant.epoch}
        self._patience_seconds = patience_seconds
        self._stop = stop
        self._reports: deque[wire.StepReport] = deque()
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    @property
    def has_reported_all(self) -> bool:
        """Whether every report was acknowledged; `directive` is then the answer to the last of them, or newer."""
        return not self._reports

    def report_step(
        self, step: int, metrics: Mapping[str, float], alarms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Report a step's metrics, and alarms by name with their reasons, with the next renewal."""
        self._reports.append(wire.StepReport(step=step, metrics=metrics, alarms=alarms))

    def report_quarantine(
        self, step: int, metrics: Mapping[str, float], reason: str, trajectory_ids: Sequence[str]
    ) -> None:
        """Report a step whose batch could not be learned from, with the next renewal."""
        named = trajectory_ids[:MAX_QUARANTINED_IDS]
        self._reports.append(
            wire.StepReport(step=step, metrics=metrics, quarantine_reason=reason, quarantined_ids=named)
        )

    def publish(self, version: int, step: int, *, uri: str, manifest_digest: str, size_bytes: int) -> None:
        """Tell the orchestrator about a stored weight version; idempotent."""
        request = wire.PublishWeightsRequest(
            **self._owner,
            version=version,
            step=step,
            uri=uri,
            manifest_digest=manifest_digest,
            size_bytes=size_bytes,
        )
        self._insist("PublishWeights", lambda: request)

    def reference_values(self, version: int) -> dict[str, float]:
        """Qhat_0 by prompt id under a weight version that is the reference, reward units. Raises NotReady."""
        request = wire.GetReferenceValuesRequest(run_id=self.grant.run_id, version=version)
        response: wire.GetReferenceValuesResponse = self._orchestrator.call(
            "GetReferenceValues", request, deadline_seconds=CALL_DEADLINE_SECONDS
        )
        return dict(response.qhat_0)

    def report_checkpoint(self, step: int, *, path: str, manifest_digest: str, weight_version: int) -> None:
        """Tell the orchestrator about a finished checkpoint; idempotent."""
        request = wire.ReportCheckpointRequest(
            **self._owner, step=step, path=path, manifest_digest=manifest_digest, weight_version=weight_version
        )
        self._insist("ReportCheckpoint", lambda: request)

    def finish(self, final_step: int, error_code: str = "", error_message: str = "") -> None:
        """Give the job back: done, or failed with an error. All step reports arrive before."""
        self.close()
        while self._reports:
            self._insist("RenewLease", self._renewal)
        request = wire.FinishRunRequest(
            **self._owner, error_code=error_code, error_message=error_message, final_step=final_step
        )
        self._insist("FinishRun", lambda: request)

    def close(self) -> None:
        """Stop renewing; without `finish` the lease runs out by itself."""
        self._closed.set()
        self._thread.join(CALL_DEADLINE_SECONDS + 1)

    def _keep(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self.grant.lease_seconds / 3)):
            try:
                self._call("RenewLease", self._renewal)
            except LeaseLost:
                return
            except SpoError as error:
                log.warning("could not renew the lease; trying again", run=self.grant.run_id, reason=error.message)

    def _renewal(self) -> wire.RenewLeaseRequest:
        reports = [self._reports[index] for index in range(min(len(self._reports), REPORTS_PER_RENEWAL))]
        return wire.RenewLeaseRequest(**self._owner, reports=reports)

    def _insist(self, method: str, make: Callable[[], Message]) -> None:
        """Call until the orchestrator answers; raises its error (a transient one once patience or the process ends)."""
        deadline = time.monotonic() + self._patience_seconds
        last_logged = 0.0
        while True:
            try:
                return self._call(method, make)
            except TRANSIENT as error:
                if time.monotonic() > deadline or self._stop.is_set():
                    raise
                if time.monotonic() - last_logged > LOG_SECONDS:
                    last_logged = time.monotonic()
                    log.warning("waiting for the orchestrator", call=method, reason=error.message)
                self._stop.wait(0.5)

    def _call(self, method: str, make: Callable[[], Message]) -> None:
        if self.lost:
            raise LeaseLost(f"the lease of {self.grant.run_id} was lost")
        request = make()
        try:
            response = self._orchestrator.call(method, request, deadline_seconds=CALL_DEADLINE_SECONDS)
        except LeaseLost:
            self._lost.set()
            log.warning("the lease was lost; this trainer stops working on the job", run=self.grant.run_id)
            raise
        if isinstance(request, wire.RenewLeaseRequest):
            # Before the reports are dropped: once `has_reported_all` holds, the directive answers the last of them.
            self.directive, self.reference_version = response.directive, response.reference_version
            # Only acknowledged reports are dropped.
            for _ in request.reports:
                self._reports.popleft()
