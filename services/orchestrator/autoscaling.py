"""How many replicas each pool needs and has: demand from what is measured, and whoever starts or ends processes.

How many replicas each pool needs, from what the platform measures: trainers' steps and waits, loads, deliveries.
A job's trainer would take so many groups a second if it never waited, and a group keeps so much of a pool busy:

    pace = groups that its steps took / (seconds that passed - seconds that its trainer waited)      groups / s
    cost = busy replicas (the sum of their loads) * seconds / groups delivered                       replica seconds
    need = pace * cost                                                                               replicas

Both are means that fade by half in PACE_SECONDS and COST_SECONDS. What is ahead in the replay buffer and what the
limiter has capped appear in neither: a pool that idles because the buffer is full, or is full because the trainer
waits, gets the same answer. While new replicas have not had time to deliver, their load says nothing and the cost
stays as it was; for a job's first ones it is the mean of the other jobs' costs. Where no job has one yet need = busy,
and twice that while requests for values wait unread. The needs of all jobs add up; pools that jobs share have one cost
per group. People who use policies need, of inference,

    serving = completions under way at once / completions that one replica is meant to take

at its highest, which fades by half in COST_SECONDS; those of runs that jobs have replicas for are in their loads.

    wanted = ceil(need / UTILISATION + serving), kept while that sum is near it (MARGIN_UP, MARGIN_DOWN), at least 1
             while a job runs or waits for its turn or somebody has asked for a policy lately, and of the judges while
             stored trajectories are judged or wait for it; 0 when there is none of these

How many replicas a pool should have: requested here, carried out by whatever starts processes.
local       the launcher of `spo up` follows the numbers in Redis
kubernetes  the number goes to the Deployment, or becomes the lower bound of its KEDA ScaledObject
none        nothing here starts processes: a request is refused
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.job_records import steps_after
from services.orchestrator.jobs import JobStore
from services.orchestrator.replicas import SERVED, ReplicaAssigner
from services.orchestrator.settings import Settings
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotFound, PreconditionFailed, Unreachable
from spo.messaging.redis_client import RedisClient, only_this_job, write_even_when_full
from spo.messaging.streams.entries import depth, entries_of_run
from spo.observability import get_logger
from spo.rpc.pools import JudgePools
from spo.service.process import in_rounds
from spo.spec.job_spec import JobSpec
from spo.spec.section import JobState
from spo.spec.tasks import verifiers_in

UTILISATION = {"inference": 0.9, "sandbox-judge": 0.8, "verifier": 0.8}
PACE_SECONDS = 10.0
COST_SECONDS = 45.0
# Replicas: one more only when so much more is needed than there is, one fewer only when so much of another is idle too.
MARGIN_UP = 0.25
MARGIN_DOWN = 0.5
# Of a group's time in the pipeline, until new replicas count.
SETTLED = 1.25
LONGEST_SETTLING_SECONDS = 900.0
# A trainer that has taken no step for so long, and for so many of its steps, has no pace.
SILENT_SECONDS = 300.0
SILENT_STEPS = 5.0

log = get_logger("scale")

SCALABLE = ("inference", "sandbox-judge", "verifier")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 10

OBSERVE_SECONDS = 2.0
_STREAMS = (redis_keys.rollouts(), redis_keys.verifier_rollouts(), redis_keys.verdicts())


class ServingTraffic:
    """Counted in this process, since one orchestrator leads. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._most: Counter[str] = Counter()

    @contextmanager
    def completion(self, run_id: str) -> Iterator[None]:
        """Count a completion of a run while the body runs."""
        with self._lock:
            self._under_way[run_id] += 1
            self._most[run_id] = max(self._most[run_id], self._under_way[run_id])
        try:
            yield
        finally:
            with self._lock:
                self._under_way[run_id] -= 1
                if not self._under_way[run_id]:
                    del self._under_way[run_id]

    def take_most(self) -> Mapping[str, int]:
        """By run the most completions at once since this was asked last."""
        with self._lock:
            most, self._most = self._most, Counter(self._under_way)
            return most


@dataclass(frozen=True)
class JobFacts:
    """One job as it is now; counts are since its start, `step` is the newest step that was reported.

    loads: by replica of inference; in_flight: groups dispatched and not delivered; taken: groups that one step takes;
    waited_seconds, worked_seconds: the trainer's, in the steps since the last facts; requests_wait: for values, unread.
    """

    run_id: str
    loads: Mapping[str, float]
    delivered: float
    in_flight: float
    taken: float
    step: int
    waited_seconds: float
    worked_seconds: float
    requests_wait: bool = False


class FadingRatio:
    """A ratio of two sums that fade with time; None until it has a denominator."""

    def __init__(self) -> None:
        self._over = 0.0
        self._under = 0.0

    def add(self, over: float, under: float, seconds: float) -> None:
        """Add what happened in so many seconds."""
        kept = math.exp2(-seconds / COST_SECONDS)
        self._over = kept * self._over + over
        self._under = kept * self._under + under

    @property
    def value(self) -> float | None:
        return self._over / self._under if self._under > 0 else None


class _JobDemand:
    """What is remembered of a job."""

    def __init__(self, at: float, facts: JobFacts) -> None:
        self.facts = facts
        self.at = self._stepped_at = self._joined_at = at
        self._cost, self._latency = FadingRatio(), FadingRatio()
        # Groups a second; 0 until the second step.
        self.pace = 0.0
        self.need = 0.0
        self.known = False

    @property
    def cost(self) -> float | None:
        """Replica seconds for a group; None until replicas have had time to deliver."""
        return self._cost.value

    def observe(self, at: float, facts: JobFacts, usual_cost: float | None) -> float:
        """Take in the facts of a moment; returns the groups delivered since the last one.

        usual_cost: what a group costs other jobs, None where none is known.
        """
        passed, before = at - self.at, self.facts
        delivered = max(0.0, facts.delivered - before.delivered)
        if facts.step > before.step:
            elapsed = max(1e-3, at - self._stepped_at)
            steps = facts.step - before.step
            # Steps and looks are not in step: what was waited may lie before, what was worked does not.
            free = max(elapsed - facts.waited_seconds, facts.worked_seconds, 1e-3)
            # How long it took until the first step says nothing of the next.
            if before.step > 0:
                kept = math.exp2(-elapsed / PACE_SECONDS) if self.pace else 0.0
                self.pace = kept * self.pace + (1 - kept) * facts.taken * steps / free
            self._stepped_at = at
        if facts.loads.keys() - before.loads.keys():
            self._joined_at = at
        busy = sum(facts.loads.values())
        self._latency.add(facts.in_flight * passed, delivered, passed)
        latency = math.inf if self._latency.value is None else self._latency.value
        if at - self._joined_at >= min(SETTLED * latency, LONGEST_SETTLING_SECONDS):
            self._cost.add(busy * passed, delivered, passed)
        self._decide(at, busy, usual_cost)
        self.at, self.facts = at, facts
        return delivered

    def _decide(self, at: float, busy: float, usual_cost: float | None) -> None:
        pace = self.pace
        self.known = self.cost is not None and pace > 0
        cost = usual_cost if self.cost is None else self.cost
        if cost is None or not pace:
            self.need = max(self.need, busy * (2 if self.facts.requests_wait else 1))
            return
        patience = max(SILENT_SECONDS, SILENT_STEPS * self.facts.taken / pace)
        self.need = pace * cost if at - self._stepped_at < patience else min(self.need, busy)


@dataclass
class PoolDemand:
    """The replicas wanted of each pool; `observe` every few seconds, with any clock."""

    wanted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UTILISATION, 0))
    _jobs: dict[str, _JobDemand] = field(default_factory=dict)
    _costs: dict[str, FadingRatio] = field(default_factory=dict)
    # Replicas that completions of policies keep busy.
    _serving: float = 0.0
    _at: float | None = None

    def observe(
        self,
        at: float,
        jobs: Sequence[JobFacts],
        pool_busy: Mapping[str, float],
        least: Mapping[str, int],
        serving: float = 0.0,
    ) -> dict[str, int]:
        """Take in the facts of a moment (seconds of any clock).

        pool_busy: sums of loads by pool; least: what is wanted of a pool whatever is measured, 0 for none at all;
        serving: inference replicas that completions of policies keep busy.
        """
        passed = 0.0 if self._at is None else at - self._at
        self._serving = max(serving, self._serving * math.exp2(-passed / COST_SECONDS))
        self._at = at
        for ended in self._jobs.keys() - {facts.run_id for facts in jobs}:
            del self._jobs[ended]
        costs = [job.cost for job in self._jobs.values() if job.cost is not None]
        usual = sum(costs) / len(costs) if costs else None
        delivered = sum(
            self._jobs.setdefault(facts.run_id, _JobDemand(at, facts)).observe(at, facts, usual) for facts in jobs
        )
        for pool, utilisation in UTILISATION.items():
            if pool == "inference":
                need = sum(job.need for job in self._jobs.values()) + self._serving * utilisation
            else:
                need = self._shared(pool, pool_busy.get(pool, 0.0), delivered, passed)
            self.wanted[pool] = _rounded(self.wanted[pool], need / utilisation, least.get(pool, 0))
        return dict(self.wanted)

    def needs(self) -> dict[str, float]:
        """Inference replicas that each job needs."""
        return {run_id: job.need for run_id, job in self._jobs.items()}

    def _shared(self, pool: str, busy: float, delivered: float, passed: float) -> float:
        """What a pool that all jobs share needs; one that works for jobs without a pace must not shrink below that."""
        cost = self._costs.setdefault(pool, FadingRatio())
        known = all(job.known for job in self._jobs.values())
        if known:
            cost.add(busy * passed, delivered, passed)
        need = sum(job.pace for job in self._jobs.values()) * (cost.value or 0.0)
        return need if known else max(need, 1.5 * busy)


def _rounded(held: int, exact: float, least: int) -> int:
    """Whole replicas; one more or less only when it is clearly so. 0 only where nothing is needed at all."""
    if least == 0:
        return 0
    if held - 1 - MARGIN_DOWN <= exact <= held + MARGIN_UP:
        return max(held, least)
    return max(least, math.ceil(exact - MARGIN_UP))


class Scaler(Protocol):
    """Carries out requests for replicas."""

    def desired(self, pool: str) -> int:
        """The number of replicas requested last."""

    def scale(self, pool: str, replicas: int) -> None:
        """Request so many replicas. Raises Unreachable."""


class LocalScaler:
    """Requested numbers in Redis; every pool begins with one replica."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client

    def desired(self, pool: str) -> int:
        stored = self.client.hget(redis_keys.scale(), pool)
        return int(stored or 1)

    def scale(self, pool: str, replicas: int) -> None:
        write_even_when_full(self.client, ("HSET", redis_keys.scale(), pool, replicas))


class KubernetesScaler:
    """Patches the scale of one Deployment per pool, or the bound of its ScaledObject; needs a Role for just these."""

    def __init__(self, settings: Settings, account: Path = ACCOUNT) -> None:
        self._settings = settings
        self._account = account

    def desired(self, pool: str) -> int:
        found = self._ask("GET", self._path(pool))
        return int(found["spec"].get("minReplicaCount" if self._settings.scale_keda else "replicas", 0))

    def scale(self, pool: str, replicas: int) -> None:
        field = "minReplicaCount" if self._settings.scale_keda else "replicas"
        self._ask("PATCH", self._path(pool), {"spec": {field: replicas}})

    def _path(self, pool: str) -> str:
        name = quote(f"{self._settings.scale_prefix}{pool}", safe="")
        namespace = quote(self._read("namespace"), safe="")
        if self._settings.scale_keda:
            return f"/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects/{name}"
        return f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            raise Unreachable(
                f"the service account's {name} cannot be read: {error}; is its token mounted?", code="scaling_refused"
            ) from None

    def _ask(self, method: str, path: str, patch: dict[str, Any] | None = None) -> dict[str, Any]:
        # Read each time: the kubelet renews the token.
        headers = {"Authorization": f"Bearer {self._read('token')}"}
        if patch is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        authority = self._account / "ca.crt"
        verify: Any = str(authority) if authority.exists() else True
        try:
            with httpx.Client(
                base_url=self._settings.kubernetes_url, verify=verify, timeout=API_SECONDS, trust_env=False
            ) as client:
                answer = client.request(method, path, headers=headers, json=patch)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                return found
        except httpx.HTTPStatusError as error:
            reason = f"Kubernetes refused {method} {path}: HTTP {error.response.status_code}"
            raise Unreachable(f"{reason}; is the orchestrator's Role installed?", code="scaling_refused") from None
        except httpx.HTTPError as error:
            raise Unreachable(f"Kubernetes did not answer: {error}", code="kubernetes_unreachable") from None


class Scale:
    """The numbers of replicas people may request, within bounds."""

    def __init__(self, settings: Settings, client: RedisClient) -> None:
        self.kind = settings.scaler
        # The launcher's first replica is the one that others call by address.
        fewest = max(1, settings.min_replicas) if settings.scaler == "local" else settings.min_replicas
        self.bounds = dict.fromkeys(SCALABLE, (fewest, settings.max_replicas))
        self._scaler: Scaler | None = None
        if settings.scaler == "local":
            self._scaler = LocalScaler(client)
        elif settings.scaler == "kubernetes":
            self._scaler = KubernetesScaler(settings)

    def desired(self) -> dict[str, int | None]:
        """Requested replicas by pool; None where nothing can scale."""
        return {pool: self._scaler.desired(pool) if self._scaler else None for pool in SCALABLE}

    def request(self, wanted: dict[str, int]) -> None:
        """Ask for so many replicas, all pools or none.

        Raises InvalidInput by field, PreconditionFailed (code "scaling_unavailable"), Unreachable.
        """
        violations = [
            FieldViolation(f"/{pool}", f"must be from {low} to {high}")
            for pool, (low, high) in self.bounds.items()
            if pool in wanted and not low <= wanted[pool] <= high
        ]
        if violations:
            raise InvalidInput("outside the bounds", code="invalid_scale", violations=tuple(violations))
        if self._scaler is None:
            raise PreconditionFailed(
                "nobody scales this platform: replicas are set where it was installed", code="scaling_unavailable"
            )
        for pool, replicas in wanted.items():
            self._scaler.scale(pool, replicas)
            log.info("replicas requested", pool=pool, replicas=replicas)


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
        in_rounds(lambda: self.observe(time.monotonic()), stop, OBSERVE_SECONDS, "replicas wanted are as before")

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
        facts: list[JobFacts] = []
        for run_id in served:
            with only_this_job():
                facts += filter(None, [self._facts(run_id, loads.get(run_id, {}))])
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

    def _least_for_people(self, worked_on: Mapping[str, float]) -> int:
        """Replicas for runs that people use, beside those of jobs, which serve every run of their models."""
        models = set(map(self._model, worked_on))
        least = 0
        kept = self.assigner.kept_warm()
        for run_id in kept.keys() - worked_on.keys():
            least += kept[run_id]
            models.add(self._model(run_id))
        return least + len({self._model(run_id) for run_id in self.assigner.in_use()} - models)

    def _model(self, run_id: str) -> str:
        """What one engine can hold for several runs; "" of a run that is gone or damaged."""
        with suppress(NotFound), only_this_job():
            model = self.jobs.spec(run_id).model
            return f"{model.path} {model.dtype}"
        return ""

    def _asks_verifiers(self, run_id: str) -> bool:
        with suppress(NotFound), only_this_job():
            return asks_verifiers(self.jobs.spec(run_id))
        return False


def asks_verifiers(spec: JobSpec) -> bool:
    """Whether a job's responses or conversations need the pool of verifiers."""
    kinds = {verifier.kind for _, verifier in verifiers_in(spec.tasks.verifier)}
    return bool(kinds & {"http", "model"}) or spec.tasks.environment is not None
