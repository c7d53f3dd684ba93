"""Why a job is slow: who waits for whom, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.orchestrator.container import AppContext
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.jobs.series import training_series
from services.orchestrator.lifecycle.pipeline import DISPATCHER, entries_in_pipeline, troubles_in_pipeline
from spo import redis_keys
from spo.messaging.streams import oldest_unix_ms
from spo.spec.job_state import JobState

RECENT_STEPS = 20


@dataclass(frozen=True)
class Wait:
    """`who` has waited for `whom` for so many seconds; `entries` wait there (None: not a queue)."""

    who: str
    whom: str
    seconds: float
    entries: int | None
    meaning: str


def job_waits(context: AppContext, job_id: str, state: JobState) -> list[Wait]:
    """The waits of at least a tenth of a second, longest first."""
    found = _trainer(context, job_id) if state in (JobState.RUNNING, JobState.PAUSING) else []
    found += _pipeline(context, job_id) if state in (JobState.ESTIMATING, JobState.RUNNING, JobState.PAUSING) else []
    return sorted((wait for wait in found if wait.seconds >= 0.1), key=lambda wait: -wait.seconds)


def _trainer(context: AppContext, job_id: str) -> list[Wait]:
    recent = training_series(context.redis, job_id).columns
    waited = _mean(recent.get("wait_seconds", ()))
    worked = _mean(recent.get("step_seconds", ()))
    if waited is None or worked is None:
        return []
    share = waited / (waited + worked) if waited + worked else 0
    idle = f"of each step {waited:.2f} s are waiting and {worked:.2f} s training: the trainer idles {share:.0%}"
    return [Wait("trainer", "a batch from the replay buffer", waited, None, idle)]


def _mean(column: Sequence[float | None]) -> float | None:
    known = [value for value in column[-RECENT_STEPS:] if value is not None]
    return sum(known) / len(known) if known else None


def _pipeline(context: AppContext, job_id: str) -> list[Wait]:
    """How old the oldest entry is of each stream where the job has some; all but `prompts` are shared with others."""
    entries = entries_in_pipeline(context.redis, job_id)
    stages = (
        ("estimates", redis_keys.estimates(), "prompts without a value", "value-estimation", "pi0 is being sampled"),
        ("pivotal", redis_keys.pivotal(), "pivotal searches", "value-estimation", "prefixes are being rolled out"),
        ("prompts", redis_keys.prompts(job_id), "prompts", "inference", "some always wait, so that no replica idles"),
        ("rollouts", redis_keys.rollouts(), "responses", "sandbox-judge", "long waits ask for more judges"),
        ("verifier_rollouts", redis_keys.verifier_rollouts(), "responses", "verifier", "services outside may be slow"),
        ("verdicts", redis_keys.verdicts(), "judged responses", "replay-buffer", "it stores them and may be full"),
    )
    now = now_ms()
    troubles = troubles_in_pipeline(context.redis, job_id)
    waits = []
    if trouble := troubles.get(DISPATCHER):
        seconds = max(0, now - trouble.since_unix_ms) / 1000
        waits.append(Wait("the dispatcher", "room in the replay buffer", seconds, None, trouble.reason))
    for name, stream, who, whom, meaning in stages:
        since = oldest_unix_ms(context.redis, stream)
        if since is not None and entries[name]:
            why = f"tried again and again: {troubles[name].reason}" if name in troubles else meaning
            waits.append(Wait(who, whom, max(0, now - since) / 1000, entries[name], why))
    return waits
