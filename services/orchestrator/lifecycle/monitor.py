"""Looks at a job from outside: queue depths, who waits for whom, what was given up on."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from statistics import fmean

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.leases import Leases, now_ms
from services.orchestrator.jobs.series import evaluation_results, latest_point, latest_step
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.pipeline import entries_in_pipeline
from services.orchestrator.lifecycle.shared_rollout_rules import state_in_words
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.registry import ReplicaRegistry
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import JobState
from spo.v1.trajectory_pb2 import RolloutGroup
from spo.v1.value_pb2 import EstimateRequest

SAMPLE_SECONDS = 2.0
MAX_SAMPLES = 20_000
MIN_DEAD_LETTERS = 3
MAX_DEAD_READ = 10_000
# Those whose heartbeats tell how busy they are.
MEASURED_POOLS = ("inference", "sandbox-judge")


def dead_letters(client: RedisClient, run_id: str) -> dict[str, int]:
    """Entries of the run that were given up on, per stream."""
    counts = {"prompts": client.xlen(redis_keys.dead_letters(redis_keys.prompts(run_id)))}
    for name, stream in (("rollouts", redis_keys.rollouts()), ("verdicts", redis_keys.verdicts())):
        payloads = _dead_payloads(client, stream)
        counts[name] = sum(RolloutGroup.FromString(raw).request.run_id == run_id for raw in payloads)
    counts["estimates"] = len(dead_requests(client, run_id, redis_keys.estimates()))
    return counts


def dead_requests(client: RedisClient, run_id: str, stream: str) -> set[str]:
    """Prompts of the run that value-estimation gave up on, on the stream `estimates` or `pivotal`."""
    # A PivotalRequest has the first two fields of an EstimateRequest, and no others.
    requests = map(EstimateRequest.FromString, _dead_payloads(client, stream))
    return {request.prompt.prompt_id for request in requests if request.run_id == run_id}


def _dead_payloads(client: RedisClient, stream: str) -> list[bytes]:
    found = client.xrevrange(redis_keys.dead_letters(stream), count=MAX_DEAD_READ)
    return [fields[b"payload"] for _, fields in found]


def waits(
    jobs: JobStore, replicas: ReplicaRegistry, leases: Leases, assigner: ReplicaAssigner, job_id: str, state: JobState
) -> list[str]:
    """Who waits for whom right now, in words; the first is the likeliest reason of a standstill."""
    if state not in (JobState.ESTIMATING, JobState.RUNNING):
        return []
    pools = replicas.counts()
    waiting = entries_in_pipeline(jobs.client, job_id)
    found = []
    if assigner.left_out(job_id):
        found.append("no inference replica is assigned to the job: there are fewer than jobs that run")
    if state is JobState.ESTIMATING:
        prompts = waiting["estimates"] or waiting["pivotal"]
        return [
            *found,
            *_missing(pools, "inference", "sandbox-judge", "value-estimation"),
            f"training waits for {prompts} prompts at value-estimation",
        ]
    found += _missing(pools, "inference", "sandbox-judge", "replay-buffer", "value-estimation")
    if not leases.lease(job_id).live and "trained_steps" not in jobs.record(job_id):
        found.append("the job waits for a trainer to lease it")
    stages = (("prompts", "inference"), ("rollouts", "sandbox-judge"), ("verdicts", "replay-buffer"))
    found += [f"{waiting[stream]} groups wait at {pool}" for stream, pool in stages if waiting[stream]]
    followed = jobs.spec(job_id).rollout.follow
    if followed is not None:
        found.append(f"its shared rollouts come from {followed}, which is {state_in_words(jobs, followed)}")
    return found


def _missing(pools: dict[str, int], *needed: str) -> list[str]:
    return [f"no live replica of {pool}" for pool in needed if not pools.get(pool)]


class Watch:
    """Samples the belt of active jobs and tells of standstills, once each."""

    def __init__(
        self, jobs: JobStore, replicas: ReplicaRegistry, leases: Leases, assigner: ReplicaAssigner, stall_seconds: float
    ) -> None:
        self.jobs = jobs
        self.replicas = replicas
        self.leases = leases
        self.assigner = assigner
        self.stall_seconds = stall_seconds
        self._sampled_at: dict[str, float] = {}
        self._progress: dict[str, tuple[object, float]] = {}

    def look(self, job_id: str) -> None:
        """Take a sample when one is due and report a standstill when nothing moved for stall_seconds."""
        now = time.monotonic()
        if now - self._sampled_at.get(job_id, -SAMPLE_SECONDS) < SAMPLE_SECONDS:
            return
        self._sampled_at[job_id] = now
        self._sample(job_id)
        mark = self._mark(job_id)
        before, since = self._progress.get(job_id, (None, now))
        if mark != before:
            self._progress[job_id] = (mark, now)
        elif now - since > self.stall_seconds:
            self._progress[job_id] = (mark, float("inf"))
            state = self.jobs.state(job_id)
            reasons = waits(self.jobs, self.replicas, self.leases, self.assigner, job_id, state)
            self.jobs.append(job_id, "stalled", {"seconds": self.stall_seconds, "waits": reasons})

    def forget(self, active: list[str]) -> None:
        """Drop what is remembered of jobs that ended."""
        for ended in set(self._sampled_at) - set(active):
            del self._sampled_at[ended]
            self._progress.pop(ended, None)

    def _sample(self, job_id: str) -> None:
        key = own_keys.job_platform_series(job_id)
        at = now_ms()
        waiting = entries_in_pipeline(self.jobs.client, job_id)
        sample: dict[str, float] = {
            "at_unix_ms": at,
            "step": latest_step(self.jobs.client, job_id),
            **waiting,
            **self._pools(),
        }
        sample |= self._trainer(job_id)
        self.jobs.client.zadd(key, {json.dumps(sample): at})
        self.jobs.client.zremrangebyrank(key, 0, -MAX_SAMPLES - 1)

    def _pools(self) -> dict[str, float]:
        """Replicas per pool, and the mean share of them that idles."""
        loads: dict[str, list[float]] = defaultdict(list)
        for replica in self.replicas.live():
            loads[replica.pool].append(replica.load)
        counts = {f"replicas_{pool}": float(len(found)) for pool, found in loads.items()}
        idle = {f"idle_{pool}": 1 - min(1.0, fmean(found)) for pool, found in loads.items() if pool in MEASURED_POOLS}
        return counts | idle

    def _trainer(self, job_id: str) -> dict[str, float]:
        newest = latest_point(self.jobs.client, job_id)
        waited, worked = newest.get("wait_seconds", 0.0), newest.get("step_seconds", 0.0)
        return {"idle_trainer": waited / (waited + worked)} if waited + worked > 0 else {}

    def _mark(self, job_id: str) -> object:
        client = self.jobs.client
        return (
            self.jobs.state(job_id),
            client.hlen(redis_keys.run_values(job_id)),
            client.hlen(redis_keys.run_pivotal(job_id)),
            latest_step(client, job_id),
            len(evaluation_results(client, job_id)),
            client.zcard(redis_keys.replay_ids(job_id)),
        )
