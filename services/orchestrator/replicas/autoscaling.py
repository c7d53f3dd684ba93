"""Reads what `demand` needs from Redis and heartbeats, every few seconds; /metrics exports what is wanted."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.series import steps_after
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import SERVED, ReplicaAssigner
from services.orchestrator.replicas.demand import UTILISATION, JobFacts, PoolDemand
from services.orchestrator.replicas.traffic import ServingTraffic
from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.streams import depth, entries_of_run
from spo.observability.logs import get_logger
from spo.rpc.judge_pools import JudgePools
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.spec.verifier import verifiers_in

log = get_logger("autoscaling")

OBSERVE_SECONDS = 2.0
_STREAMS = (redis_keys.rollouts(), redis_keys.verifier_rollouts(), redis_keys.verdicts())


class Autoscaling:
    """Keeps `wanted` up to date while this orchestrator leads; whoever starts replicas reads it."""

    def __init__(
        self,
        jobs: JobStore,
        assigner: ReplicaAssigner,
        judges: JudgePools,
        traffic: ServingTraffic,
        streams_per_replica: int,
    ) -> None:
        self.jobs = jobs
        self.assigner = assigner
        self.judges = judges
        self.traffic = traffic
        self.streams_per_replica = streams_per_replica
        self.demand = PoolDemand()
        self._steps: dict[str, int] = {}

    def run(self, stop: threading.Event) -> None:
        """Observe until stop."""
        while not stop.is_set():
            try:
                self.observe(time.monotonic())
            except redis.RedisError as error:
                log.warning("replicas wanted are as before: Redis does not answer", reason=str(error))
            stop.wait(OBSERVE_SECONDS)

    @property
    def wanted(self) -> dict[str, int]:
        """Replicas wanted by pool."""
        return dict(self.demand.wanted)

    def observe(self, at: float) -> dict[str, int]:
        """Take in what is so now."""
        loads: dict[str, dict[str, float]] = defaultdict(dict)
        pool_busy: dict[str, float] = defaultdict(float)
        for replica in self.assigner.replicas.live():
            if not replica.draining:
                pool_busy[replica.pool] += replica.load
                if replica.pool == "inference":
                    loads[replica.run_id][replica.replica_id] = replica.load
        served = self.jobs.in_states(SERVED)
        facts = [found for run_id in served if (found := self._facts(run_id, loads.get(run_id, {})))]
        for ended in self._steps.keys() - set(served):
            del self._steps[ended]
        streams = sum(most for run_id, most in self.traffic.take_most().items() if run_id not in served)
        return self.demand.observe(at, facts, pool_busy, self._least(served), streams / self.streams_per_replica)

    def _facts(self, run_id: str, loads: Mapping[str, float]) -> JobFacts | None:
        client = self.jobs.client
        try:
            spec, state = self.jobs.spec(run_id), self.jobs.state(run_id)
        except NotFound:
            return None
        step, waited_seconds, worked_seconds = steps_after(client, run_id, self._steps.get(run_id))
        self._steps[run_id] = step
        replay, samples = spec.replay, spec.rollout.samples_per_prompt
        inserted = int(client.hget(redis_keys.replay_counters(run_id), "inserted:online") or 0)
        entries = entries_of_run(client, run_id, redis_keys.prompts(run_id), _STREAMS)
        estimates = depth(client, redis_keys.estimates(), redis_keys.VALUE_GROUP)
        return JobFacts(
            run_id,
            loads,
            delivered=inserted / samples,
            in_flight=sum(entries.values()),
            taken=replay.online_share * spec.trainer.batch_size / replay.samples_per_insert / samples,
            step=step,
            waited_seconds=waited_seconds,
            worked_seconds=worked_seconds,
            requests_wait=state is JobState.ESTIMATING and estimates.lag > 0,
        )

    def _least(self, served: list[str]) -> Mapping[str, int]:
        """One replica of each pool that somebody needs, and of inference one for each job that may begin.

        Besides of inference, where people use policies, what names ask to be kept and one for each other model; of the
        judges one while stored trajectories are judged, or wait for it.
        """
        needed = self.judges.needed
        return {pool: max(least, int(pool in needed)) for pool, least in self._least_of_jobs(served).items()}

    def _least_of_jobs(self, served: list[str]) -> dict[str, int]:
        waiting = len(self.jobs.in_states((JobState.QUEUED,))) + int(self.jobs.client.zcard(own_keys.resuming()))
        evaluations = int(self.jobs.client.zcard(own_keys.open_evaluations()))
        worked_on = self.assigner.worked_on()
        people = self._least_for_people(worked_on)
        if not (served or waiting or evaluations or worked_on):
            return dict.fromkeys(UTILISATION, 0) | {"inference": people}
        trainers = self.assigner.replicas.counts().get("trainer", 0)
        least = {"inference": max(1, min(len(served) + waiting, trainers)) + people, "sandbox-judge": 1}
        asks = waiting or evaluations or any(map(self._asks_verifiers, served))
        return least | {"verifier": int(bool(asks))}

    def _least_for_people(self, worked_on: Mapping[str, int]) -> int:
        """Replicas for runs that people use, beside those of jobs, which serve every run of their models."""
        models = set(map(self._model, worked_on))
        least = 0
        kept = self.assigner.kept_warm()
        for run_id in kept.keys() - worked_on.keys():
            least += kept[run_id]
            models.add(self._model(run_id))
        return least + len({self._model(run_id) for run_id in self.assigner.in_use()} - models)

    def _model(self, run_id: str) -> str:
        """What one engine can hold for several runs; "" of a run that is gone."""
        try:
            model = self.jobs.spec(run_id).model
        except NotFound:
            return ""
        return f"{model.path} {model.dtype}"

    def _asks_verifiers(self, run_id: str) -> bool:
        try:
            return asks_verifiers(self.jobs.spec(run_id))
        except NotFound:
            return False


def asks_verifiers(spec: JobSpec) -> bool:
    """Whether a job's responses or conversations need the pool of verifiers."""
    kinds = {verifier.kind for _, verifier in verifiers_in(spec.tasks.verifier)}
    return bool(kinds & {"http", "model"}) or spec.tasks.environment is not None
