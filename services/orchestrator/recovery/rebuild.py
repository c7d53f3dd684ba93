"""Lost jobs made again from their manifests and from what is on disk: their weights and checkpoints.

What only Redis had is gone: events, curves, values, evaluations and the replay buffer. So a job that had not ended
comes back as failed, with the reason records_lost, and may be forked; or, where somebody asks for it, it is queued
again: values are estimated anew, and training goes on from the newest checkpoint with an empty replay buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.checkpoints import CheckpointRecord, recorded_checkpoints
from services.orchestrator.jobs.commit import Commit, Precondition, Write, timestamp
from services.orchestrator.jobs.files import JobFiles
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.jobs.listing import label_writes
from services.orchestrator.jobs.record import write_fields
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.recovery.manifests import JobManifest
from spo import redis_keys
from spo.errors import IntegrityError, NotFound
from spo.messaging.streams import append_words
from spo.observability.logs import get_logger
from spo.spec.job_state import TERMINAL, JobState
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.assembly import digest_of, whole_entries

log = get_logger("rebuild")


# Leases that may have been granted after the last manifest was written.
UNSEEN_LEASES = 10
# What is asked of the trainer or was done for the values: of the time before the loss.
_PASSING = (
    "checkpoint_asked",
    "resume_asked",
    "estimates_published",
    "pivotal_published",
    "reference_asked",
    "reference_total",
    "prompts_total",
    "evaluation_total",
)


@dataclass(frozen=True)
class Rebuild:
    """A job that has records again; `note` says what it lacks."""

    id: str
    state: str
    note: str


class JobRebuild:
    """Makes records; each job in one atomic step, so that a repetition finds it there and changes nothing."""

    def __init__(self, jobs: JobStore, files: JobFiles) -> None:
        self.jobs = jobs
        self.weights = files.weights
        self.checkpoints = files.checkpoints

    def rebuild(self, manifest: JobManifest, *, resume: bool, actor: str) -> Rebuild:
        """Make the records of one job. Raises NotReady where another release wrote its spec, Unreachable."""
        versions, checkpoints = self._weights(manifest), self._checkpoints(manifest)
        state, note = self._end(manifest, resume=resume)
        record = {name: value for name, value in manifest.record.items() if name not in _PASSING}
        writes: list[Write] = [
            ("SET", redis_keys.run_spec(manifest.id), manifest.spec),
            ("HSET", redis_keys.job_record(manifest.id), *(word for pair in record.items() for word in pair)),
            *self._failure(manifest, state, note),
            *self._index(manifest, record),
            # Whoever still holds an older lease stays fenced: the next one is above all there may have been.
            ("HSET", own_keys.job_lease(manifest.id), "epoch", manifest.lease_epoch + UNSEEN_LEASES),
            *(("HSET", own_keys.job_weights(manifest.id), each["version"], json.dumps(each)) for each in versions),
            *(
                ("HSET", redis_keys.job_checkpoints(manifest.id), each.step, each.model_dump_json())
                for each in checkpoints
            ),
            *_announcement(manifest.id, versions),
        ]
        body = json.dumps({"reason": f"rebuilt from its manifest of {manifest.saved_at}: {note}"})
        outcome = self.jobs.commit(
            Commit(manifest.id, ("absent",), state, writes=writes, kind="state", body=body, actor=actor)
        )
        if outcome.done:
            log.warning("a lost job has records again", job=manifest.id, state=state.value, note=note)
        return Rebuild(manifest.id, state.value if outcome.done else outcome.state, note)

    def mend(self, job_id: str, before: JobManifest | None) -> bool:
        """Bring a job that Redis holds an older state of up to what the disk proves; whether anything was.

        before: the manifest that Redis is behind of. What trainers reported and is intact is recorded again, what a
        later lease than any that is known wrote is recorded, and no lease or version is given twice. Raises
        Unreachable.
        """
        held = int(self.jobs.client.hget(own_keys.job_lease(job_id), "epoch") or 0)
        known = max(held, before.lease_epoch if before else 0)
        recorded = recorded_checkpoints(self.jobs.client, job_id)
        newest = max(((each.epoch, each.step) for each in recorded), default=(-1, -1))
        reported = self._checkpoints(before) if before else []
        found = {each.step: each for each in [*reported, *self._unknown_checkpoints(job_id, known)]}
        checkpoints = [each for each in found.values() if (each.epoch, each.step) > newest]
        numbers = {int(raw) for raw in self.jobs.client.hkeys(own_keys.job_weights(job_id))}
        offered = [*(self._weights(before) if before else []), *self._unknown_weights(job_id, known)]
        versions = [each for each in offered if each["version"] > max(numbers, default=0)]
        epoch = max([known, *(each.epoch for each in checkpoints), *(each.get("epoch", 0) for each in versions)])
        if before is None and not checkpoints and not versions:
            return False
        writes: list[Write] = [
            *(("HSET", redis_keys.job_checkpoints(job_id), each.step, each.model_dump_json()) for each in checkpoints),
            *(("HSET", own_keys.job_weights(job_id), each["version"], json.dumps(each)) for each in versions),
            *_announcement(job_id, versions),
        ]
        if epoch > held:
            # Whoever holds an older lease, or one that Redis knows nothing of, is fenced: the next is above all.
            writes.append(("HSET", own_keys.job_lease(job_id), "trainer_id", "", "epoch", epoch + UNSEEN_LEASES))
        best = max([*recorded, *checkpoints], key=lambda each: (each.epoch, each.step), default=None)
        body = {
            "events_known": before.events if before else 0,
            "at": before.saved_at if before else "",
            "goes_on_from_step": best.step if best else 0,
            "checkpoints": sorted(each.step for each in checkpoints),
            "versions": sorted(each["version"] for each in versions),
            "lease_epoch": epoch + UNSEEN_LEASES if epoch > held else held,
        }
        guard = Precondition(own_keys.job_lease(job_id), "epoch", str(held) if held else "")
        commit = Commit(job_id, guard=guard, writes=writes, kind="records_behind", body=json.dumps(body))
        log.error("Redis held an older state of a job; it goes on from what is on disk", job=job_id, **body)
        return self.jobs.commit(commit).done

    def _unknown_checkpoints(self, job_id: str, known_epoch: int) -> Iterator[CheckpointRecord]:
        """Intact ones that a later lease than is known of wrote: nobody else could."""
        for step in self.checkpoints.versions(job_id):
            with suppress(IntegrityError, NotFound):
                manifest = self.checkpoints.manifest(job_id, step)
                if int(manifest["epoch"]) > known_epoch:
                    yield CheckpointRecord(
                        step=step,
                        path=self.checkpoints.uri(job_id, step),
                        manifest_digest=digest_of(manifest),
                        weight_version=int(manifest.get("weight_version", 0)),
                        epoch=int(manifest["epoch"]),
                    )

    def _unknown_weights(self, job_id: str, known_epoch: int) -> Iterator[dict[str, Any]]:
        for version in self.weights.versions(job_id):
            with suppress(IntegrityError, NotFound):
                manifest = self.weights.backend.manifest(job_id, version)
                if int(manifest["epoch"]) > known_epoch:
                    yield {
                        "version": version,
                        "step": int(manifest["step"]),
                        "uri": self.weights.backend.uri(job_id, version),
                        "manifest_digest": digest_of(manifest),
                        "size_bytes": sum(int(entry["size_bytes"]) for entry in whole_entries(manifest)),
                        "published_at": timestamp(),
                        "epoch": int(manifest["epoch"]),
                    }

    def _end(self, manifest: JobManifest, *, resume: bool) -> tuple[JobState, str]:
        """The state that is true of the job now, and why."""
        state = JobState(manifest.state)
        lost = "its events, curves, values, evaluations and replay buffer are lost"
        if state in TERMINAL:
            return state, f"it had {state}; {lost}"
        if state is JobState.CANCELLING:
            return JobState.CANCELLED, f"it was being cancelled; {lost}"
        if not resume:
            return JobState.FAILED, f"it was {state}; {lost}; fork it from a checkpoint, or submit it again"
        if int(manifest.record.get("reference_version", 0)):
            return JobState.FAILED, f"it was {state} under a refreshed reference whose values are lost; {lost}"
        self.jobs.parse_spec(manifest.spec.encode())
        return JobState.QUEUED, f"it was {state}; {lost}; it goes on from its newest checkpoint"

    def _failure(self, manifest: JobManifest, state: JobState, note: str) -> list[Write]:
        if state is not JobState.FAILED or manifest.state == JobState.FAILED:
            return []
        return [write_fields(manifest.id, failure_code="records_lost", failure_message=note)]

    def _index(self, manifest: JobManifest, record: dict[str, str]) -> list[Write]:
        created = int(record["created_unix_ms"])
        return [
            ("ZADD", redis_keys.job_index(), created, manifest.id),
            ("ZADD", own_keys.tenant_jobs(manifest.tenant), created, manifest.id),
            *label_writes(json.loads(record.get("labels", "{}")), manifest.id, created),
        ]

    def _weights(self, manifest: JobManifest) -> list[dict[str, Any]]:
        """The reported versions that are there as they were reported, oldest first."""
        reported = sorted((json.loads(raw) for raw in manifest.weights.values()), key=lambda each: int(each["version"]))
        there = set(self.weights.versions(manifest.id))
        return [each for each in reported if each["version"] in there and self._is_version(manifest.id, each)]

    def _is_version(self, job_id: str, reported: dict[str, Any]) -> bool:
        try:
            found = digest_of(self.weights.backend.manifest(job_id, int(reported["version"])))
        except (IntegrityError, NotFound):
            return False
        return found == str(reported["manifest_digest"])

    def _checkpoints(self, manifest: JobManifest) -> list[CheckpointRecord]:
        """The reported checkpoints that are there as they were reported."""
        reported = [CheckpointRecord.model_validate_json(raw) for raw in manifest.checkpoints.values()]
        return [each for each in reported if self._is_checkpoint(manifest.id, each)]

    def _is_checkpoint(self, job_id: str, reported: CheckpointRecord) -> bool:
        try:
            found = self.checkpoints.manifest(job_id, reported.step)
        except (IntegrityError, NotFound):
            return False
        return digest_of(found) == reported.manifest_digest


def _announcement(job_id: str, versions: Sequence[dict[str, Any]]) -> list[Write]:
    """The newest version, for replicas to sample from."""
    if not versions:
        return []
    newest = versions[-1]
    announced = WeightAnnouncement(
        run_id=job_id,
        version=newest["version"],
        step=newest["step"],
        uri=newest["uri"],
        manifest_digest=newest["manifest_digest"],
        announced_unix_ms=now_ms(),
    )
    return [append_words(redis_keys.weights(job_id), announced.SerializeToString())]
