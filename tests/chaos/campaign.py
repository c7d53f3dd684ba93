"""Jobs one after another on a platform under faults until the time is over; invariants are looked at throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from redis.exceptions import RedisError

from spo.client import Client
from spo.client.models import Job
from spo.errors import SpoError
from spo.messaging.redis_client import connect
from spo.testing.peers import wait_until
from tests.chaos import episodes, invariants
from tests.chaos.faults.fault import Stage
from tests.chaos.faults.requests import end_other_tenant
from tests.chaos.faults.schedule import Schedule
from tests.chaos.invariants import JobOutcome, RunningJob
from tests.chaos.platform import ChaosPlatform
from tests.chaos.recovery import Progress, Recovery, progress_of

POLL_SECONDS = 0.3
LOOK_SECONDS = 5.0
SAY_SECONDS = 15.0
# A fault waits for the recovery from the one before it, but no longer than this: then they overlap.
OVERLAP_SECONDS = 20.0
PAUSE_SECONDS = (0.5, 3.0)
STALL_SECONDS = 240.0
JOB_SECONDS = 1500.0
API_SECONDS = 120.0


class Stalled(Exception):
    """The platform made no progress for STALL_SECONDS after a fault, or a job did not end."""


@dataclass
class Campaign:
    """Runs once; `broken` is what did not hold."""

    platform: ChaosPlatform
    spec: Mapping[str, Any]
    schedule: Schedule
    # Seconds, and faults.
    bounds: tuple[float, int]
    say: Callable[[str], None]
    recoveries: list[Recovery] = field(default_factory=list)
    jobs: list[JobOutcome] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    # How much slower than a calm machine this one may be.
    patience: float = 1.0
    # Set once the undisturbed job has ended: only then do faults begin.
    _until: float | None = None
    _stage: Stage = field(init=False)
    _next_fault: float = 0.0
    _next_look: float = 0.0
    _next_word: float = 0.0
    _kills: int = 0
    _own_deaths: int = 0
    _pauses: Random = field(default_factory=lambda: Random(0))

    def run(self) -> None:
        """One undisturbed job, then disturbed ones; stops at the first stall, goes on after any other fault found."""
        self._stage = Stage(self.platform, self.spec["model"]["path"])
        url, key = self.platform.launcher.http_url, self.platform.api_key
        with (
            Client(url, key, timeout_seconds=5 * self.patience, retry_seconds=0) as looker,
            Client(url, key, retry_seconds=API_SECONDS * self.patience) as client,
        ):
            try:
                self._job(looker, client)
                self._until = time.monotonic() + self.bounds[0]
                while time.monotonic() < self._until and len(self.recoveries) < self.bounds[1]:
                    self._job(looker, client)
            except Stalled as stalled:
                self._found(str(stalled))
            finally:
                self._take_back()

    def _job(self, looker: Client, client: Client) -> None:
        """Submit a job, disturb it until it ends, and check what it leaves."""
        began = time.monotonic()
        job_id = client.submit(self.spec).id
        self._stage.job_id = job_id
        running = RunningJob(job_id)
        outcome = JobOutcome(job_id, "unknown", 0.0)
        self.jobs.append(outcome)
        self._say(f"job {len(self.jobs)} is {job_id}" + ("" if self._until else ", undisturbed"))
        job = self._follow(looker, running, began)
        outcome.state, outcome.seconds = job.state, round(time.monotonic() - began, 1)
        outcome.score = job.latest_evaluation.pass_at_k["1"].value if job.latest_evaluation else None
        for broken in self._check(client, job, running, outcome):
            outcome.broken.append(broken)
            self._found(f"{job_id}: {broken}")

    def _follow(self, looker: Client, running: RunningJob, began: float) -> Job:
        """Look on, and inflict faults, until the job has ended and every fault is recovered from."""
        while True:
            job = self._seen(looker, running.job_id)
            self._tend_faults(job)
            running.was_set_back = running.job_id in self._stage.set_back
            if job and job.is_final and not self._open():
                return job
            if job and not job.is_final:
                self._look(looker, running)
                self._disturb()
            if time.monotonic() > began + JOB_SECONDS * self.patience:
                raise Stalled(
                    f"{running.job_id} did not end within {JOB_SECONDS:g} s: {job and (job.state, job.waits)}"
                )
            self._say_where(job)
            time.sleep(POLL_SECONDS)

    def _check(self, client: Client, job: Job, running: RunningJob, outcome: JobOutcome) -> Iterator[str]:
        if job.state != "succeeded":
            yield f"the job ended {job.state}: {job.failure}"
        else:
            evaluated = self.spec["tasks"]["evaluation_problems"] > 0
            yield from invariants.check_ended(
                self.platform, client, job, set_back=running.was_set_back, evaluated=evaluated
            )
            yield from self._score(outcome)
        yield from running.look(client)
        yield from self._other_tenant(client)
        yield from self._ledger(outcome)
        if "harness" in self.spec["tasks"] and not running.was_set_back:
            yield from episodes.check_episodes(self.platform, outcome)
        yield from invariants.losses(client, redis_set_back=bool(self._stage.set_back))
        yield from self._stage.broken
        self._stage.broken.clear()
        yield from invariants.open_evaluations(client, self._stage.evaluations)
        self._stage.evaluations.clear()
        yield from self._deletion(client, job.id)
        outcome.memory_bytes = int(self.platform.redis.info("memory")["used_memory"])
        allowed = self.jobs[0].memory_bytes * invariants.MEMORY_RATIO + invariants.MEMORY_SLACK_BYTES
        if outcome.memory_bytes > allowed:
            yield f"Redis holds {outcome.memory_bytes:,} bytes without any job, {allowed:,.0f} are allowed"
        outcome.keys = invariants.keys_by_family(self.platform)
        yield from invariants.grown_families(self.jobs)
        yield from invariants.children_left(self.platform)

    def _other_tenant(self, client: Client) -> Iterator[str]:
        def gone() -> bool:
            try:
                end_other_tenant(self._stage, client)
            except SpoError:
                return False
            return True

        try:
            wait_until(gone, "the other tenant's jobs may be deleted", invariants.DRAIN_SECONDS, 1)
        except TimeoutError:
            yield f"jobs of the other tenant cannot be deleted: {self._stage.other_jobs}"

    def _score(self, outcome: JobOutcome) -> Iterator[str]:
        usual = self.jobs[0].score
        if usual is not None and (outcome.score is None or outcome.score < usual - invariants.SCORE_BAND):
            yield f"a score of {outcome.score}, undisturbed {usual}"

    def _ledger(self, outcome: JobOutcome) -> Iterator[str]:
        missing: set[tuple[str, int]] = set()
        if "harness" in self.spec["tasks"]:
            samples = self.spec["rollout"]["samples_per_prompt"]
            with connect(self.platform.redis_url) as redis:
                found = invariants.missing_episodes(redis, outcome.job_id, samples)
            outcome.given_up, outcome.dropped = len(found.given_up), len(found.dropped)
            missing = found.given_up | found.dropped
        try:
            counted = invariants.ledger_of(self.platform, outcome.job_id, self._stage.injected_dead_letters, missing)
        except (AssertionError, TimeoutError) as error:
            outcome.lost, outcome.doubled = invariants.lost_and_doubled(str(error))
            yield f"ledger: {str(error).splitlines()[0] if str(error) else 'a trajectory is incomplete'}"
        else:
            outcome.trajectories = counted

    def _deletion(self, client: Client, job_id: str) -> Iterator[str]:
        def deleted() -> bool:
            try:
                client.delete(job_id)
            except SpoError as error:
                if error.code == "experience_on_its_way":
                    return False
                raise
            return True

        try:
            wait_until(deleted, "the ended job may be deleted", invariants.DRAIN_SECONDS, 1)
        except (TimeoutError, SpoError) as error:
            yield f"deletion: {error}"
        else:
            yield from invariants.orphans_of_deleted(self.platform, job_id)
            yield from invariants.staging_left(self.platform)

    def _disturb(self) -> None:
        now = time.monotonic()
        if self._until is None or now > self._until or now < self._next_fault:
            return
        if len(self.recoveries) >= self.bounds[1]:
            return
        if self._open() and now < self.recoveries[-1].began + OVERLAP_SECONDS:
            return
        try:
            begun = self.schedule.inflict(self._stage)
        except (RedisError, OSError, SpoError) as error:
            self._say(f"a fault could not be inflicted: {error}")
            begun = None
        if begun is None:
            self._next_fault = now + 1
            return
        for recovery in self._open():
            recovery.overlap()
        fault, inflicted = begun
        self._kills += len(inflicted.killed)
        self.recoveries.append(Recovery(fault, inflicted, time.monotonic(), len(self.jobs)))
        self._say(f"fault {len(self.recoveries)}: {inflicted.what}")

    def _tend_faults(self, job: Job | None) -> None:
        """End what is due, and see who has recovered."""
        self._count_deaths()
        progress: Progress | None = progress_of(job) if job else None
        for recovery in [each for each in self._open() if each.is_due]:
            try:
                recovery.end()
            except RedisError as error:
                self._say(f"a fault is taken back later: {error}")
        ended = [each for each in self._open() if each.ended is not None]
        all_over = len(ended) == len(self._open())
        all_ready = all_over and any(each.ready is None for each in ended) and self._all_ready()
        for recovery in ended:
            recovery.observe(all_ready, progress, job_has_ended=bool(job and job.is_final))
            if recovery.recovered is not None:
                seconds = (recovery.restart_seconds or 0, recovery.recovery_seconds or 0)
                self._say(
                    f"recovered from {recovery.fault.kind}: ready after {seconds[0]:.1f} s, then {seconds[1]:.1f} s"
                )
                self._next_fault = time.monotonic() + self._pauses.uniform(*PAUSE_SECONDS)
            elif time.monotonic() > (recovery.ended or 0) + STALL_SECONDS * self.patience:
                why = f"{job.state}, waits {job.waits}" if job else "no answer"
                raise Stalled(f"no recovery within {STALL_SECONDS:g} s of: {recovery.inflicted.what} ({why})")

    def _all_ready(self) -> bool:
        return all(child.is_running() and child.is_ready() for child in self.platform.launcher.children)

    def _count_deaths(self) -> None:
        restarts = sum(child.restarts for child in self.platform.launcher.children)
        own = max(0, restarts - self._kills)
        if own > self._own_deaths and self.recoveries:
            self.recoveries[-1].own_deaths += own - self._own_deaths
            self._own_deaths = own
            self._say("a service died by itself")

    def _look(self, looker: Client, running: RunningJob) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            for broken in running.look(looker):
                self._found(f"{running.job_id}: {broken}")
        except SpoError:
            # The API is away, as it may be; what is missed now is seen at the next look.
            return

    @staticmethod
    def _seen(looker: Client, job_id: str) -> Job | None:
        try:
            return looker.get(job_id)
        except SpoError:
            return None

    def _open(self) -> list[Recovery]:
        return [each for each in self.recoveries if each.recovered is None]

    def _take_back(self) -> None:
        for recovery in self._open():
            if recovery.ended is None:
                try:
                    recovery.end()
                except RedisError as error:
                    self._say(f"not taken back: {recovery.inflicted.what}: {error}")

    def _found(self, broken: str) -> None:
        if broken not in self.broken:
            self.broken.append(broken)
            self._say(f"BROKEN {broken}")

    def _say(self, words: str) -> None:
        self._next_word = time.monotonic() + SAY_SECONDS
        left = f"{max(0.0, self._until - time.monotonic()):5.0f} s left" if self._until else "   undisturbed"
        self.say(f"{left}  {words}")

    def _say_where(self, job: Job | None) -> None:
        if time.monotonic() < self._next_word:
            return
        where = f"{job.state}, step {job.progress.step} of {job.progress.steps}" if job else "the API does not answer"
        faults = ", ".join(each.fault.kind for each in self._open())
        self._say(
            f"job {len(self.jobs)}: {where}; {len(self.recoveries)} faults" + (f"; open: {faults}" if faults else "")
        )
