"""Watches jobs from outside: who waits for whom, alarms of their health, trainers that die, and when nothing moves.

Trainers that die: each death is an event with its step, cause and what would help; too many in a row end the job.
A death counts while no step has been completed since the one before, or where the job comes to the same step again and
dies of it again. What a trainer was doing it notes itself, beside the checkpoints; its successor tells it here.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.checks import state_in_words
from services.orchestrator.commit import Commit, Fence, Precondition, Write, now_ms
from services.orchestrator.damaged_jobs import HALF_THERE, refused_in_words
from services.orchestrator.job_records import failures_of, latest_point, latest_step
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import Leases
from services.orchestrator.pipeline import entries_in_pipeline, troubles_in_pipeline
from services.orchestrator.replicas import ReplicaAssigner
from services.orchestrator.versions import REFERENCE_VERSION, announce_version, announced_version, published_versions
from spo import redis_keys
from spo.algorithm.collapse_guard import SAMPLER_MISMATCH
from spo.errors import InvalidInput, NotFound
from spo.messaging.redis_client import RedisClient, as_spo_error
from spo.observability import get_logger
from spo.spec.job_spec import JobSpec
from spo.spec.plan import MemoryAdvice, memory_advice, shape_of_folder
from spo.spec.section import JobState
from spo.spec.tasks import verifiers_in
from spo.tasks.verifier import SANDBOX_JUDGE, VERIFIER
from spo.v1.orchestrator_service_pb2 import RenewLeaseRequest, StepReport, TrainerDeath

log = get_logger("monitor")

DOING = {
    "load": "loading the model",
    "resume": "loading the checkpoint",
    "train": "training",
    "publish": "publishing weights",
    "checkpoint": "writing a checkpoint",
    "update_reference": "loading the reference",
}
UNSAID = "it ended without a word, as a process does that is killed (status -9 or 137): for want of memory, or by hand"

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

# So many groups without anything better than the worst reward, in the newest steps, are no bad luck.
NEVER_RIGHT_GROUPS, NEVER_RIGHT_STEPS = 20, 20
ONLINE = "reward/online"
STUCK = (
    "a policy learns nothing from rollouts that never succeed. Look at a trajectory beside its verdict; `spo tasks "
    "preview` says whether the judge finds what is meant, `spo tasks probe` which problems the model can solve "
    "(docs/tutorials/stuck_reward.md)"
)

# A reason that has stood for so long says since when, what is tried, and what ends it.
NAMED_SECONDS = 60.0
MOST_REASONS = 10_000
# A job that has not moved for so long is asked for its reasons, whether anybody looks at it or not.
STANDS_SECONDS = 10.0
_NUMBER = re.compile(r"\d+(\.\d+)?")
# The first that is found in a reason: what is tried meanwhile, and what ends the wait.
_TRIED_AND_ENDS = tuple(
    (re.compile(pattern), tried, ends)
    for pattern, tried, ends in (
        (
            r"^Redis (takes no|did not answer|refuses)",
            "it is asked again every second",
            "Redis takes it; the words after the colon are its own",
        ),
        (r"^Redis is not fit", "its settings are looked at every 10 s", "they are as the message says"),
        (r"for a slot", "it is looked for every second", "a job that ends or is paused gives its slot back"),
        (r"no live replica of", "heartbeats are looked for", "one starts: `spo doctor` and its log say why none does"),
        (
            r"no inference replica is assigned",
            "replicas are shared anew every second",
            "a job ends, or a replica joins",
        ),
        (r"for a runner of", "they are offered to whoever asks", "a runner of that pool starts: `spo agents run`"),
        (r"for a trainer to lease", "every free trainer is offered it", "a trainer starts, or another job ends"),
        (
            r"the evaluation of step|an evaluation",
            "what is missing is asked for again, with pauses up to 60 s",
            "inference and judge answer, or it is reported with what is decided",
        ),
        (
            r"(prompts at value-estimation|prompts are estimated)",
            "every prompt is tried again, with pauses up to 30 s",
            "inference and judge answer, or a prompt becomes a dead letter",
        ),
        (
            r"groups wait at",
            "each is tried again, with pauses up to 30 s",
            "its service takes them; cancel the job to drop them",
        ),
        (
            r"died",
            "a trainer begins again from the last checkpoint",
            "a step is completed, or the most deaths fail the job",
        ),
        (r"checkpoint", "the trainer goes on saving", "it is saved, or the grace is over"),
        (r"shared rollouts", "the other job is looked at every second", "it goes on or ends"),
        (
            r"(full|disk|space|writ|read-only|EROFS|EIO)",
            "the write is tried again",
            "there is room, or the storage is mended",
        ),
    )
)
_OTHERWISE = "it is tried again, with pauses up to 30 s", "it passes, or the job is cancelled"
# Of a state in which nothing else says why.
_STANDS = {
    JobState.QUEUED: "the job waits for the orchestrator to look at it",
    JobState.VALIDATING: "the job waits for its model, tasks and tests to be checked and uploaded",
    JobState.ESTIMATING: "the job waits for the values of its prompts",
    JobState.RUNNING: "the job waits for its trainer's next step",
    JobState.PAUSING: "the job waits for its trainer to write a checkpoint",
    JobState.CANCELLING: "the job waits for its trainer to let go",
}


def note_alarms(jobs: JobStore, request: RenewLeaseRequest) -> bool:
    """Record each alarm and quarantine that the reports of a lease holder hold, once however often a report arrives.

    Returns whether that paused the job.
    """
    paused = False
    for report in request.reports:
        if report.quarantine_reason:
            _quarantined(jobs, request, report)
        if report.alarms:
            paused |= _sound(jobs, request, report)
    return paused


def _quarantined(jobs: JobStore, request: RenewLeaseRequest, report: StepReport) -> None:
    body = {
        "step": report.step,
        "reason": report.quarantine_reason,
        "trajectory_ids": list(report.quarantined_ids),
    }
    _once(jobs, request, f"{report.step}:quarantine", "quarantine", body)


def _sound(jobs: JobStore, request: RenewLeaseRequest, report: StepReport) -> bool:
    policy = jobs.spec(request.run_id).collapse_guard.policy
    for name, reason in sorted(report.alarms.items()):
        body = {"step": report.step, "alarm": name, "reason": reason, "policy": policy}
        _once(jobs, request, f"{report.step}:{name}", "alarm", body)
    collapses = set(report.alarms) - {SAMPLER_MISMATCH}
    return policy == "pause" and bool(collapses) and _pause(jobs, request, report)


def _once(jobs: JobStore, request: RenewLeaseRequest, what: str, kind: str, body: dict[str, object]) -> None:
    mark = _mark(request, what)
    jobs.once(request.run_id, mark, kind, body, [("HSET", mark.key, mark.field, json.dumps(body))])


def _mark(request: RenewLeaseRequest, what: str) -> Precondition:
    # With the epoch: a trainer that resumed from an earlier step may come to the same alarm again.
    return Precondition(own_keys.job_alarms(request.run_id), f"{request.epoch}:{what}")


def _pause(jobs: JobStore, request: RenewLeaseRequest, report: StepReport) -> bool:
    """Pause at the last good weights: the newest published before the window in which the alarm arose."""
    job_id, mark = request.run_id, _mark(request, f"{report.step}:pause")
    if jobs.state(job_id) is not JobState.RUNNING or jobs.client.hexists(mark.key, mark.field):
        return False
    window = jobs.spec(job_id).collapse_guard.window
    sound = [known["version"] for known in published_versions(jobs, job_id) if known["step"] <= report.step - window]
    good = int(sound[-1]) if sound else REFERENCE_VERSION
    announced = announced_version(jobs, job_id)
    if announced is not None and announced.version != good:
        # Before the transition: should this process die in between, it is announced again, and nothing is lost.
        announce_version(jobs, job_id, good, "rolled_back", actor="collapse guard")
    reasons = "; ".join(reason for _, reason in sorted(report.alarms.items()))
    reason = f"collapse guard at step {report.step}: {reasons}; inference is at weight version {good}"
    outcome = jobs.commit(
        Commit(
            job_id,
            (JobState.RUNNING,),
            JobState.PAUSING,
            guard=mark,
            writes=[("HSET", mark.key, mark.field, good)],
            kind="state",
            body=json.dumps({"reason": reason}),
            actor="collapse guard",
        )
    )
    if outcome.done:
        log.warning("the collapse guard pauses a job", job=job_id, reason=reason)
    return outcome.done


@dataclass(frozen=True)
class DeathCount:
    """Deaths without a step in between, the last of them at `step`; so many of them were of memory."""

    deaths: int = 0
    step: int = 0
    out_of_memory: int = 0

    def after(self, death: TrainerDeath, *, of_memory: bool) -> DeathCount:
        """The count with one more death."""
        goes_on = death.steps_done == 0 or death.step == self.step
        before = self if goes_on else DeathCount()
        return DeathCount(before.deaths + 1, death.step, before.out_of_memory + of_memory)


def note_death(jobs: JobStore, request: RenewLeaseRequest, most: int) -> None:
    """Count the death that the holder of a lease reports, once; the job fails with the `most`th without a step.

    Raises LeaseLost for a stale holder.
    """
    job_id, death = request.run_id, request.death
    key = own_keys.job_trainer_deaths(job_id)
    stored = jobs.client.hgetall(key)
    told = stored.get(b"epoch", b"").decode()
    if told and int(told) >= death.epoch:
        return
    advice = advice_on(jobs.spec(job_id), death)
    # What the kernel kills leaves no word; where the plan says that there is too little, that was it.
    of_memory = death.out_of_memory or (not death.cause and advice is not None and not advice.fits)
    count = count_of(stored).after(death, of_memory=of_memory)
    message = in_words(death, advice if of_memory else None)
    fields = {"epoch": death.epoch, **asdict(count), "message": message}
    body = {
        **asdict(count),
        "most": most,
        "stage": death.stage,
        "cause": death.cause or UNSAID,
        "message": message,
    }
    if advice is not None:
        body |= {"needed_bytes": advice.needed_bytes, "usable_bytes": advice.usable_bytes, "helps": advice.changes}
    outcome = jobs.fenced(
        Commit(
            job_id,
            fence=Fence(request.trainer_id, request.epoch),
            guard=Precondition(key, "epoch", told),
            writes=[("HSET", key, *(word for field in fields.items() for word in field))],
            kind="trainer_died",
            body=json.dumps(body),
        )
    )
    if outcome.done:
        log.warning("a trainer died", job=job_id, deaths=count.deaths, most=most, reason=message)
    if count.deaths >= most:
        reason = f"{count.deaths} times without a step in between: {message}"
        jobs.fail(job_id, "trainer_out_of_memory" if count.out_of_memory else "trainer_dies", reason)


def count_of(stored: Mapping[bytes, bytes]) -> DeathCount:
    """As it is stored, or none."""
    return DeathCount(*(int(stored.get(name, b"0")) for name in (b"deaths", b"step", b"out_of_memory")))


def advice_on(spec: JobSpec, death: TrainerDeath) -> MemoryAdvice | None:
    """What the plan says of the memory that a rank had; None where the model's folder tells no sizes."""
    if not death.memory_bytes or not death.ranks:
        return None
    try:
        shape = shape_of_folder(Path(spec.model.path))
    except InvalidInput:
        return None
    return memory_advice(spec, shape, death.ranks, death.memory_bytes)


def in_words(death: TrainerDeath, advice: MemoryAdvice | None) -> str:
    """Where the trainer died and of what, and with advice what would help."""
    doing = DOING.get(death.stage, death.stage)
    found = f"the trainer died at step {death.step} ({doing}): {death.cause or UNSAID}"
    return f"{found}; {advice.words}" if advice else found


def trouble_of_trainer(client: RedisClient, job_id: str) -> list[str]:
    """Deaths that the job has not got beyond yet, in words."""
    stored = client.hgetall(own_keys.job_trainer_deaths(job_id))
    count = count_of(stored)
    if not count.deaths or latest_step(client, job_id) >= count.step:
        return []
    return [f"{count.deaths} times without a step in between {stored[b'message'].decode()}"]


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
        # Why the orchestrator's rounds over all jobs fail, in words; "" where they do not.
        self.outage = ""
        # Why Redis is not fit to hold the platform's data any more, in words; "" while it is.
        self.unfit: Callable[[], str] = lambda: ""
        self._pool_facts: tuple[float, dict[str, float]] = (float("-inf"), {})
        # How the evaluations of a job that are under way stand, in words.
        self.evaluations: Callable[[str], list[str]] = lambda job_id: []
        # What episodes that agents play wait for.
        self.episodes: Callable[[str], list[str]] = lambda job_id: []
        self.clock: Callable[[], float] = time.time
        self._lock = threading.Lock()
        # When each reason was first seen, and last; numbers in it may change meanwhile.
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}
        self._stands_since: dict[tuple[str, JobState], float] = {}

    def observe(self, job_id: str) -> None:
        """Take a sample when one is due, and add an event when nothing moved for stall_seconds."""
        now = time.monotonic()
        if now - self._sampled_at.get(job_id, -SAMPLE_SECONDS) < SAMPLE_SECONDS:
            return
        self._sampled_at[job_id] = now
        self._sample(job_id)
        state, progress = self.jobs.state(job_id), self._progress_of(job_id)
        before, since = self._progress.get(job_id, (None, now))
        if now - since > STANDS_SECONDS:
            # Also while nobody asks: so that it is known since when.
            self.named(job_id, state, self.waits(job_id, state))
        if progress != before:
            self._progress[job_id] = (progress, now)
            self._stands_since[job_id, state] = self.clock()
        elif now - since > self.stall_seconds:
            self._progress[job_id] = (progress, float("inf"))
            reasons = self.named(job_id, state, self.waits(job_id, state))
            self.jobs.append(job_id, "stalled", {"seconds": self.stall_seconds, "waits": reasons})

    def forget(self, active: Sequence[str]) -> None:
        """Drop what is remembered of jobs that ended."""
        for ended in self._sampled_at.keys() - set(active):
            del self._sampled_at[ended]
            self._progress.pop(ended, None)
        for ended in self._noted.keys() - set(active):
            del self._noted[ended]
        for key in [key for key in list(self._stands_since) if key[0] not in active]:
            self._stands_since.pop(key, None)

    def note_wait(self, job_id: str, reason: str) -> None:
        """Remember what the orchestrator's own step of a job waits for; "" for nothing."""
        if reason:
            self._noted[job_id] = reason
        else:
            self._noted.pop(job_id, None)

    def named(self, job_id: str, state: JobState, reasons: Sequence[str]) -> list[str]:
        """Why a job waits; what has stood for NAMED_SECONDS says since when, what is tried, and what ends it.

        A job that has stood still for so long waits for something, whether anybody says for what or not.
        """
        now = self.clock()
        stands_since = self._stands_since.setdefault((job_id, state), now)
        told = [self._told(job_id, reason, now) for reason in reasons]
        if not told and state in _STANDS and now - stands_since >= NAMED_SECONDS:
            told = [f"{_STANDS[state]} ({_since(_STANDS[state], stands_since)})"]
        return told

    def _told(self, job_id: str, reason: str, now: float) -> str:
        key = job_id, _NUMBER.sub("#", reason)[:200]
        with self._lock:
            since, last = self._seen.get(key, (now, now))
            since = now if now - last > 2 * NAMED_SECONDS else since
            if len(self._seen) >= MOST_REASONS:
                self._seen.clear()
            self._seen[key] = since, now
        return f"{reason} ({_since(reason, since)})" if now - since >= NAMED_SECONDS else reason

    def waits(self, job_id: str, state: JobState) -> list[str]:
        """Who waits for whom right now, in words; the first is the likeliest reason of a standstill."""
        noted = [reason for reason in (self.unfit(), self.outage, self._noted.get(job_id)) if reason]
        if state not in (JobState.ESTIMATING, JobState.RUNNING):
            return noted
        try:
            return self._waits(job_id, state, noted)
        except NotFound:
            return noted or [HALF_THERE]
        except redis.RedisError as error:
            found = as_spo_error(error)
            if found.retryable:
                raise
            return noted or [refused_in_words(self.jobs.client, job_id, found)]

    def never_right(self, job_id: str, spec: JobSpec) -> str:
        """That no rollout of the newest steps earned more than the worst reward, in words; "" where one did.

        Also "" before enough rollouts were learned from to say so. Before the first step the prompts' outcomes count.
        """
        raw = self.jobs.client.zrevrange(own_keys.job_metrics(job_id), 0, NEVER_RIGHT_STEPS - 1)
        rewards = [point[ONLINE] for point in map(json.loads, raw) if point.get(ONLINE) is not None]
        enough = NEVER_RIGHT_GROUPS * spec.rollout.samples_per_prompt
        if rewards:
            is_stuck = (
                max(rewards) <= spec.tasks.reward.shift + 1e-6 and len(rewards) * spec.trainer.batch_size >= enough
            )
            what = f"no rollout of the last {len(rewards)} steps earned more than the worst reward"
        else:
            found = self.jobs.client.hvals(redis_keys.replay_outcomes(job_id)) if spec.counts_outcomes else []
            counts = [tuple(map(int, each.split(b":"))) for each in found]
            rollouts, right = sum(count[0] for count in counts), sum(count[1] for count in counts)
            is_stuck = not right and rollouts >= enough
            what = f"none of {rollouts} rollouts was right"
        return f"{what}: {STUCK}" if is_stuck else ""

    def _waits(self, job_id: str, state: JobState, noted: list[str]) -> list[str]:
        waiting = entries_in_pipeline(self.jobs.client, job_id)
        troubles = troubles_in_pipeline(self.jobs.client, job_id)
        found = noted + [f"{place}: {trouble.reason}" for place, trouble in troubles.items()]
        failures = failures_of(self.jobs.client, job_id)
        found += [f"the evaluation of step {failure.step}: {failure.message}" for failure in failures]
        found += self.evaluations(job_id)
        if self.assigner.left_out(job_id):
            found.append("no inference replica is assigned to the job: there are fewer than jobs that run")
        if state is JobState.ESTIMATING:
            prompts = waiting["estimates"] or waiting["pivotal"]
            return [
                *found,
                *self._missing("inference", *self._judges(job_id), "value-estimation"),
                *self._problems(job_id),
                *([f"training waits for {prompts} prompts at value-estimation"] if prompts else []),
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
        found += self.episodes(job_id)
        spec = self.jobs.spec(job_id)
        places = dict(STAGES) | ({"prompts": "runners of agents"} if spec.tasks.harness else {})
        found += [f"{waiting[stream]} groups wait at {place}" for stream, place in places.items() if waiting[stream]]
        if waiting["estimates"]:
            found.append(f"{waiting['estimates']} prompts are estimated while the job trains")
        followed = spec.rollout.follow
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


def _since(reason: str, since: float) -> str:
    """Since when a reason stands, what is tried meanwhile, and what ends it."""
    matching = ((tried, ends) for pattern, tried, ends in _TRIED_AND_ENDS if pattern.search(reason))
    tried, ends = next(matching, _OTHERWISE)
    at = datetime.fromtimestamp(since, UTC).strftime("%H:%M:%S")
    return f"since {at} UTC; tried: {tried}; ends when: {ends}"
