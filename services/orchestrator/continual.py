"""Continual jobs: their definition, rounds in Redis, the gate, and the loop that begins rounds and serves what
passes.

The loop of continual jobs: begin rounds that are due, follow them, and serve what passes the gate.
Each step of a round is stored before the next one begins, and repeating a step changes nothing: the job of a round and
its evaluations have idempotency keys of their own. Two orchestrators, or a crash between any two lines, cost time.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import fmean, median, stdev
from typing import Any, Literal, Self, cast

import numpy as np
import redis
from pydantic import Field, model_validator

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.capture import MOST_COLLECTED, CaptureStore, CollectTerms, collect
from services.orchestrator.checks import SpecCheck
from services.orchestrator.commit import NotLeading, timestamp
from services.orchestrator.datasets import TaskLibrary
from services.orchestrator.evaluation import OPEN, EvaluationQueue, RequestedEvaluation
from services.orchestrator.forks import ForkOptions, Forks, merge_patch, require_followable
from services.orchestrator.job_records import training_series
from services.orchestrator.jobs import JobStore
from services.orchestrator.serving import NAME_PATTERN, Change, ServedModels, Target
from services.orchestrator.values import require_stored
from services.orchestrator.versions import published_versions
from spo import errors
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import as_spo_error
from spo.messaging.streams.recovery import Outage
from spo.observability import get_logger
from spo.rpc.pools import JudgePools
from spo.service.process import in_rounds
from spo.spec.job_spec import EvaluationSpec, JobSpec, TasksSpec, parse_job_spec
from spo.spec.section import (
    MOST_COUNT,
    TERMINAL,
    JobState,
    Section,
    Share,
    Temperature,
    TopP,
    impossible,
    read_stored,
    record_from_json,
    record_of,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
MOST_HOURS = 24.0 * 366

RoundState = Literal["starting", "training", "evaluating", "served", "kept", "failed"]
ENDED: tuple[RoundState, ...] = ("served", "kept", "failed")
MOST_PER_TENANT = 100
ROUNDS_KEPT = 200
MOST_REASON = 2000

RESAMPLES = 4000

PREFIX = "residual_abs/"
# In reward units, of which 1 lies between right and wrong. Seen so far: honest sources up to .035 beside the others,
# one that always says the opposite .075 and .114, with half of its feedback from when it was honest.
LEAST_EXCESS = 0.05
LEAST_ERRORS = 3.0
LEAST_STEPS = 5

# Feedback comes later than the traffic that it is about, so all that is kept is looked through each time.
COLLECT_SECONDS = 60.0

STORED_SOURCES = ("other_run", "annotated")

log = get_logger("continual")

LOOK_SECONDS = 5.0
# So begins the wait of one for what its next round would learn from: nothing is wrong with it.
WANTING = "its next round waits for traffic"


class RoundSchedule(Section):
    """When a round begins: at a time of day, every so many hours, or as soon as there is enough that is new.

    A round never begins without `min_new_trajectories`, and never while another one is under way.
    """

    daily_at: str | None = Field(default=None, pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="HH:MM, UTC.")
    every_hours: float | None = Field(default=None, gt=0, le=MOST_HOURS)
    min_new_trajectories: int = Field(
        default=1, ge=1, le=MOST_COUNT, description="Stored since the last round began, as its experience counts them."
    )

    @model_validator(mode="after")
    def one_clock(self) -> Self:
        if self.daily_at is not None and self.every_hours is not None:
            raise impossible(("every_hours", "name daily_at or every_hours, not both"))
        return self

    def next_at(self, last: datetime) -> datetime:
        """The earliest time of the next round, UTC; `last` is when the one before began, or the job was made."""
        if self.every_hours is not None:
            return last + timedelta(hours=self.every_hours)
        if self.daily_at is None:
            return last
        hour, minute = map(int, self.daily_at.split(":"))
        same_day = last.astimezone(UTC).replace(hour=hour, minute=minute, second=0, microsecond=0)
        return same_day if same_day > last else same_day + timedelta(days=1)


class GateSpec(Section):
    """What a new version must show before it is served: pass@1 of the same problems, new against served.

    The interval is a bootstrap over problems of the paired difference; its lower end must lie above `min_gain`.
    """

    tasks: TasksSpec | None = Field(default=None, description="Whose held-out problems; default: the job's own.")
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    min_gain: float = Field(default=0.0, ge=-1, le=1, description="In pass@1; below 0 lets through what is no worse.")
    level: Share = Field(default=0.95, description="Of the two-sided interval.")


class TrafficSpec(Section):
    """Captured traffic as experience: it is stored under a name before each round, with what was said of it."""

    name: str = Field(pattern=NAME, description="Of the stored experience; a name of its own.")
    judge_unscored: bool = Field(
        default=False, description="Judge what nobody scored, where it answers a problem of the served job's tasks."
    )


class ContinualSpec(Section):
    """A served model that is trained from stored experience again and again."""

    serves: str = Field(
        pattern=NAME_PATTERN, description="The served model: where each round starts, and what it replaces."
    )
    experience: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Names of stored runs, imports or captures that are learned from; default: all of the tenant.",
    )
    traffic: TrafficSpec | None = Field(default=None, description="Captured traffic that is learned from as well.")
    schedule: RoundSchedule = RoundSchedule()
    gate: GateSpec = GateSpec()
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="What of the served job's spec each round changes (RFC 7386), as a fork takes it.",
    )
    paused: bool = False

    @property
    def runs(self) -> tuple[str, ...]:
        """Names in the experience store that it learns from; empty: all of the tenant."""
        return (*self.experience, self.traffic.name) if self.traffic else self.experience

    def round_overrides(self, name: str, number: int) -> Mapping[str, Any]:
        """The changes of one round: what it learns from and its name are said, unless `overrides` says them."""
        offline = dict(self.overrides.get("offline") or {})
        offline.setdefault("experience", [{"run": run} for run in self.runs] or [{}])
        return {"name": f"{name} round {number}", **self.overrides, "offline": offline}


@dataclass(frozen=True)
class Round:
    """One round: which version it started from, the job that trains, and what the gate said.

    parent_change: the number of the change under which that was served. learned_from: rows of each stored run when it
    began. comparison: fields of a GateComparison. served: version, of job_id, was put in service; kept: what was served
    before stayed, reason says why. sources: fields of a SourceResidual for each source of feedback.
    """

    number: int
    parent_job: str
    parent_version: int
    parent_change: int
    overrides: dict[str, object]
    learned_from: dict[str, int]
    state: RoundState = "starting"
    job_id: str = ""
    version: int = 0
    evaluations: Sequence[str] = ()
    comparison: dict[str, float] | None = None
    reason: str = ""
    began_at: str = ""
    ended_at: str = ""
    sources: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True)
class ContinualJob:
    """A continual job of a tenant. actor: who made it; admin: whether that one may use what is any tenant's;
    max_active_jobs: of the key that made it.
    """

    name: str
    tenant: str
    actor: str
    spec: ContinualSpec
    created_at: str = ""
    admin: bool = False
    max_active_jobs: int | None = None

    @property
    def field(self) -> str:
        """Its field in the hash of all."""
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True)
class _Stored:
    name: str
    tenant: str
    actor: str
    spec: dict[str, object] = field(default_factory=dict)
    created_at: str = ""
    admin: bool = False
    max_active_jobs: int | None = None


@dataclass(frozen=True)
class ContinualWait:
    """What keeps a continual job from going on, in words, and since when; "" where nothing does."""

    reason: str = ""
    since: str = ""


class ContinualStore:
    """Definitions by tenant and name, and their rounds by number; every write carries the leader's fence."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self.client = jobs.client

    def put(self, wanted: ContinualJob) -> ContinualJob:
        """Make or change one; rounds that there were stay. Raises ResourceExhausted."""
        known = self.all(wanted.tenant)
        before = next((job for job in known if job.name == wanted.name), None)
        if before is None and len(known) >= MOST_PER_TENANT:
            message = f"a tenant may have {MOST_PER_TENANT} continual jobs; delete one"
            raise errors.ResourceExhausted(message, code="too_many_continual_jobs")
        made = replace(wanted, created_at=before.created_at if before else timestamp())
        document = asdict(made) | {"spec": made.spec.model_dump(mode="json")}
        self.jobs.write(("HSET", own_keys.continual_jobs(), made.field, json.dumps(document)))
        return made

    def get(self, name: str, tenant: str | None) -> ContinualJob:
        """One by its name, if it is the tenant's (None: anybody's). Raises NotFound."""
        found = [job for job in self.all(tenant) if job.name == name]
        if not found:
            raise errors.NotFound(f"there is no continual job {name}", code="continual_job_not_found")
        return found[0]

    def all(self, tenant: str | None = None) -> list[ContinualJob]:
        """Those of a tenant (None: of all), by name."""
        stored = self.client.hvals(own_keys.continual_jobs())
        found = [_decoded(raw) for raw in stored]
        return sorted((job for job in found if tenant in (None, job.tenant)), key=lambda job: (job.name, job.tenant))

    def delete(self, job: ContinualJob) -> None:
        """Forget it and its rounds; jobs, weights and what is served stay."""
        self.jobs.write(
            ("HDEL", own_keys.continual_jobs(), job.field),
            ("DEL", own_keys.continual_rounds(job.field)),
            ("SREM", own_keys.wanted_rounds(), job.field),
            ("HDEL", own_keys.continual_waits(), job.field),
        )

    def wait_of(self, job: ContinualJob) -> ContinualWait:
        """What it waits for that its schedule does not say."""
        raw = self.client.hget(own_keys.continual_waits(), job.field)
        return record_from_json(ContinualWait, raw) if raw else ContinualWait()

    def note_wait(self, job: ContinualJob, reason: str) -> None:
        """Say what it waits for, "" for nothing; the same again changes nothing, since when it waits neither."""
        before, key = self.wait_of(job), own_keys.continual_waits()
        if not reason and before.reason:
            self.jobs.write(("HDEL", key, job.field))
        elif reason and reason[:MOST_REASON] != before.reason:
            since = before.since or timestamp()
            self.jobs.write(("HSET", key, job.field, json.dumps({"reason": reason[:MOST_REASON], "since": since})))

    def want_round(self, job: ContinualJob) -> None:
        """A round is to begin as soon as it can, whatever the schedule says."""
        self.jobs.write(("SADD", own_keys.wanted_rounds(), job.field))

    def is_round_wanted(self, job: ContinualJob) -> bool:
        """Whether somebody asked for a round that has not begun."""
        return bool(self.client.sismember(own_keys.wanted_rounds(), job.field))

    def rounds(self, job: ContinualJob) -> list[Round]:
        """Its rounds, newest first."""
        stored = self.client.hvals(own_keys.continual_rounds(job.field))
        found = [record_from_json(Round, raw) for raw in stored]
        return sorted(found, key=lambda each: each.number, reverse=True)

    def begin_round(self, job: ContinualJob, begun: Round) -> None:
        """Store a new one; the oldest gives way."""
        key = own_keys.continual_rounds(job.field)
        self.jobs.write(
            ("HSET", key, begun.number, json.dumps(asdict(begun))),
            ("HDEL", key, begun.number - ROUNDS_KEPT),
            ("SREM", own_keys.wanted_rounds(), job.field),
        )

    def change_round(self, job: ContinualJob, changed: Round) -> None:
        """Store its new state, unless the continual job has been deleted meanwhile."""
        if self.client.hexists(own_keys.continual_jobs(), job.field):
            self.jobs.write(("HSET", own_keys.continual_rounds(job.field), changed.number, json.dumps(asdict(changed))))


def _decoded(raw: bytes) -> ContinualJob:
    stored = record_from_json(_Stored, raw)
    spec = read_stored(ContinualSpec, stored.spec, f"the continual job {stored.name}")
    return ContinualJob(**{**asdict(stored), "spec": spec})


@dataclass(frozen=True)
class GateComparison:
    """Mean pass@1 of both over `problems`, their difference and its bootstrap interval [low, high]."""

    served: float
    candidate: float
    gain: float
    low: float
    high: float
    problems: int


def compare(
    served: Sequence[Mapping[str, object]], candidate: Sequence[Mapping[str, object]], *, level: float, seed: int
) -> GateComparison:
    """Compare two evaluations' `per_problem` tables; equal inputs and seed give equal intervals.

    Raises PreconditionFailed (code "not_comparable") where they are of different problems.
    """
    rates = [_rates(table) for table in (served, candidate)]
    if not rates[0] or rates[0].keys() != rates[1].keys():
        raise errors.PreconditionFailed("the two evaluations are of different problems", code="not_comparable")
    names = sorted(rates[0])
    before_P, after_P = (np.array([of[name] for name in names]) for of in rates)
    gain_P = after_P - before_P
    rng = np.random.default_rng(seed)
    means = [gain_P[rng.integers(len(gain_P), size=len(gain_P))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return GateComparison(
        served=float(before_P.mean()),
        candidate=float(after_P.mean()),
        gain=float(gain_P.mean()),
        low=float(low),
        high=float(high),
        problems=len(names),
    )


def _rates(table: Sequence[Mapping[str, object]]) -> dict[str, float]:
    return {str(row["prompt_id"]): int(str(row["correct"])) / max(1, int(str(row["samples"]))) for row in table}


@dataclass(frozen=True)
class SourceResidual:
    """A source's mean |Q_T - r| over the steps, reward units, and how much that is above the median of the others.

    excess_error: the standard error of the excess over steps; batches share trajectories, so it is a lower bound.
    suspect: the excess is above LEAST_EXCESS and LEAST_ERRORS standard errors.
    """

    source: str
    residual: float
    excess: float
    excess_error: float
    suspect: bool


def source_residuals(columns: Mapping[str, Sequence[float | None]]) -> list[SourceResidual]:
    """From the curves of a job by name; worst first, [] where fewer than two sources were met."""
    curves = {name.removeprefix(PREFIX): values for name, values in columns.items() if name.startswith(PREFIX)}
    found = [_of(source, values, curves) for source, values in curves.items()] if len(curves) > 1 else []
    return sorted((each for each in found if each is not None), key=lambda each: (-each.excess, each.source))


def suspects_in_words(found: Sequence[SourceResidual]) -> str:
    """The suspects with their figures, "" where there is none."""
    bad = [each for each in found if each.suspect]
    told = (f"{each.source} (|Q - r| {each.residual:.2f}, {each.excess:+.2f} beside the others)" for each in bad)
    return f"feedback that disagrees with the rest: {', '.join(told)}" if bad else ""


def _of(
    source: str, values: Sequence[float | None], curves: Mapping[str, Sequence[float | None]]
) -> SourceResidual | None:
    others = [curve for name, curve in curves.items() if name != source]
    excesses, residuals = [], []
    for step, value in enumerate(values):
        beside = [known for curve in others if (known := curve[step]) is not None]
        if value is not None and beside:
            residuals.append(value)
            excesses.append(value - median(beside))
    if len(excesses) < LEAST_STEPS:
        return None
    excess, error = fmean(excesses), stdev(excesses) / math.sqrt(len(excesses))
    suspect = excess > max(LEAST_EXCESS, LEAST_ERRORS * error)
    return SourceResidual(source, fmean(residuals), excess, error, suspect)


@dataclass
class RoundExperience:
    """The stored experience of continual jobs. Used by the loop's thread, and by readers for counts alone."""

    store: ExperienceStore
    jobs: JobStore
    served: ServedModels
    captures: CaptureStore
    judges: JudgePools
    library: TaskLibrary
    _collected_at: dict[str, float] = field(default_factory=dict)

    def collect_traffic(self, job: ContinualJob) -> None:
        """Store what was captured and said of it, at most once a minute; again changes nothing. Raises SpoError."""
        traffic = job.spec.traffic
        if traffic is None or time.monotonic() - self._collected_at.get(job.field, -COLLECT_SECONDS) < COLLECT_SECONDS:
            return
        self._collected_at[job.field] = time.monotonic()
        tasks = self.jobs.spec(self.served.get(job.tenant, job.spec.serves).job_id).tasks
        problems, after_unix_ms = self.library.load(tasks).train, 0
        while True:
            # Other continual jobs do not wait for a judge that is asleep: this wakes it, and comes again.
            terms = CollectTerms(
                traffic.name, job.tenant, tasks.kind, traffic.judge_unscored, after_unix_ms, patience_seconds=0.0
            )
            found = collect(self.captures, self.store, self.judges, problems, terms)
            if found.looked_at < MOST_COLLECTED or found.newest_unix_ms <= after_unix_ms:
                return
            after_unix_ms = found.newest_unix_ms

    def rows(self, job: ContinualJob, rounds: list[Round]) -> dict[str, int]:
        """Rows of each run that it learns from; what the jobs of its own rounds have stored does not count."""
        own = {each.job_id for each in rounds}
        wanted, found = set(job.spec.runs), dict[str, int]()
        for file in self.store.files():
            run = file.origin.run
            if file.origin.tenant == job.tenant and run not in own and (not wanted or run in wanted):
                found[run] = found.get(run, 0) + file.rows
        return found

    def new_rows(self, job: ContinualJob, rounds: list[Round]) -> int:
        """How many of them are new since its newest round began."""
        before = rounds[0].learned_from if rounds else {}
        return sum(max(0, rows - before.get(run, 0)) for run, rows in self.rows(job, rounds).items())


@dataclass(frozen=True)
class RoundJobs:
    """Submits it for who made the continual job, within their quota; `require_usable` refuses what is not theirs."""

    jobs: JobStore
    forks: Forks
    spec_check: SpecCheck
    experience: ExperienceStore
    require_usable: Callable[[TasksSpec | None, str | None, Mapping[str, str] | None], None]

    def start(self, job: ContinualJob, begun: Round) -> str:
        """Submit it and return its id; asked for again it returns the same. Raises SpoError."""
        # One that is made anew under the same name has rounds of its own.
        key = f"continual:{job.name}:{job.created_at}:{begun.number}"
        if job.max_active_jobs is not None and self.jobs.active_of(job.tenant) >= job.max_active_jobs:
            raise errors.NotReady(f"the round waits: {job.max_active_jobs} jobs have not ended", code="quota_exceeded")
        if begun.parent_version:
            options = ForkOptions(begun.parent_version, None, as_reference=True, overrides=begun.overrides)
            return self.forks.fork(
                begun.parent_job, options, lambda spec: self._require(spec, job), key, job.actor, job.tenant
            )
        # Version 0 is the model that the parent itself started from.
        spec = self._spec(begun.parent_job, begun.overrides)
        self._require(spec, job)
        self.spec_check.require_possible(spec)
        return self.jobs.submit(spec, key, job.actor, job.tenant)

    def check_overrides(self, parent: str, spec: ContinualSpec) -> None:
        """Raises InvalidInput, with a pointer to each fault, where no round could be made with them."""
        try:
            made = self._spec(parent, spec.round_overrides("name", 1))
        except errors.InvalidInput as error:
            found = tuple(
                errors.FieldViolation(f"/overrides{fault.pointer}", fault.message) for fault in error.violations
            )
            raise errors.InvalidInput(error.message, code="invalid_continual_job", violations=found) from None
        if all(part.source not in STORED_SOURCES for part in made.replay.mix):
            message = "no share of a batch is of stored experience (other_run or annotated)"
            fault = errors.FieldViolation("/overrides/replay/mix", message)
            raise errors.InvalidInput("nothing would be learned", code="invalid_continual_job", violations=(fault,))

    def _require(self, spec: JobSpec, job: ContinualJob) -> None:
        self.require_usable(spec.tasks, None if job.admin else job.tenant, spec.algorithm.model_paths)
        require_stored(self.jobs.client, self.experience, spec, job.tenant)
        require_followable(self.jobs, spec, job.tenant)

    def _spec(self, parent: str, overrides: Mapping[str, object]) -> JobSpec:
        document = self.jobs.spec(parent).model_dump(mode="json")
        return parse_job_spec(merge_patch(document, dict(overrides)))


class ContinualLoop:
    """Looks at every continual job every few seconds; one job's trouble is no other's."""

    def __init__(
        self,
        store: ContinualStore,
        served: ServedModels,
        round_jobs: RoundJobs,
        evaluations: EvaluationQueue,
        experience: RoundExperience,
    ) -> None:
        self.store = store
        self.served = served
        self.round_jobs = round_jobs
        self.evaluations = evaluations
        self.experience = experience
        self.jobs: JobStore = store.jobs
        self._outages: dict[str, Outage] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until stop."""
        in_rounds(self.tick, stop, LOOK_SECONDS, "continual jobs wait", (errors.SpoError, redis.RedisError))

    def tick(self, now: datetime | None = None) -> None:
        """One look at each; what one waits for is noted on it."""
        jobs = self.store.all()
        for deleted in self._outages.keys() - {job.field for job in jobs}:
            del self._outages[deleted]
        for job in jobs:
            outage = self._outages.setdefault(job.field, Outage("a continual job waits", name=job.name))
            try:
                reason = self._advance(job, now or datetime.now(UTC))
                outage.over()
            except Exception as error:
                if isinstance(error, NotLeading) or (
                    isinstance(error, redis.RedisError) and as_spo_error(error).retryable
                ):
                    raise
                # Retried at the next look: a service that is away, a store that cannot be reached.
                reason = error.message if isinstance(error, errors.SpoError) else f"{type(error).__name__}: {error}"
                outage.failed(error)
            self.store.note_wait(job, reason)

    def _advance(self, job: ContinualJob, now: datetime) -> str:
        """The next step of a job; what it waits for in words, "" for nothing but its schedule."""
        rounds = self.store.rounds(job)
        newest = next(iter(rounds), None)
        if newest is None or newest.state in ENDED:
            # Before its schedule is asked: that nothing is served is known at once, not when a round is due.
            self._require_served(job)
            if not self._is_due(job, rounds, now):
                return ""
            if wanting := self._wanting(job, rounds):
                return wanting
            newest = self._begin(job, rounds)
        try:
            self._follow(job, newest)
        except NotLeading:
            raise
        except errors.SpoError as error:
            if error.retryable:
                raise
            # Waiting would not help: held-out problems that are gone, a job that is refused.
            faults = "; ".join(f"{fault.pointer}: {fault.message}" for fault in error.violations)
            self._end(job, newest, "failed", f"{error.message} {faults}".strip())
        return ""

    def _follow(self, job: ContinualJob, current: Round) -> None:
        """The next step of a round that is under way. Raises SpoError."""
        if current.state == "starting":
            self._start(job, current)
        elif current.state == "training":
            self._follow_training(job, current)
        else:
            self._follow_evaluations(job, current)

    def _is_due(self, job: ContinualJob, rounds: list[Round], now: datetime) -> bool:
        if self.store.is_round_wanted(job):
            return True
        last = datetime.fromisoformat(rounds[0].began_at if rounds else job.created_at)
        return not job.spec.paused and now >= job.spec.schedule.next_at(last)

    def _wanting(self, job: ContinualJob, rounds: list[Round]) -> str:
        """What a round that is due lacks to learn from, in words; "" where there is enough."""
        self.experience.collect_traffic(job)
        new = self.experience.new_rows(job, rounds)
        least = 1 if self.store.is_round_wanted(job) else job.spec.schedule.min_new_trajectories
        traffic = job.spec.traffic
        source = f"served as {job.spec.serves} and captured" if traffic else "stored in the runs that it learns from"
        return "" if new >= least else f"{WANTING}: {new} of {least} new trajectories are {source}"

    def _require_served(self, job: ContinualJob) -> None:
        try:
            self.served.get(job.tenant, job.spec.serves)
        except errors.NotFound:
            message = f"nothing is served as {job.spec.serves}: publish a version under that name, or roll it back"
            raise errors.NotFound(message, code="model_not_found") from None

    def _begin(self, job: ContinualJob, rounds: list[Round]) -> Round:
        serving = self.served.get(job.tenant, job.spec.serves)
        version = self._newest(serving.job_id) if serving.version is None else serving.version
        number = rounds[0].number + 1 if rounds else 1
        begun = Round(
            number=number,
            parent_job=serving.job_id,
            parent_version=version,
            parent_change=serving.number,
            overrides=dict(job.spec.round_overrides(job.name, number)),
            learned_from=self.experience.rows(job, rounds),
            began_at=timestamp(),
        )
        self.store.begin_round(job, begun)
        log.info("a round begins", name=job.name, round=number, parent=serving.job_id, version=version)
        return begun

    def _start(self, job: ContinualJob, begun: Round) -> None:
        made = self.round_jobs.start(job, begun)
        self.store.change_round(job, replace(begun, state="training", job_id=made))

    def _follow_training(self, job: ContinualJob, current: Round) -> None:
        try:
            state = self.jobs.state(current.job_id)
        except errors.NotFound:
            self._end(job, current, "failed", "its job was deleted")
            return
        if state not in TERMINAL:
            return
        if state != JobState.SUCCEEDED:
            failure = self.jobs.record(current.job_id).failure_message
            self._end(job, current, "failed", f"its job {state}: {failure}" if failure else f"its job {state}")
            return
        version = self._newest(current.job_id)
        if not version:
            self._end(job, current, "failed", "its job published no weights")
            return
        gate = job.spec.gate
        protocol = EvaluationSpec(samples=gate.samples, temperature=gate.temperature, top_p=gate.top_p, ks=(1,))
        # Version 0 of the round's job is what was served when it began.
        # Asked for again after a crash they are the same two.
        key = f"continual:{job.field}:{current.number}"
        requested = [
            self.evaluations.request(current.job_id, each, gate.tasks, protocol, key).id for each in (0, version)
        ]
        sources = source_residuals(training_series(self.jobs.client, current.job_id).columns)
        evaluating = replace(current, state="evaluating", version=version, evaluations=requested)
        self.store.change_round(job, replace(evaluating, sources=list(map(asdict, sources))))

    def _follow_evaluations(self, job: ContinualJob, current: Round) -> None:
        try:
            found = [self.evaluations.requests.get(each) for each in current.evaluations]
        except errors.NotFound:
            self._end(job, current, "failed", "its evaluations are no longer kept")
            return
        if any(each.state in OPEN for each in found):
            return
        unfinished = [each for each in found if each.result is None]
        if unfinished:
            self._end(job, current, "failed", f"no comparison: {unfinished[0].failure.get('message', 'cancelled')}")
            return
        gate = job.spec.gate
        served, candidate = map(_table, found)
        comparison = compare(served, candidate, level=gate.level, seed=current.number)
        self._decide(job, replace(current, comparison=asdict(comparison)), comparison)

    def _decide(self, job: ContinualJob, current: Round, found: GateComparison) -> None:
        suspects = suspects_in_words([record_of(SourceResidual, each) for each in current.sources])
        told = (
            f"pass@1 {found.served:.3f} -> {found.candidate:.3f}, gain {found.gain:+.3f} "
            f"({found.low:+.3f} to {found.high:+.3f}) on {found.problems} problems"
        )
        told = f"{told}; {suspects}" if suspects else told
        if found.low <= job.spec.gate.min_gain:
            self._end(job, current, "kept", f"not shown to be better: {told}")
            return
        target = Target(current.job_id, current.version)
        by, note = f"continual job {job.name}", f"round {current.number}: {told}"
        try:
            # After a crash that came between serving it and writing that down it is there already.
            if self.served.get(job.tenant, job.spec.serves).target != target:
                change = Change(by, note, expected=current.parent_change)
                self.served.publish(job.tenant, job.spec.serves, target, change)
        except (errors.Conflict, errors.NotFound) as error:
            self._end(job, current, "kept", f"what is served was changed meanwhile ({error.message}): {told}")
        else:
            self._end(job, current, "served", told)

    def _newest(self, job_id: str) -> int:
        """The newest weight version of a job, 0 before the first."""
        return max((int(told["version"]) for told in published_versions(self.jobs, job_id)), default=0)

    def _end(self, job: ContinualJob, current: Round, state: RoundState, reason: str) -> None:
        ended = replace(current, state=state, reason=reason[:2000], ended_at=timestamp())
        self.store.change_round(job, ended)
        log.info("a round ended", name=job.name, round=current.number, state=state, reason=reason)


def _table(evaluation: RequestedEvaluation) -> Sequence[Mapping[str, object]]:
    return cast("Sequence[Mapping[str, object]]", (evaluation.result or {}).get("per_problem", ()))
