"""Watches a job from outside: who waits for whom, samples of its pipeline over time, and when nothing moves."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.evaluation.schedule import failures_of
from services.orchestrator.jobs.commit import Commit, Write
from services.orchestrator.jobs.leases import Leases, now_ms
from services.orchestrator.jobs.series import latest_point, latest_step
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.pipeline import entries_in_pipeline, troubles_in_pipeline
from services.orchestrator.lifecycle.shared_rollout_rules import state_in_words
from services.orchestrator.lifecycle.trainer_deaths import trouble_of_trainer
from services.orchestrator.replicas.assignment import ReplicaAssigner
from spo import redis_keys
from spo.spec.job_state import JobState
from spo.spec.verifier import verifiers_in
from spo.tasks.verifier_pool import SANDBOX_JUDGE, VERIFIER

SAMPLE_SECONDS = 2.0
MAX_SAMPLES = 20_000
# Those whose heartbeats say how busy they are.
MEASURED_POOLS = ("inference", "sandbox-judge", "verifier")
STAGES = (
    ("prompts", "inference"),
    ("rollouts", "sandbox-judge"),
    ("verifier_rollouts", "verifier"),
    ("verdicts", "replay-buffer"),
)


class JobMonitor:
    """Samples the pipeline of active jobs and reports a standstill once."""

    def __init__(self, jobs: JobStore, leases: Leases, assigner: ReplicaAssigner, stall_seconds: float) -> None:
        self.jobs = jobs
        self.leases = leases
        self.assigner = assigner
        self.replicas = assigner.replicas
        self.stall_seconds = stall_seconds
        self._sampled_at: dict[str, float] = {}
        self._progress: dict[str, tuple[object, float]] = {}
        self._noted: dict[str, str] = {}
        self._pool_facts: tuple[float, dict[str, float]] = (float("-inf"), {})

    def observe(self, job_id: str) -> None:
        """Take a sample when one is due, and add an event when nothing moved for stall_seconds."""
        now = time.monotonic()
        if now - self._sampled_at.get(job_id, -SAMPLE_SECONDS) < SAMPLE_SECONDS:
            return
        self._sampled_at[job_id] = now
        self._sample(job_id)
        progress = self._progress_of(job_id)
        before, since = self._progress.get(job_id, (None, now))
        if progress != before:
            self._progress[job_id] = (progress, now)
        elif now - since > self.stall_seconds:
            self._progress[job_id] = (progress, float("inf"))
            reasons = self.waits(job_id, self.jobs.state(job_id))
            self.jobs.append(job_id, "stalled", {"seconds": self.stall_seconds, "waits": reasons})

    def forget(self, active: Sequence[str]) -> None:
        """Drop what is remembered of jobs that ended."""
        for ended in self._sampled_at.keys() - set(active):
            del self._sampled_at[ended]
            self._progress.pop(ended, None)
        for ended in self._noted.keys() - set(active):
            del self._noted[ended]

    def note_wait(self, job_id: str, reason: str) -> None:
        """Remember what the orchestrator's own step of a job waits for; "" for nothing."""
        if reason:
            self._noted[job_id] = reason
        else:
            self._noted.pop(job_id, None)

    def waits(self, job_id: str, state: JobState) -> list[str]:
        """Who waits for whom right now, in words; the first is the likeliest reason of a standstill."""
        noted = [self._noted[job_id]] if job_id in self._noted else []
        if state not in (JobState.ESTIMATING, JobState.RUNNING):
            return noted
        waiting = entries_in_pipeline(self.jobs.client, job_id)
        troubles = troubles_in_pipeline(self.jobs.client, job_id)
        found = noted + [f"{place}: {trouble.reason}" for place, trouble in troubles.items()]
        failures = failures_of(self.jobs.client, job_id)
        found += [f"the evaluation of step {failure.step}: {failure.message}" for failure in failures]
        if self.assigner.left_out(job_id):
            found.append("no inference replica is assigned to the job: there are fewer than jobs that run")
        if state is JobState.ESTIMATING:
            prompts = waiting["estimates"] or waiting["pivotal"]
            return [
                *found,
                *self._missing("inference", *self._judges(job_id), "value-estimation"),
                *self._problems(job_id),
                f"training waits for {prompts} prompts at value-estimation",
            ]
        found += [
            f"{replica.pool} {replica.replica_id}: {replica.problem}"
            for replica in self.replicas.live()
            if replica.run_id == job_id and replica.problem
        ]
        found += self._missing("inference", *self._judges(job_id), "replay-buffer", "value-estimation")
        if not self.leases.lease(job_id).live and not self.jobs.record(job_id).is_trained:
            found.append("the job waits for a trainer to lease it")
        found += trouble_of_trainer(self.jobs.client, job_id)
        found += self._problems(job_id)
        found += [f"{waiting[stream]} groups wait at {pool}" for stream, pool in STAGES if waiting[stream]]
        if waiting["estimates"]:
            found.append(f"{waiting['estimates']} prompts are estimated while the job trains")
        followed = self.jobs.spec(job_id).rollout.follow
        if followed is not None:
            found.append(f"its shared rollouts come from {followed}, which is {state_in_words(self.jobs, followed)}")
        return found

    def _missing(self, *needed: str) -> list[str]:
        live = self.replicas.counts()
        return [f"no live replica of {pool}" for pool in needed if not live.get(pool)]

    def _judges(self, job_id: str) -> list[str]:
        """The pools that decide about the job's responses."""
        kinds = {verifier.kind for _, verifier in verifiers_in(self.jobs.spec(job_id).tasks.verifier)}
        asked = kinds & {"http", "model"}
        return [pool for pool, needed in ((SANDBOX_JUDGE, kinds - asked), (VERIFIER, asked)) if needed]

    def _problems(self, job_id: str) -> list[str]:
        """What the replicas that shall serve the job say is wrong."""
        serving = self.assigner.serving(job_id)
        replicas = [replica for replica in self.replicas.live() if replica.problem and replica.replica_id in serving]
        return [f"replica {replica.replica_id}: {replica.problem}" for replica in replicas]

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
        writes: list[Write] = [("ZADD", key, at, json.dumps(sample)), ("ZREMRANGEBYRANK", key, 0, -MAX_SAMPLES - 1)]
        self.jobs.commit(Commit(job_id, writes=writes), durable=False)

    def _pools(self) -> dict[str, float]:
        """Live replicas per pool, and the mean share of each pool that idles; one reading does for all jobs."""
        read_at, found = self._pool_facts
        if time.monotonic() - read_at > SAMPLE_SECONDS / 2:
            found = self._read_pools()
            self._pool_facts = time.monotonic(), found
        return found

    def _read_pools(self) -> dict[str, float]:
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

    def _progress_of(self, job_id: str) -> object:
        """Equal as long as nothing has moved."""
        client = self.jobs.client
        return (
            self.jobs.state(job_id),
            client.hlen(redis_keys.run_values(job_id)),
            client.hlen(redis_keys.run_pivotal(job_id)),
            latest_step(client, job_id),
            client.hlen(own_keys.evaluations(job_id)),
            client.hget(redis_keys.replay_counters(job_id), "number"),
        )
