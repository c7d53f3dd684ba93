"""Which checkpoints a job can be resumed or forked from: what trainers reported under a valid lease, and still keep."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from services.orchestrator.jobs.commit import Write
from services.orchestrator.jobs.files import JobFiles
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.v1 import orchestrator_service_pb2 as wire


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
