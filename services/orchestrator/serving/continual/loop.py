"""The loop of continual jobs: begin rounds that are due, follow them, and serve what passes the gate.

Each step of a round is stored before the next one begins, and repeating a step changes nothing: the job of a round and
its evaluations have idempotency keys of their own. Two orchestrators, or a crash between any two lines, cost time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import cast

import redis

from services.orchestrator.evaluation.queue import EvaluationQueue
from services.orchestrator.evaluation.requests import OPEN, RequestedEvaluation
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.series import training_series
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.leadership import NotLeading
from services.orchestrator.replicas.weights import WeightAnnouncements
from services.orchestrator.serving.continual.disagreement import (
    SourceResidual,
    source_residuals,
    suspects_in_words,
)
from services.orchestrator.serving.continual.gate import GateComparison, compare
from services.orchestrator.serving.continual.round_experience import RoundExperience
from services.orchestrator.serving.continual.round_jobs import RoundJobs
from services.orchestrator.serving.continual.rounds import ENDED, ContinualJob, ContinualStore, Round, RoundState
from services.orchestrator.serving.served_models import Change, ServedModels, Target
from spo.errors import Conflict, NotFound, SpoError
from spo.observability.logs import get_logger
from spo.spec.job_spec import EvaluationSpec
from spo.spec.job_state import TERMINAL, JobState
from spo.spec.stored import record_of

log = get_logger("continual")

LOOK_SECONDS = 5.0


class ContinualLoop:
    """Looks at every continual job every few seconds; one job's trouble is no other's."""

    def __init__(
        self,
        store: ContinualStore,
        served: ServedModels,
        round_jobs: RoundJobs,
        evaluations: EvaluationQueue,
        weights: WeightAnnouncements,
        experience: RoundExperience,
    ) -> None:
        self.store = store
        self.served = served
        self.round_jobs = round_jobs
        self.evaluations = evaluations
        self.weights = weights
        self.experience = experience
        self.jobs: JobStore = store.jobs

    def run(self, stop: threading.Event) -> None:
        """Work until stop."""
        while not stop.wait(LOOK_SECONDS):
            try:
                self.tick()
            except (SpoError, redis.RedisError) as error:
                log.warning("continual jobs wait", reason=str(error))

    def tick(self, now: datetime | None = None) -> None:
        """One look at each; what one waits for is noted on it."""
        for job in self.store.all():
            reason = ""
            try:
                self._advance(job, now or datetime.now(UTC))
            except (NotLeading, redis.RedisError):
                raise
            except Exception as error:
                # Retried at the next look: a service that is away, a store that cannot be reached.
                reason = error.message if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"
                log.warning("a continual job waits", name=job.name, reason=reason)
            self.store.note_wait(job, reason)

    def _advance(self, job: ContinualJob, now: datetime) -> None:
        rounds = self.store.rounds(job)
        newest = next(iter(rounds), None)
        if newest is None or newest.state in ENDED:
            # Before its schedule is asked: that nothing is served is known at once, not when a round is due.
            self._require_served(job)
            if not self._is_due(job, rounds, now):
                return
            newest = self._begin(job, rounds)
        try:
            self._follow(job, newest)
        except NotLeading:
            raise
        except SpoError as error:
            if error.retryable:
                raise
            # Waiting would not help: held-out problems that are gone, a job that is refused.
            faults = "; ".join(f"{fault.pointer}: {fault.message}" for fault in error.violations)
            self._end(job, newest, "failed", f"{error.message} {faults}".strip())

    def _follow(self, job: ContinualJob, current: Round) -> None:
        """The next step of a round that is under way. Raises SpoError."""
        if current.state == "starting":
            self._start(job, current)
        elif current.state == "training":
            self._follow_training(job, current)
        else:
            self._follow_evaluations(job, current)

    def _is_due(self, job: ContinualJob, rounds: list[Round], now: datetime) -> bool:
        schedule, least = job.spec.schedule, 1
        if not self.store.is_round_wanted(job):
            last = datetime.fromisoformat(rounds[0].began_at if rounds else job.created_at)
            if job.spec.paused or now < schedule.next_at(last):
                return False
            least = schedule.min_new_trajectories
        self.experience.collect_traffic(job)
        return self.experience.new_rows(job, rounds) >= least

    def _require_served(self, job: ContinualJob) -> None:
        try:
            self.served.get(job.tenant, job.spec.serves)
        except NotFound:
            message = f"nothing is served as {job.spec.serves}: publish a version under that name, or roll it back"
            raise NotFound(message, code="model_not_found") from None

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
        except NotFound:
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
        except NotFound:
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
        except (Conflict, NotFound) as error:
            self._end(job, current, "kept", f"what is served was changed meanwhile ({error.message}): {told}")
        else:
            self._end(job, current, "served", told)

    def _newest(self, job_id: str) -> int:
        """The newest weight version of a job, 0 before the first."""
        return max((int(told["version"]) for told in self.weights.versions(job_id)), default=0)

    def _end(self, job: ContinualJob, current: Round, state: RoundState, reason: str) -> None:
        ended = replace(current, state=state, reason=reason[:2000], ended_at=timestamp())
        self.store.change_round(job, ended)
        log.info("a round ended", name=job.name, round=current.number, state=state, reason=reason)


def _table(evaluation: RequestedEvaluation) -> Sequence[Mapping[str, object]]:
    return cast("Sequence[Mapping[str, object]]", (evaluation.result or {}).get("per_problem", ()))
