"""The state of a job, as every service writes and compares it; the table of transitions is the orchestrator's."""

from __future__ import annotations

from enum import StrEnum

from spo.spec.stored import unreadable


class JobState(StrEnum):
    QUEUED = "queued"
    VALIDATING = "validating"
    ESTIMATING = "estimating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
# Begun and not ended.
ACTIVE = frozenset(JobState) - TERMINAL - {JobState.QUEUED}
# A paused job gives back its slot, its trainer and its replicas; to resume, it waits for a slot again.
HOLDS_SLOT = ACTIVE - {JobState.PAUSED}
# What is computed for such a job may still be used.
WANTED = ACTIVE - {JobState.CANCELLING}
# Training has begun: every training prompt has its value and its offline trajectories, unless the job's record says
# that estimates are pending.
ESTIMATED = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.PAUSED})


def decode_state(stored: bytes | None) -> JobState | None:
    """A state as Redis holds it; None for a job that was never submitted, or is deleted.

    Raises NotReady (code "unreadable_document") for a state of a later release.
    """
    if stored is None:
        return None
    try:
        return JobState(stored.decode())
    except ValueError:
        raise unreadable(f"a job's state {stored.decode()}") from None
