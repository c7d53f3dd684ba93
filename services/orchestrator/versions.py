"""The weight versions of a job: recorded and announced by its trainer, announced again by people, and listed."""

from __future__ import annotations

import json
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit, CommitOutcome, Fence, Precondition, now_ms, timestamp
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.errors import Conflict, NotFound
from spo.messaging.streams.entries import append_words
from spo.observability import POLICY_VERSION
from spo.spec.section import ACTIVE
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.weights_pb2 import WeightAnnouncement

REFERENCE_VERSION = 0


def publish_version(jobs: JobStore, request: wire.PublishWeightsRequest) -> bool:
    """Record and announce a version; the same version again changes nothing.

    Raises LeaseLost for a stale trainer, Conflict (code "version_taken") for other bytes under a known number.
    """
    job_id = request.run_id
    announcement = WeightAnnouncement(
        run_id=job_id,
        version=request.version,
        step=request.step,
        uri=request.uri,
        manifest_digest=request.manifest_digest,
        announced_unix_ms=now_ms(),
        broadcast=request.broadcast if request.HasField("broadcast") else None,
    )
    version = {
        "version": request.version,
        "step": request.step,
        "uri": request.uri,
        "manifest_digest": request.manifest_digest,
        "size_bytes": request.size_bytes,
        "published_at": timestamp(),
    }
    outcome = jobs.fenced(
        Commit(
            job_id,
            sorted(ACTIVE),
            fence=Fence(request.trainer_id, request.epoch),
            guard=Precondition(own_keys.job_weights(job_id), str(request.version)),
            writes=[
                ("HSET", own_keys.job_weights(job_id), request.version, json.dumps(version)),
                append_words(redis_keys.weights(job_id), announcement.SerializeToString()),
            ],
            kind="weights",
            body=json.dumps({"action": "announced", "version": request.version, "step": request.step}),
        )
    )
    _check_repeat(outcome, request)
    POLICY_VERSION.labels(role="announced").set(request.version)
    return True


def _check_repeat(outcome: CommitOutcome, request: wire.PublishWeightsRequest) -> None:
    if outcome.verdict == "state":
        raise Conflict(f"job {request.run_id} is {outcome.state}; it takes no weights", code="job_not_active")
    if outcome.verdict == "guard" and json.loads(outcome.guard_value)["manifest_digest"] != request.manifest_digest:
        raise Conflict(
            f"version {request.version} of {request.run_id} was published with another digest",
            code="version_taken",
        )


def announce_version(jobs: JobStore, job_id: str, version: int, action: str, actor: str = "api") -> WeightAnnouncement:
    """Announce a published version, or the reference, again ("pushed" or "rolled_back"). NotFound, Conflict."""
    published = _published(jobs, job_id, version)
    announcement = WeightAnnouncement(
        run_id=job_id,
        version=version,
        step=published["step"],
        uri=published["uri"],
        manifest_digest=published["manifest_digest"],
        announced_unix_ms=now_ms(),
    )
    outcome = jobs.commit(
        Commit(
            job_id,
            sorted(ACTIVE),
            writes=[append_words(redis_keys.weights(job_id), announcement.SerializeToString())],
            kind="weights",
            body=json.dumps({"action": action, "version": version, "step": published["step"]}),
            actor=actor,
        )
    )
    if not outcome.done:
        raise Conflict(f"job {job_id} is {outcome.state}; it serves no weights", code="job_not_active")
    return announcement


def _published(jobs: JobStore, job_id: str, version: int) -> dict[str, Any]:
    if version == REFERENCE_VERSION:
        return {"step": 0, "uri": "", "manifest_digest": ""}
    raw = jobs.client.hget(own_keys.job_weights(job_id), str(version))
    if raw is None:
        raise NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")
    published: dict[str, Any] = json.loads(raw)
    return published


def announced_version(jobs: JobStore, job_id: str) -> WeightAnnouncement | None:
    """The announcement replicas should be at; None while only the reference (version 0) exists."""
    newest = jobs.client.xrevrange(redis_keys.weights(job_id), count=1)
    return announcement_of(newest[0]) if newest else None


def published_versions(jobs: JobStore, job_id: str) -> list[dict[str, Any]]:
    """Every published version, oldest first."""
    found = jobs.client.hgetall(own_keys.job_weights(job_id))
    return sorted((json.loads(raw) for raw in found.values()), key=lambda announced: int(announced["version"]))


def announcement_of(entry: tuple[bytes, dict[bytes, bytes]]) -> WeightAnnouncement:
    """Decode one entry of a run's weights stream."""
    announcement = WeightAnnouncement.FromString(entry[1][b"payload"])
    announcement.entry_id = entry[0].decode()
    return announcement
