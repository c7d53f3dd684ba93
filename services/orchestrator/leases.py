"""The trainer's hold on a job: vacancies, leases fenced by an epoch, its checkpoints and files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import LEASE_IS_LIVE, Commit, Fence, LeaseTerm, Precondition, Write
from services.orchestrator.job_records import clear_fields, report_writes, write_fields
from services.orchestrator.jobs import JobStore
from services.orchestrator.settings import Settings
from spo import redis_keys
from spo.messaging.redis_client import RedisClient, only_this_job, replies_by_key
from spo.observability import get_logger
from spo.service.state import StatePlace, state_at
from spo.spec.section import JobState
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.model_folders import MadeModels
from spo.weights.store import CHECKPOINT_DIGITS, FolderBackend, WeightBackend, WeightStore, backend_at

# KEYS: lease, leader.  ARGV: lease ms.  Returns {trainer or '', epoch, live, expiry, whether that is of another clock}.
_READ = f"""#!lua flags=no-writes
{LEASE_IS_LIVE}
local now, lease_ms = now_ms(), tonumber(ARGV[1])
local live = lease_is_live(KEYS[1], KEYS[2], now, lease_ms)
local held = redis.call('HMGET', KEYS[1], 'trainer_id', 'epoch', 'expires_unix_ms')
local expires = tonumber(held[3] or '0')
return {{held[1] or '', tonumber(held[2] or '0'), live and 1 or 0, expires, expires > now + 2 * lease_ms and 1 or 0}}
"""

# KEYS: lease.  ARGV: lease ms, the expiry that was read.  One lease from now, in place of one of another clock.
_SHORTEN = f"""#!lua flags=allow-oom
{LEASE_IS_LIVE}
if redis.call('HGET', KEYS[1], 'expires_unix_ms') == ARGV[2] then
  redis.call('HSET', KEYS[1], 'expires_unix_ms', now_ms() + tonumber(ARGV[1]))
end
"""

LEASABLE = (JobState.RUNNING,)

log = get_logger("leases")

POLL_SECONDS = 1.0
MAX_WAIT_SECONDS = 25.0
PROGRESS_SECONDS = 2.0
# What a trainer says that was told to let go of a job, paused or cancelled; no reason to fail it.
LET_GO = "cancelled"


@dataclass(frozen=True)
class JobFiles:
    """Of all jobs; checkpoints lie by step, in a folder or a bucket.

    state_path: this machine's folder; place: where files are that a restart finds again. shared: other services see
    the state folder.
    """

    state_path: Path
    place: StatePlace
    models: MadeModels
    weights: WeightStore
    checkpoints: WeightBackend
    shared: bool = True

    @classmethod
    def of(cls, settings: Settings) -> JobFiles:
        """As a process is told. Raises InvalidInput where a store's address is none."""
        return cls(
            settings.state_path,
            state_at(settings.state_place),
            MadeModels(settings.state_place, settings.state_path),
            WeightStore(settings.weight_place, cache_path=settings.weight_cache_path),
            backend_at(settings.checkpoint_place, CHECKPOINT_DIGITS),
            settings.shared_state,
        )

    def checkpoint_steps(self, job_id: str) -> set[int] | None:
        """Of those that are there; None in a bucket, where a record goes with what it records."""
        return set(self.checkpoints.versions(job_id)) if isinstance(self.checkpoints, FolderBackend) else None


class CheckpointRecord(BaseModel):
    """One reported checkpoint; epoch: of the lease it was written under, 0 for a fork's first and for older records."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    path: str
    manifest_digest: str
    weight_version: int
    epoch: int = 0


def recorded_checkpoints(client: RedisClient, job_id: str) -> list[CheckpointRecord]:
    """By lease epoch, then step: training resumes from the last one."""
    found = client.hgetall(redis_keys.job_checkpoints(job_id))
    records = (CheckpointRecord.model_validate_json(raw) for raw in found.values())
    return sorted(records, key=lambda record: (record.epoch, record.step))


def kept_checkpoints(client: RedisClient, files: JobFiles, job_id: str) -> list[CheckpointRecord]:
    """Those whose files are there, by step; records from before they were pruned may outlive their folders."""
    there = files.checkpoint_steps(job_id)
    found = (each for each in recorded_checkpoints(client, job_id) if there is None or each.step in there)
    return sorted(found, key=lambda record: record.step)


def record_of(request: wire.ReportCheckpointRequest) -> CheckpointRecord:
    """The record of a reported checkpoint."""
    return CheckpointRecord(
        step=request.step,
        path=request.path,
        manifest_digest=request.manifest_digest,
        weight_version=request.weight_version,
        epoch=request.epoch,
    )


def kept_after(before: Sequence[CheckpointRecord], request: wire.ReportCheckpointRequest) -> list[CheckpointRecord]:
    """The records that stay once this one is added: the newest `keep` of the line that the reporting lease goes on.

    What an older lease recorded beyond the step at which this one began is not part of that line.
    """
    on_line = [
        record
        for record in before
        if record.step != request.step
        and (record.epoch >= request.epoch or record.step <= request.resumed_step or not request.keep)
    ]
    line = sorted([*on_line, record_of(request)], key=lambda record: (record.epoch, record.step))
    return line[-request.keep :] if request.keep else line


def record_writes(
    job_id: str, before: Sequence[CheckpointRecord], kept: Sequence[CheckpointRecord], new: CheckpointRecord
) -> list[Write]:
    """Redis writes that record the new checkpoint and forget those that are kept no longer."""
    key = redis_keys.job_checkpoints(job_id)
    gone = {record.step for record in before} - {record.step for record in kept}
    return [("HSET", key, new.step, new.model_dump_json()), *(("HDEL", key, step) for step in sorted(gone))]


def wire_checkpoints(records: Sequence[CheckpointRecord]) -> wire.RecordedCheckpoints:
    """As a lease tells of them: the best to resume from first."""
    found = wire.RecordedCheckpoints()
    for record in reversed(records):
        found.items.add(step=record.step, epoch=record.epoch, manifest_digest=record.manifest_digest)
    return found


@dataclass(frozen=True)
class Lease:
    """Who holds a job, or held it last ("" nobody ever); live by Redis' clock when it was read."""

    trainer_id: str
    epoch: int
    live: bool
    expires_unix_ms: int


def read_leases(client: RedisClient, job_ids: Sequence[str], lease_ms: int) -> list[Lease]:
    """The leases of jobs, in one round trip; lease_ms is how long one lasts."""
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.eval(_READ, 2, own_keys.job_lease(job_id), own_keys.leader(), lease_ms)
        replies = pipe.execute() if len(job_ids) == 1 else replies_by_key(pipe)
    # Of a lease that is none nobody is the holder; whoever is granted it hears what Redis says of it.
    found = [reply or (b"", 0, 0, 0, 0) for reply in replies]
    # A write of its own, so that leases can be read while Redis takes no writes.
    for job_id, (_, _, _, expires_unix_ms, set_back) in zip(job_ids, found, strict=True):
        if set_back:
            client.eval(_SHORTEN, 1, own_keys.job_lease(job_id), lease_ms, expires_unix_ms)
    return [
        Lease(trainer_id.decode(), int(epoch), bool(live), int(expires_unix_ms))
        for trainer_id, epoch, live, expires_unix_ms, _ in found
    ]


@dataclass(frozen=True)
class Vacancy:
    """A job that is not trained yet, and who holds its lease ("" where nobody does)."""

    job_id: str
    holder: str


class Vacancies:
    """The jobs in want of a trainer, as they were at one moment."""

    def __init__(self, jobs: JobStore, lease_ms: int) -> None:
        """lease_ms: how long a lease lasts."""
        self._jobs = jobs
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._found: list[Vacancy] = []

    def wanted_by(self, trainer_id: str, since: float) -> list[str]:
        """Jobs that this trainer may lease, oldest first; read no earlier than `since` (time.monotonic)."""
        # Who waits here for another's reading takes its result: hundreds of trainers cost at most two readings.
        with self._lock:
            if self._read_at < since:
                began = time.monotonic()
                self._found = self._read()
                self._read_at = began
            found = self._found
        return [vacancy.job_id for vacancy in found if vacancy.holder in ("", trainer_id)]

    def _read(self) -> list[Vacancy]:
        job_ids = self._jobs.in_states(LEASABLE)
        with self._jobs.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(redis_keys.job_record(job_id), "trained_steps")
            trained = replies_by_key(pipe)
        untrained = [job_id for job_id, steps in zip(job_ids, trained, strict=True) if steps is None]
        leases = read_leases(self._jobs.client, untrained, self._lease_ms)
        found = zip(untrained, leases, strict=True)
        return [Vacancy(job_id, lease.trainer_id if lease.live else "") for job_id, lease in found]


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
                # A job whose keys Redis refuses says so among its waits; the next one gets the trainer.
                with only_this_job():
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
        # Read before it is leased: one whose spec is damaged keeps no trainer.
        self.jobs.spec_document(job_id)
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
