"""A cluster on a virtual clock: the real dispatcher, limiter, assignment and demand; replicas and trainers of numbers.

Prompts go through a real Redis. A replica decodes up to FULL groups side by side, each at its own pace, so one that has
fewer in hand makes fewer; a judge takes JUDGED_PER_SECOND groups; a trainer works `step_seconds` on each batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.horizontal_autoscaler import HorizontalAutoscaler
from benchmarks.peers.pipeline import running_job
from services.orchestrator.autoscaling import JobFacts, PoolDemand
from services.orchestrator.datasets import TaskLibrary
from services.orchestrator.dispatch import PromptDispatcher
from services.orchestrator.jobs import IN_REDIS, JobStore
from services.orchestrator.pipeline import groups_in_pipeline
from services.orchestrator.replicas import GroupsInHand, LiveReplica, assign
from services.replay_buffer.windows import Limiter, LiveCounts
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.entries import Entry
from spo.messaging.streams.stage import Consumer
from spo.spec.section import JobState
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse

FULL = 32
GROUP_SECONDS = 16.0
JUDGED_PER_SECOND = 4.0
START_SECONDS = 20.0
OBSERVE_SECONDS = 2
MOST_REPLICAS = 16
# Groups a second that one replica alone makes.
PACE = FULL / GROUP_SECONDS
SPEC: dict[str, Any] = {
    "model": {"path": "/pi0"},
    "tasks": {"kind": "toy", "train_problems": 200, "evaluation_problems": 6},
    "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
    "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}], "online_capacity": 16_384},
    "rollout": {"samples_per_prompt": 8},
    "value": None,
    "evaluation": {"interval_steps": 1_000_000},
}


@dataclass
class SimulatedJob:
    """A job that runs: its trainer's time for a batch, and what the replay buffer has counted."""

    run_id: str
    limiter: Callable[[int], Limiter]
    consumer: Consumer
    step_seconds: float
    sampled: int = 0
    finished: int = 0
    step: int = 0
    wait_seconds: float = 0.0
    work_seconds: float = 0.0
    _left: float = 0.0
    _waited: float = 0.0

    def counts(self) -> LiveCounts:
        """What the limiter weighs."""
        one = self.limiter(1)
        inserted = self.finished * one.group
        return LiveCounts(inserted, self.sampled, min(inserted, one.capacity))

    def train(self, seconds: float) -> None:
        """Let time pass at the trainer."""
        one = self.limiter(1)
        while seconds > 1e-9:
            if self._left <= 0:
                if not one.may_sample(self.counts(), one.per_batch):
                    self._waited += seconds
                    return
                self.sampled += one.per_batch
                self._left = self.step_seconds
            used = min(seconds, self._left)
            self._left -= used
            seconds -= used
            if self._left <= 1e-9:
                self.step += 1
                self.wait_seconds += self._waited
                self.work_seconds += self.step_seconds
                self._waited = self._left = 0.0

    @property
    def needs(self) -> float:
        """Replicas whose rollouts would never let its trainer wait."""
        one = self.limiter(1)
        return one.per_batch / one.samples_per_insert / one.group / self.step_seconds / PACE


@dataclass
class SimulatedReplica:
    """One inference pod: when it was made, and the groups it decodes with the seconds that each has left."""

    made_at: float
    run_id: str = ""
    groups: list[list[Any]] = field(default_factory=list)

    def decode(self, seconds: float) -> list[Entry]:
        """Let time pass; returns what has finished."""
        pace = min(1.0, FULL / max(1, len(self.groups)))
        for group in self.groups:
            group[1] -= seconds * pace
        done = [entry for entry, left in self.groups if left <= 0]
        self.groups = [group for group in self.groups if group[1] > 0]
        return done


class SimulatedCluster:
    """Everything above, a second at a time; `behavior` None keeps the pool at the size that is set."""

    def __init__(self, client: RedisClient, behavior: Any, seed: int = 0, replicas: int = 0) -> None:
        self.client = client
        self.jobs = JobStore(client, durable=IN_REDIS)
        self.now = 0.0
        self.draw = random.Random(seed)
        self.running: dict[str, SimulatedJob] = {}
        self.replicas: dict[str, SimulatedReplica] = {}
        self.ready: dict[str, SimulatedReplica] = {}
        self.judging: list[tuple[SimulatedJob, Entry]] = []
        self.judge_load = 0.0
        self.demand = PoolDemand()
        self.in_hand = GroupsInHand(self._live, lambda: self.now)
        self.dispatcher = PromptDispatcher(self.jobs, TaskLibrary(), self, 4, self.in_hand)  # type: ignore[arg-type]
        self.fixed = replicas if behavior is None else None
        self.scalers = {
            pool: HorizontalAutoscaler(behavior or {}, most, replicas=1)
            for pool, most in (("inference", MOST_REPLICAS), ("sandbox-judge", 8))
        }
        # Seconds, inference replicas that are ready, and what the jobs need.
        self.history: list[tuple[float, int, int, float]] = []
        self._told: dict[str, tuple[float, float]] = {}

    def submit(self, step_seconds: float) -> SimulatedJob:
        """A job whose trainer takes so long for a batch."""
        run_id = running_job(self.client, SPEC)
        spec = self.jobs.spec(run_id)
        limiters: dict[int, Limiter] = {}

        def limiter(replicas: int) -> Limiter:
            return limiters.setdefault(replicas, Limiter.of(spec, replicas=replicas))

        consumer = Consumer(self.client, redis_keys.prompts(run_id), redis_keys.INFERENCE_GROUP, "simulated")
        job = SimulatedJob(run_id, limiter, consumer, step_seconds)
        self.running[run_id] = job
        return job

    def end(self, job: SimulatedJob) -> None:
        """The job has what it wanted."""
        self.jobs.transition(job.run_id, JobState.SUCCEEDED, "simulated", expected=(JobState.RUNNING,))
        del self.running[job.run_id]
        self._told.pop(job.run_id, None)

    def call(self, method: str, request: GetReplayStatusRequest, deadline_seconds: float) -> GetReplayStatusResponse:
        """The replay buffer's answer to the dispatcher."""
        assert method == "GetReplayStatus"
        job = self.running[request.run_id]
        limiter = job.limiter(request.replicas)
        return GetReplayStatusResponse(
            admissible_inserts=limiter.admissible_inserts(job.counts()),
            groups_per_replica=limiter.groups_per_replica(request.replicas),
        )

    def run(self, seconds: float, each: Callable[[float], None] = lambda at: None) -> None:
        """Let so many seconds pass."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            each(self.now)
            self._scale()
            for job in self.running.values():
                self.dispatcher.dispatch(job.run_id)
            self._sample()
            self._judge()
            for job in self.running.values():
                job.train(1.0)
            need = sum(job.needs for job in self.running.values())
            self.history.append((self.now, len(self.ready), self.scalers["inference"].replicas, need))

    def _scale(self) -> None:
        if self.now % OBSERVE_SECONDS == 0:
            busy = {"inference": sum(map(self._load, self.ready.values())), "sandbox-judge": self.judge_load}
            least = int(bool(self.running))
            self.demand.observe(
                self.now,
                [self._facts(job) for job in self.running.values()],
                busy,
                {"inference": max(least, len(self.running)), "sandbox-judge": least},
            )
        if self.fixed is None:
            for pool, scaler in self.scalers.items():
                scaler.look(self.now, self.demand.wanted[pool])
        wanted = self.scalers["inference"].replicas if self.fixed is None else self.fixed
        while len(self.replicas) < wanted:
            self.replicas[f"r{self.now:.0f}-{len(self.replicas)}"] = SimulatedReplica(self.now)
        for name in list(self.replicas)[wanted:]:
            gone = self.replicas.pop(name)
            if gone.run_id in self.running:
                self.running[gone.run_id].consumer.release([entry for entry, _ in gone.groups])
        self.ready = {name: each for name, each in self.replicas.items() if self.now - each.made_at >= START_SECONDS}
        self._assign()

    def _assign(self) -> None:
        current = {name: replica.run_id for name, replica in self.ready.items()}
        for name, run_id in assign(list(self.ready), current, dict.fromkeys(self.running, 1)).items():
            replica = self.ready[name]
            if replica.run_id != run_id:
                if replica.run_id in self.running:
                    self.running[replica.run_id].consumer.release([entry for entry, _ in replica.groups])
                replica.run_id, replica.groups = run_id, []

    def _load(self, replica: SimulatedReplica) -> float:
        return min(1.0, len(replica.groups) / min(FULL, self.in_hand.of(replica.run_id) or FULL))

    def _facts(self, job: SimulatedJob) -> JobFacts:
        loads = {name: self._load(each) for name, each in self.ready.items() if each.run_id == job.run_id}
        waited, worked = self._told.get(job.run_id, (0.0, 0.0))
        self._told[job.run_id] = job.wait_seconds, job.work_seconds
        waited, worked = job.wait_seconds - waited, job.work_seconds - worked
        in_flight = groups_in_pipeline(self.client, job.run_id)
        one = job.limiter(1)
        taken = one.per_batch / one.samples_per_insert / one.group
        return JobFacts(job.run_id, loads, job.finished, in_flight, taken, job.step, waited, worked)

    def _sample(self) -> None:
        for replica in self.ready.values():
            job = self.running.get(replica.run_id)
            if job is None:
                continue
            self.judging += [(job, entry) for entry in replica.decode(1.0)]
        for job in self.running.values():
            self._hand_out(job, [each for each in self.ready.values() if each.run_id == job.run_id])

    def _hand_out(self, job: SimulatedJob, replicas: Sequence[SimulatedReplica]) -> None:
        most = self.in_hand.of(job.run_id) or 2 * FULL
        room = sum(max(0, most - len(each.groups)) for each in replicas)
        entries = job.consumer.read(room, 0.001) if room else []
        for replica in replicas:
            while entries and len(replica.groups) < most:
                replica.groups.append([entries.pop(), GROUP_SECONDS * self.draw.uniform(0.5, 1.5)])

    def _judge(self) -> None:
        judges = self.scalers["sandbox-judge"].replicas if self.fixed is None else 8
        share = int(judges * JUDGED_PER_SECOND)
        taken, self.judging = self.judging[:share], self.judging[share:]
        self.judge_load = len(taken) / JUDGED_PER_SECOND
        for job in self.running.values():
            entries = [entry for owner, entry in taken if owner is job]
            if entries:
                job.consumer.finish(entries)
                job.finished += len(entries)

    def _live(self) -> list[LiveReplica]:
        return [
            LiveReplica(name, "inference", "", 0, each.run_id, 0, 0.0, False, "", frozenset(), (), False, "", 0)
            for name, each in self.ready.items()
        ]
