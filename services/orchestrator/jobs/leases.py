"""The trainer's hold on a job: one owner at a time, fenced by an epoch that only grows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Fence, Precondition, Write
from services.orchestrator.jobs.record import clear_fields, write_fields
from services.orchestrator.jobs.series import report_writes
from services.orchestrator.jobs.store import JobStore
from spo.observability.logs import get_logger
from spo.spec.job_spec import spec_to_json
from spo.spec.job_state import JobState
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("leases")

POLL_SECONDS = 1.0
MAX_WAIT_SECONDS = 25.0
PROGRESS_SECONDS = 2.0
LEASABLE = (JobState.RUNNING,)
# What a trainer says that was told to let go of a job, paused or cancelled; no reason to fail it.
LET_GO = "cancelled"


@dataclass(frozen=True)
class Lease:
    """Who holds a job until when."""

    trainer_id: str
    epoch: int
    expires_unix_ms: int

    @property
    def live(self) -> bool:
        return bool(self.trainer_id) and self.expires_unix_ms > now_ms()


class Leases:
    """Grants, renews and ends leases; every call of a stale holder raises LeaseLost."""

    def __init__(
        self, jobs: JobStore, state_path: Path, weight_place: str, lease_seconds: float, stop: threading.Event
    ) -> None:
        self.jobs = jobs
        self.state_path = state_path
        self.weight_place = weight_place
        self.lease_seconds = lease_seconds
        self.stop = stop
        self._progress_at: dict[str, float] = {}

    def lease(self, job_id: str) -> Lease:
        """The lease as stored; an empty trainer when nobody has ever held the job."""
        fields = self.jobs.client.hgetall(own_keys.job_lease(job_id))
        return Lease(
            fields.get(b"trainer_id", b"").decode(),
            int(fields.get(b"epoch", 0)),
            int(fields.get(b"expires_unix_ms", 0)),
        )

    def wait_for_job(
        self, trainer_id: str, wait_seconds: float, wanted: Callable[[], bool] = lambda: True
    ) -> wire.LeaseJobResponse:
        """Lease the oldest job in want of a trainer; an empty answer when none came within wait_seconds.

        wanted: false once the trainer has gone, so that no job waits out the lease of one that never heard of it.
        """
        deadline = time.monotonic() + min(wait_seconds, MAX_WAIT_SECONDS)
        while wanted():
            for job_id in self.jobs.in_states(LEASABLE):
                granted = self._grant(job_id, trainer_id)
                if granted is not None:
                    return granted
            if time.monotonic() >= deadline or self.stop.wait(POLL_SECONDS):
                break
        return wire.LeaseJobResponse()

    def _grant(self, job_id: str, trainer_id: str) -> wire.LeaseJobResponse | None:
        held, record = self.lease(job_id), self.jobs.record(job_id)
        if record.is_trained or (held.live and held.trainer_id != trainer_id):
            return None
        key = own_keys.job_lease(job_id)
        epoch = held.epoch + 1
        outcome = Commit(
            job_id,
            LEASABLE,
            guard=Precondition(key, "epoch", str(held.epoch) if held.epoch else ""),
            writes=[("HSET", key, "trainer_id", trainer_id, "epoch", epoch, "expires_unix_ms", self._expiry())],
            kind="lease",
            body=json.dumps({"trainer_id": trainer_id, "epoch": epoch}),
        ).run(self.jobs.client, durable=self.jobs.durable)
        if not outcome.done:
            return None
        log.info("job leased", job=job_id, trainer=trainer_id, epoch=epoch)
        versions = self.jobs.client.hkeys(own_keys.job_weights(job_id))
        return wire.LeaseJobResponse(
            run_id=job_id,
            spec_json=spec_to_json(self.jobs.spec(job_id)),
            epoch=epoch,
            lease_seconds=self.lease_seconds,
            next_weight_version=max((int(version) for version in versions), default=0) + 1,
            checkpoint_path=str((self.state_path / "checkpoints" / job_id).absolute()),
            weight_store_path=f"{self.weight_place}/{job_id}",
            start_version=record.start_version,
        )

    def renew(self, request: wire.RenewLeaseRequest) -> wire.Directive.ValueType:
        """Extend the lease and record the step reports, idempotently by step; returns what the trainer shall do."""
        job_id = request.run_id
        reports = [(report.step, dict(report.metrics)) for report in request.reports]
        writes: list[Write] = [self._extension(job_id), *report_writes(job_id, reports)]
        commit = Commit(job_id, fence=Fence(request.trainer_id, request.epoch), writes=writes)
        if reports and self._progress_is_due(job_id):
            body = {"stage": "running", "done": reports[-1][0], "total": self.jobs.spec(job_id).trainer.steps}
            commit = Commit(job_id, fence=commit.fence, writes=writes, kind="progress", body=json.dumps(body))
        # Step reports are history, not control: they need no wait for the append-only file.
        outcome = commit.run(self.jobs.client, durable=False)
        if outcome.verdict == "fence":
            self.jobs.fenced(commit)
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

    def checkpoint(self, request: wire.ReportCheckpointRequest) -> None:
        """Record a finished checkpoint; it also completes a pause and a checkpoint that a person asked for."""
        job_id = request.run_id
        head = {
            "step": request.step,
            "path": request.path,
            "manifest_digest": request.manifest_digest,
            "weight_version": request.weight_version,
        }
        outcome = self.jobs.fenced(
            Commit(
                job_id,
                fence=Fence(request.trainer_id, request.epoch),
                writes=[
                    ("HSET", own_keys.job_checkpoints(job_id), request.step, json.dumps(head)),
                    clear_fields(job_id, "checkpoint_asked"),
                    self._extension(job_id),
                ],
                kind="checkpoint",
                body=json.dumps(head),
            )
        )
        if outcome.state == JobState.PAUSING:
            self.jobs.transition(job_id, JobState.PAUSED, f"the trainer saved step {request.step}")

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

    def _extension(self, job_id: str) -> Write:
        return ("HSET", own_keys.job_lease(job_id), "expires_unix_ms", self._expiry())

    def _expiry(self) -> int:
        return now_ms() + int(self.lease_seconds * 1000)

    def _progress_is_due(self, job_id: str) -> bool:
        if time.monotonic() - self._progress_at.get(job_id, 0.0) < PROGRESS_SECONDS:
            return False
        self._progress_at[job_id] = time.monotonic()
        return True


def now_ms() -> int:
    """Wall clock, unix milliseconds."""
    return int(time.time() * 1000)
