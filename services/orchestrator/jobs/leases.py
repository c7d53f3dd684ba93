"""The trainer's hold on a job: one owner at a time, fenced by an epoch that only grows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.checkpoints import (
    kept_after,
    record_of,
    record_writes,
    recorded_checkpoints,
    wire_checkpoints,
)
from services.orchestrator.jobs.commit import Commit, Fence, LeaseTerm, Precondition, Write
from services.orchestrator.jobs.lease import Lease, read_leases
from services.orchestrator.jobs.record import clear_fields, write_fields
from services.orchestrator.jobs.series import report_writes
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.jobs.vacancies import LEASABLE, Vacancies
from spo.observability.logs import get_logger
from spo.spec.job_state import JobState
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("leases")

POLL_SECONDS = 1.0
MAX_WAIT_SECONDS = 25.0
PROGRESS_SECONDS = 2.0
# What a trainer says that was told to let go of a job, paused or cancelled; no reason to fail it.
LET_GO = "cancelled"


class Leases:
    """Grants, renews and ends leases; every call of a stale holder raises LeaseLost."""

    def __init__(
        self, jobs: JobStore, checkpoint_place: str, weight_place: str, lease_seconds: float, stop: threading.Event
    ) -> None:
        self.jobs = jobs
        self.checkpoint_place = checkpoint_place
        self.weight_place = weight_place
        self.lease_seconds = lease_seconds
        self.stop = stop
        # Called with a job before a trainer is leased it; raises where it must not be yet.
        self.before_grant: Callable[[str], None] = lambda job_id: None
        self._vacancies = Vacancies(jobs, self._lease_ms)
        self._progress_at: dict[str, float] = {}

    def lease(self, job_id: str) -> Lease:
        """The lease as stored; an empty trainer when nobody has ever held the job."""
        return read_leases(self.jobs.client, [job_id], self._lease_ms)[0]

    def wait_for_job(
        self, trainer_id: str, wait_seconds: float, wanted: Callable[[], bool] = lambda: True
    ) -> wire.LeaseJobResponse:
        """Lease the oldest job in want of a trainer; an empty answer when none came within wait_seconds.

        wanted: false once the trainer has gone, so that no job waits out the lease of one that never heard of it.
        """
        began = time.monotonic()
        # What was read while this call waited its turn is news enough; later rounds share one reading a second.
        fresh_since = began
        while wanted():
            for job_id in self._vacancies.wanted_by(trainer_id, fresh_since):
                granted = self._grant(job_id, trainer_id)
                if granted is not None:
                    return granted
            left = began + min(wait_seconds, MAX_WAIT_SECONDS) - time.monotonic()
            if left <= 0 or self.stop.wait(min(left, POLL_SECONDS)):
                break
            fresh_since = time.monotonic() - POLL_SECONDS / 2
        return wire.LeaseJobResponse()

    def _grant(self, job_id: str, trainer_id: str) -> wire.LeaseJobResponse | None:
        held, record = self.lease(job_id), self.jobs.record(job_id)
        if record.is_trained or (held.live and held.trainer_id != trainer_id):
            return None
        self.before_grant(job_id)
        held = self.lease(job_id)
        key = own_keys.job_lease(job_id)
        epoch = held.epoch + 1
        outcome = self.jobs.commit(
            Commit(
                job_id,
                LEASABLE,
                guard=Precondition(key, "epoch", str(held.epoch) if held.epoch else ""),
                writes=[("HSET", key, "trainer_id", trainer_id, "epoch", epoch)],
                term=LeaseTerm(self._lease_ms, trainer_id),
                kind="lease",
                body=json.dumps({"trainer_id": trainer_id, "epoch": epoch}),
            )
        )
        if not outcome.done:
            return None
        log.info("job leased", job=job_id, trainer=trainer_id, epoch=epoch)
        versions = self.jobs.client.hkeys(own_keys.job_weights(job_id))
        return wire.LeaseJobResponse(
            run_id=job_id,
            spec_json=self.jobs.spec_document(job_id).decode(),
            epoch=epoch,
            lease_seconds=self.lease_seconds,
            next_weight_version=max((int(version) for version in versions), default=0) + 1,
            checkpoint_path=f"{self.checkpoint_place}/{job_id}",
            weight_store_path=f"{self.weight_place}/{job_id}",
            start_version=record.start_version,
            # Read after the lease was taken: from here on no older one can add to them.
            checkpoints=wire_checkpoints(recorded_checkpoints(self.jobs.client, job_id)),
        )

    def renew(self, request: wire.RenewLeaseRequest) -> wire.Directive.ValueType:
        """Extend the lease and record the step reports, idempotently by step; returns what the trainer shall do."""
        job_id = request.run_id
        reports = [(report.step, dict(report.metrics)) for report in request.reports]
        writes = report_writes(job_id, reports)
        fence, term = Fence(request.trainer_id, request.epoch), LeaseTerm(self._lease_ms)
        commit = Commit(job_id, fence=fence, writes=writes, term=term)
        if reports and self._progress_is_due(job_id):
            body = {"stage": "running", "done": reports[-1][0], "total": self.jobs.spec(job_id).trainer.steps}
            commit = replace(commit, kind="progress", body=json.dumps(body))
        # Step reports are history, not control: they need no wait for the append-only file.
        outcome = self.jobs.fenced(commit, durable=False)
        return self._directive(job_id, JobState(outcome.state))

    def _directive(self, job_id: str, state: JobState) -> wire.Directive.ValueType:
        match state:
            case JobState.RUNNING:
                asked = self.jobs.record(job_id).checkpoint_asked
                return wire.DIRECTIVE_CHECKPOINT if asked else wire.DIRECTIVE_CONTINUE
            case JobState.PAUSING:
                return wire.DIRECTIVE_PAUSE
            case _:
                # Also when paused: its state is saved, and the trainer is free for another job.
                return wire.DIRECTIVE_CANCEL

    def checkpoint(self, request: wire.ReportCheckpointRequest) -> list[int]:
        """Record a finished checkpoint; returns the steps of those that stay recorded.

        It also completes a pause and a checkpoint that a person asked for.
        """
        job_id = request.run_id
        new, before = record_of(request), recorded_checkpoints(self.jobs.client, job_id)
        kept = kept_after(before, request)
        outcome = self.jobs.fenced(
            Commit(
                job_id,
                fence=Fence(request.trainer_id, request.epoch),
                writes=[
                    *record_writes(job_id, before, kept, new),
                    clear_fields(job_id, "checkpoint_asked"),
                ],
                term=LeaseTerm(self._lease_ms),
                kind="checkpoint",
                body=new.model_dump_json(),
            )
        )
        if outcome.state == JobState.PAUSING:
            self.jobs.transition(job_id, JobState.PAUSED, f"the trainer saved step {request.step}")
        return [record.step for record in kept]

    def finish(self, request: wire.FinishRunRequest) -> None:
        """The trainer's last word: end the lease, then fail the job or leave it to the final evaluation."""
        job_id = request.run_id
        writes: list[Write] = [("HSET", own_keys.job_lease(job_id), "trainer_id", "", "expires_unix_ms", 0)]
        if not request.error_code:
            writes.append(write_fields(job_id, trained_steps=request.final_step))
        outcome = self.jobs.fenced(
            Commit(
                job_id,
                fence=Fence(request.trainer_id, request.epoch),
                writes=writes,
                kind="training_ended",
                body=json.dumps({"step": request.final_step, "error_code": request.error_code}),
            )
        )
        if request.error_code not in ("", LET_GO) and outcome.state != JobState.CANCELLING:
            self.jobs.fail(job_id, request.error_code, request.error_message)

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_seconds * 1000)

    def _progress_is_due(self, job_id: str) -> bool:
        if time.monotonic() - self._progress_at.get(job_id, 0.0) < PROGRESS_SECONDS:
            return False
        self._progress_at[job_id] = time.monotonic()
        return True


def now_ms() -> int:
    """Wall clock, unix milliseconds."""
    return int(time.time() * 1000)
