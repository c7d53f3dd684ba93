"""Rank 0's lease of one job: renewed in the background, fenced by its epoch; all reports of the run go through it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypedDict, TypeVar

from google.protobuf.message import Message

from spo.errors import InternalError, LeaseLost, NotReady, ResourceExhausted, SpoError
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient
from spo.spec.job_spec import spec_from_json
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.store import StoredVersion

log = get_logger("lease")

RENEW_SECONDS = 1.0
CALL_DEADLINE_SECONDS = 10.0
LOG_SECONDS = 10.0
# For so long a trainer leaves jobs to others when it was leased one that it cannot read.
UNREADABLE_SECONDS = 30.0
LET_GO = "cancelled"
REPORTS_PER_RENEWAL = 1000
MAX_QUARANTINED_IDS = 1000

Answer = TypeVar("Answer")
# A service whose Redis is just restarting answers INTERNAL: worth asking again, like one that is away or full.
TRANSIENT = (NotReady, InternalError, ResourceExhausted)


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
    if not grant.run_id:
        return None
    try:
        spec_from_json(grant.spec_json)
    except NotReady as error:
        log.error("the job is left to a trainer of a later release", run=grant.run_id, reason=error.message)
        _let_go(orchestrator, trainer_id, grant)
        stop.wait(UNREADABLE_SECONDS)
        return None
    return grant


def _let_go(orchestrator: RpcClient, trainer_id: str, grant: wire.LeaseJobResponse) -> None:
    ended = wire.FinishRunRequest(
        run_id=grant.run_id, trainer_id=trainer_id, epoch=grant.epoch, error_code=LET_GO, error_message="not readable"
    )
    try:
        orchestrator.call("FinishRun", ended, deadline_seconds=CALL_DEADLINE_SECONDS)
    except SpoError as error:
        log.warning("the lease runs out by itself", run=grant.run_id, reason=error.message)


def tell_death(
    orchestrator: RpcClient, trainer_id: str, grant: wire.LeaseJobResponse, death: wire.TrainerDeath
) -> bool | None:
    """Tell how the trainer before died: whether the job goes on all the same; None when it could not be told."""
    told = wire.RenewLeaseRequest(run_id=grant.run_id, trainer_id=trainer_id, epoch=grant.epoch, death=death)
    try:
        answer: wire.RenewLeaseResponse = orchestrator.call("RenewLease", told, deadline_seconds=CALL_DEADLINE_SECONDS)
    except SpoError as error:
        log.warning("the death of the trainer before is not told; trying again", reason=error.message)
        return None
    return answer.directive != wire.DIRECTIVE_CANCEL


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
        self._renewing = threading.Lock()
        # When the last call began that the orchestrator took as the owner's; time that the process is stopped counts.
        self._owned_at = time.monotonic()
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def confirm(self) -> None:
        """Before files of the run are written: ask, where a whole lease has passed since the last answer.

        A process that was stopped for so long may wake up to a job that is another's or deleted. Raises LeaseLost, and
        what the orchestrator's silence raises.
        """
        if self.lost or time.monotonic() - self._owned_at > self.grant.lease_seconds:
            self._until_answered("RenewLease", self._renew)

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

    def publish(self, version: int, step: int, stored: StoredVersion, broadcast: BroadcastOffer | None) -> int:
        """Tell the orchestrator about a stored weight version, and where it is sent; idempotent.

        Returns how many replicas serve the run.
        """
        request = wire.PublishWeightsRequest(
            **self._owner,
            version=version,
            step=step,
            uri=stored.uri,
            manifest_digest=stored.manifest_digest,
            size_bytes=stored.size_bytes,
            broadcast=broadcast,
        )
        response = self._insist("PublishWeights", request)
        assert isinstance(response, wire.PublishWeightsResponse)
        return response.replicas

    def reference_values(self, version: int) -> dict[str, float]:
        """Qhat_0 by prompt id under a weight version that is the reference, reward units. Raises NotReady."""
        request = wire.GetReferenceValuesRequest(run_id=self.grant.run_id, version=version)
        response: wire.GetReferenceValuesResponse = self._orchestrator.call(
            "GetReferenceValues", request, deadline_seconds=CALL_DEADLINE_SECONDS
        )
        return dict(response.qhat_0)

    def report_checkpoint(
        self, step: int, *, path: str, manifest_digest: str, weight_version: int, keep: int, resumed_step: int
    ) -> list[int]:
        """Tell the orchestrator about a finished checkpoint; returns the steps of those it still records; idempotent.

        All step reports arrive before: whoever resumes from it takes only later steps again.
        """
        self._report_all()
        request = wire.ReportCheckpointRequest(
            **self._owner,
            step=step,
            path=path,
            manifest_digest=manifest_digest,
            weight_version=weight_version,
            keep=keep,
            resumed_step=resumed_step,
        )
        response = self._insist("ReportCheckpoint", request)
        assert isinstance(response, wire.ReportCheckpointResponse)
        return list(response.kept_steps)

    def finish(self, final_step: int, error_code: str = "", error_message: str = "") -> None:
        """Give the job back: done, or failed with an error. All step reports arrive before."""
        self.close()
        self._report_all()
        request = wire.FinishRunRequest(
            **self._owner, error_code=error_code, error_message=error_message, final_step=final_step
        )
        self._insist("FinishRun", request)

    def close(self) -> None:
        """Stop renewing; without `finish` the lease runs out by itself."""
        self._closed.set()
        self._thread.join(CALL_DEADLINE_SECONDS + 1)

    def _keep(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self.grant.lease_seconds / 3)):
            try:
                self._renew()
            except LeaseLost:
                return
            except SpoError as error:
                log.warning("could not renew the lease; trying again", run=self.grant.run_id, reason=error.message)

    def _report_all(self) -> None:
        while self._reports:
            self._until_answered("RenewLease", self._renew)

    def _renew(self) -> None:
        # One at a time: the reports that an answer acknowledges are the first in the queue.
        with self._renewing:
            reports = [self._reports[index] for index in range(min(len(self._reports), REPORTS_PER_RENEWAL))]
            request = wire.RenewLeaseRequest(**self._owner, reports=reports)
            with self._as_owner():
                response: wire.RenewLeaseResponse = self._orchestrator.call(
                    "RenewLease", request, CALL_DEADLINE_SECONDS
                )
            # Before the reports are dropped: once `has_reported_all` holds, the directive answers the last of them.
            self.directive, self.reference_version = response.directive, response.reference_version
            for _ in reports:
                self._reports.popleft()

    def _insist(self, method: str, request: Message) -> Message:
        def attempt() -> Message:
            with self._as_owner():
                answer: Message = self._orchestrator.call(method, request, CALL_DEADLINE_SECONDS)
                return answer

        return self._until_answered(method, attempt)

    def _until_answered(self, method: str, attempt: Callable[[], Answer]) -> Answer:
        """Call until the orchestrator answers; raises its error (a transient one once patience or the process ends)."""
        deadline = time.monotonic() + self._patience_seconds
        last_logged = 0.0
        while True:
            try:
                return attempt()
            except TRANSIENT as error:
                if time.monotonic() > deadline or self._stop.is_set():
                    raise
                if time.monotonic() - last_logged > LOG_SECONDS:
                    last_logged = time.monotonic()
                    log.warning("waiting for the orchestrator", call=method, reason=error.message)
                self._stop.wait(0.5)

    @contextmanager
    def _as_owner(self) -> Iterator[None]:
        """Around a call of the job's owner: the first refusal is the last call."""
        if self.lost:
            raise LeaseLost(f"the lease of {self.grant.run_id} was lost")
        began = time.monotonic()
        try:
            yield
            self._owned_at = began
        except LeaseLost:
            self._lost.set()
            log.warning("the lease was lost; this trainer stops working on the job", run=self.grant.run_id)
            raise
