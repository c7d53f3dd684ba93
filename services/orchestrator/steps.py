"""Moves every job along its life, one small, repeatable step at a time: queue, preparation, training, and what a
person may do to it.

A restart goes on where the last step stopped.
queued -> validating   when there is a free slot
validating -> estimating   tests uploaded
estimating -> running   enough training prompts have a value; the others get theirs while it trains
running -> succeeded   the trainer finished and the last evaluation is there
cancelling -> cancelled, pausing -> paused   the trainer gave the job back
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.checks import ModelCheck
from services.orchestrator.commit import Commit, Write
from services.orchestrator.damaged_jobs import HALF_THERE, refused_in_words, replace_damaged
from services.orchestrator.datasets import TaskLibrary
from services.orchestrator.evaluation import EvaluationQueue
from services.orchestrator.job_records import (
    EvaluationFailure,
    JobAction,
    clear_fields,
    latest_step,
    refuse,
    turns_of,
    while_field_is,
    write_fields,
)
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import Leases, recorded_checkpoints
from services.orchestrator.monitor import JobMonitor
from services.orchestrator.pipeline import check_groups, given_up
from services.orchestrator.replicas import ReplicaAssigner, ReplicaRegistry
from services.orchestrator.scoring import upload_tests
from services.orchestrator.settings import Settings
from services.orchestrator.values import (
    advance_reference,
    await_stored,
    needs_estimates,
    prompts_before_training,
    prompts_known,
    publish_estimates,
    publish_pivotal,
    write_prompts,
)
from spo import redis_keys
from spo.errors import IntegrityError, NotFound, NotReady, SpoError, Unreachable, storage_error
from spo.messaging.redis_client import as_spo_error
from spo.messaging.streams.recovery import Outage
from spo.observability import get_logger
from spo.rpc.pools import JudgePools
from spo.service.process import JobSteps, in_rounds
from spo.spec.job_spec import JobSpec
from spo.spec.section import ACTIVE, HOLDS_SLOT, JobState
from spo.tasks.problem import Problem
from spo.v1.environment_service_pb2 import BeginRequest

PROGRESS_SECONDS = 2.0
PROMPTS_TOLD = 100
ENVIRONMENT_SECONDS = 60.0

DEAD_LETTER_SECONDS = 2.0

log = get_logger("steps")

TICK_SECONDS = 1.0
HOUSEKEEPING_SECONDS = 2.0
ADOPTION_SECONDS = 30.0
# Of a round that is asked for by itself; the loop waits for no step longer than for its next round.
PATIENCE_SECONDS = 30.0
# A step that takes so long is named among the job's waits.
LONG_STEP_SECONDS = 5.0
# What a round is tried again after.
_PASSING = (redis.RedisError, NotReady)


def _raise(job_id: str, error: redis.RedisError) -> None:
    raise error


class JobQueue:
    """Gives free slots to tenants in turn, of each to the highest priority first and of equal ones to the oldest."""

    def __init__(self, jobs: JobStore, replicas: ReplicaRegistry, max_running_jobs: int) -> None:
        self.jobs = jobs
        self.replicas = replicas
        self.max_running_jobs = max_running_jobs
        # Told what Redis says where a job's turn came; raises what holds up every job.
        self.refused: Callable[[str, redis.RedisError], None] = _raise
        self._lock = threading.Lock()

    def capacity(self) -> int:
        """Jobs past `queued` at one time: as configured, or one per live trainer while each has an inference replica.

        A job that has a slot keeps it when a trainer leaves.
        """
        if self.max_running_jobs:
            return self.max_running_jobs
        live = self.replicas.counts()
        return max(1, min(live.get("trainer", 0), live.get("inference", 0)))

    def waiting(self) -> list[str]:
        """Ids of the jobs that wait for a slot, oldest first."""
        with self.jobs.client.pipeline(transaction=True) as pipe:
            for key in (redis_keys.jobs_in_state(JobState.QUEUED), own_keys.resuming()):
                pipe.zrange(key, 0, -1, withscores=True)
            found = [(score, raw.decode()) for members in pipe.execute() for raw, score in members]
        return [job_id for _, job_id in sorted(found)]

    def fill(self) -> None:
        """Give the free slots to waiting jobs; where `refused` returns, the next in turn gets the slot."""
        with self._lock:
            holding = self.jobs.in_states(HOLDS_SLOT)
            free = self.capacity() - len(holding)
            if free <= 0 or not (waiting := self.waiting()):
                return
            for job_id in turns_of(self.jobs.client, self.jobs.by_priority(waiting), holding):
                if free > 0:
                    free -= self._begin(job_id)

    def _begin(self, job_id: str) -> bool:
        try:
            if not self.jobs.transition(job_id, JobState.VALIDATING, "its turn came", expected=(JobState.QUEUED,)):
                self._resume(job_id)
        except redis.RedisError as error:
            self.refused(job_id, error)
            return False
        return True

    def _resume(self, job_id: str) -> None:
        if not self.jobs.transition(
            job_id, JobState.RUNNING, "its turn came again", expected=(JobState.PAUSED,), writes=_leave_queue(job_id)
        ):
            # Cancelled while it waited.
            self.jobs.write(("ZREM", own_keys.resuming(), job_id))
            # Not there at all, it would take its turn for ever.
            self.jobs.forget_ghost(job_id)

    def reasons(self, job_id: str, state: JobState) -> list[str]:
        """Why a job in this state waits, where it waits for a slot."""
        waits = state is JobState.QUEUED or (state is JobState.PAUSED and self.jobs.record(job_id).resume_asked)
        if not waits:
            return []
        holding, capacity = len(self.jobs.in_states(HOLDS_SLOT)), self.capacity()
        return [f"the job waits for a slot: {holding} of {capacity} are taken; higher priorities go first"]


def _leave_queue(job_id: str) -> list[Write]:
    """What takes a job that resumes, or shall not, out of the queue."""
    return [clear_fields(job_id, "resume_asked"), ("ZREM", own_keys.resuming(), job_id)]


def act_on(jobs: JobStore, job_id: str, action: JobAction, actor: str = "api") -> JobState:
    """Do what a person asks, as one change of the job; asked again it changes nothing. Returns the state after it.

    Damaged keys are replaced before a cancel. Raises NotFound, Conflict (illegal_transition).
    """
    if action.name == "cancel":
        replace_damaged(jobs, job_id)
    while True:
        state = jobs.state(job_id)
        if state in action.already:
            if action.name == "pause":
                _stay_paused(jobs, job_id)
            return state
        if state not in action.moves:
            raise refuse(action.name, state)
        if state in action.queues:
            if ask_to_resume(jobs, job_id, actor):
                return state
            continue
        to = action.moves[state]
        if jobs.transition(job_id, to, f"{action.name} asked for", expected=(state,), actor=actor):
            return to


def ask_to_resume(jobs: JobStore, job_id: str, actor: str) -> bool:
    """Let a paused job wait for a slot; asked again, it keeps its turn. False when it is not paused any more."""
    created_unix_ms = jobs.record(job_id).created_unix_ms
    outcome = jobs.commit(
        Commit(
            job_id,
            (JobState.PAUSED,),
            guard=while_field_is(job_id, "resume_asked"),
            writes=[
                write_fields(job_id, resume_asked=True),
                ("ZADD", own_keys.resuming(), created_unix_ms, job_id),
            ],
            kind="resume_asked",
            actor=actor,
        )
    )
    return outcome.verdict != "state"


def _stay_paused(jobs: JobStore, job_id: str) -> None:
    """Let a paused job that waits for a slot stay paused after all."""
    guard = while_field_is(job_id, "resume_asked", 1)
    commit = Commit(job_id, guard=guard, writes=_leave_queue(job_id), kind="resume_withdrawn")
    jobs.commit(commit, durable=False)


def rename_job(jobs: JobStore, job_id: str, name: str, actor: str = "api") -> None:
    """Give a job another name in lists and on pages; its spec keeps the one it came with. Raises NotFound."""
    if jobs.record(job_id).name == name:
        return
    # What people write into requests is in no event.
    commit = Commit(job_id, writes=[write_fields(job_id, name=name)], kind="renamed", actor=actor)
    if not jobs.commit(commit).done:
        raise jobs.absent(job_id)


def ask_for_checkpoint(jobs: JobStore, job_id: str) -> None:
    """Let the trainer of a running job write a checkpoint now. Raises NotFound, Conflict (illegal_transition)."""
    commit = Commit(job_id, (JobState.RUNNING,), writes=[write_fields(job_id, checkpoint_asked=True)])
    if not jobs.commit(commit).done:
        raise refuse("checkpoint", jobs.state(job_id))


class JobPreparation:
    """validating -> estimating -> running, or succeeded where nothing is trained; every step may be repeated."""

    def __init__(self, jobs: JobStore, library: TaskLibrary, model_check: ModelCheck, judges: JudgePools) -> None:
        self.jobs = jobs
        self.library = library
        self.model_check = model_check
        self.judges = judges
        self._reported: dict[tuple[str, str], tuple[int, float]] = {}

    def validate(self, job_id: str) -> None:
        """Try the model on every prompt, give the judges every test set of the job, and try its environment.

        All by content, so doing it twice changes nothing.
        """
        spec = self.jobs.spec(job_id)
        await_stored(self.jobs.client, spec)
        tasks = self.library.load(spec.tasks)
        too_long = self.model_check.of_all_prompts(job_id, spec, tasks)
        if too_long:
            self._tell_too_long(job_id, spec, too_long)
        write_prompts(self.jobs, job_id, tasks.train, spec)
        problems = [*tasks.train, *tasks.evaluation]
        upload_tests(self.judges, problems)
        if problems[0].environment:
            self._try_environment(problems[0])
        totals = write_fields(job_id, prompts_total=len(tasks.train), evaluation_total=len(tasks.evaluation))
        ready = "; ".join([f"{len(problems)} problems ready", *tasks.notes])
        self.jobs.transition(job_id, JobState.ESTIMATING, ready, writes=[totals])

    def _try_environment(self, problem: Problem) -> None:
        """Begin an episode that nobody plays; raises what the environment says of its name and arguments."""
        request = BeginRequest(environment=problem.environment, environment_json=problem.environment_json, seeds=[0])
        self.judges.environments.call("Begin", request, ENVIRONMENT_SECONDS)

    def _tell_too_long(self, job_id: str, spec: JobSpec, too_long: dict[str, int]) -> None:
        """Say once which prompts nothing will be sampled for."""
        body = {
            "total": len(too_long),
            "max_prompt_tokens": spec.model.max_prompt_tokens,
            "prompts": dict(list(too_long.items())[:PROMPTS_TOLD]),
        }
        writes = [write_fields(job_id, prompts_too_long=len(too_long))]
        self.jobs.once(job_id, while_field_is(job_id, "prompts_too_long"), "prompts_too_long", body, writes)

    def estimate(self, job_id: str) -> None:
        """Ask for the values, and start training when enough prompts have one, or all are done or given up on."""
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        problems = tasks.train
        if spec.trainer.steps and not needs_estimates(spec):
            self.jobs.transition(job_id, JobState.RUNNING, "the objectives need no values")
            return
        publish_estimates(self.jobs, job_id, tasks)
        if not self._are_estimated(job_id, len(problems)):
            needed, known = prompts_before_training(spec, len(problems)), prompts_known(self.jobs.client, job_id)
            if known >= needed and needed < len(problems):
                reason = f"{known} of {len(problems)} prompts have a value; the others are estimated while it trains"
                self.jobs.transition(
                    job_id, JobState.RUNNING, reason, writes=[write_fields(job_id, estimates_pending=True)]
                )
        elif self._pivotal_is_over(job_id, spec, problems):
            done = self.jobs.client.hlen(redis_keys.run_values(job_id))
            self._go_on(job_id, spec, f"{done} of {len(problems)} prompts have a value")

    def estimate_beside_training(self, job_id: str) -> None:
        """Of a running job whose estimates go on: tell their progress, and once that they are over.

        Raises PreconditionFailed (code "too_many_dead_letters").
        """
        spec = self.jobs.spec(job_id)
        tasks = self.library.load(spec.tasks)
        publish_estimates(self.jobs, job_id, tasks)
        if self._are_estimated(job_id, len(tasks.train)) and self._pivotal_is_over(job_id, spec, tasks.train):
            guard, over = while_field_is(job_id, "estimates_pending", 1), clear_fields(job_id, "estimates_pending")
            done = self.jobs.client.hlen(redis_keys.run_values(job_id))
            self.jobs.once(job_id, guard, "estimated", {"done": done, "total": len(tasks.train)}, [over])

    def _are_estimated(self, job_id: str, total: int) -> bool:
        """Whether every prompt has its final value or was given up on; tells the progress."""
        done = self.jobs.client.hlen(redis_keys.run_values(job_id))
        self._report(job_id, "estimating", done, total)
        return done + self._given_up(job_id, "estimates", done, total) >= total

    def _go_on(self, job_id: str, spec: JobSpec, reason: str) -> None:
        """Training begins, or the job has succeeded where nothing is to be trained."""
        if spec.trainer.steps:
            self.jobs.transition(job_id, JobState.RUNNING, reason)
        else:
            self.jobs.transition(job_id, JobState.SUCCEEDED, f"{reason}; no step was to be trained")

    def _pivotal_is_over(self, job_id: str, spec: JobSpec, problems: Sequence[Problem]) -> bool:
        """Ask for pivotal tokens where the spec wants them; whether training may begin."""
        if spec.value is None or spec.value.pivotal is None:
            return True
        publish_pivotal(self.jobs, job_id, problems)
        if spec.value.pivotal.when == "idle":
            return True
        done = self.jobs.client.hlen(redis_keys.run_pivotal(job_id))
        self._report(job_id, "pivotal", done, len(problems))
        return done + self._given_up(job_id, "pivotal", done, len(problems)) >= len(problems)

    def _given_up(self, job_id: str, stream: str, done: int, total: int) -> int:
        """Prompts that value-estimation gave up on. Raises PreconditionFailed when there are too many."""
        most = self.model_check.max_share
        return given_up(self.jobs, job_id, stream, total, most) if done < total else 0

    def _report(self, job_id: str, stage: str, done: int, total: int) -> None:
        reported, at = self._reported.get((job_id, stage), (-1, 0.0))
        if done != reported and (done == total or time.monotonic() - at > PROGRESS_SECONDS):
            self._reported[job_id, stage] = (done, time.monotonic())
            self.jobs.append(job_id, "progress", {"stage": stage, "done": done, "total": total})


class JobTraining:
    """running -> succeeded, pausing -> paused, cancelling -> cancelled; every step may be repeated."""

    def __init__(
        self,
        jobs: JobStore,
        leases: Leases,
        evaluations: EvaluationQueue,
        library: TaskLibrary,
        settings: Settings,
    ) -> None:
        self.jobs = jobs
        self.leases = leases
        self.evaluations = evaluations
        self.library = library
        self.settings = settings
        self._checked_at: dict[str, float] = {}
        self._pausing_since: dict[str, float] = {}

    def advance(self, job_id: str) -> None:
        """A running job: refresh its reference, and end it when it is trained and evaluated.

        Raises PreconditionFailed (code "too_many_dead_letters").
        """
        self._pausing_since.pop(job_id, None)
        self._check_dead_letters(job_id)
        record = self.jobs.record(job_id)
        if not record.estimates_pending:
            # A later reference takes its prompts from those that have a value: all of them, then.
            advance_reference(self.jobs, self.library, job_id)
        trained_steps = record.trained_steps
        if trained_steps is not None and self.evaluations.schedule.due(job_id) is None:
            reason = f"{trained_steps} steps trained and evaluated"
            failed = self.evaluations.schedule.given_up(job_id)
            if self._published_again(job_id, trained_steps, failed):
                return
            if failed:
                steps = ", ".join(str(failure.step) for failure in failed)
                reason = f"{trained_steps} steps trained; the evaluation of step {steps} failed: {failed[-1].message}"
            self.jobs.transition(job_id, JobState.SUCCEEDED, reason, writes=[_drop_prompts(job_id)])

    def _published_again(self, job_id: str, trained_steps: int, failed: Sequence[EvaluationFailure]) -> bool:
        """Have a trainer publish the last weights once more, from the checkpoint that has them too; once, not for ever.

        failed: evaluations that were given up on. Only of damaged weights.
        """
        damaged = [each for each in failed if each.step == trained_steps and each.code == IntegrityError.default_code]
        saved = recorded_checkpoints(self.jobs.client, job_id)
        if not damaged or not saved or saved[-1].step != trained_steps:
            return False
        body = {"version": damaged[0].version, "step": trained_steps, "message": damaged[0].message}
        forgotten: Write = ("HDEL", own_keys.evaluation_failures(job_id), trained_steps)
        noted = write_fields(job_id, published_again=True)
        commit = Commit(
            job_id,
            (JobState.RUNNING,),
            guard=while_field_is(job_id, "published_again"),
            writes=[clear_fields(job_id, "trained_steps"), forgotten, noted],
            kind="weights_damaged",
            body=json.dumps(body),
        )
        return self.jobs.commit(commit).done

    def pause(self, job_id: str) -> None:
        """A pausing job is paused once its last step is saved, or nobody is there to save it."""
        since = self._pausing_since.setdefault(job_id, time.monotonic())
        if not self.leases.lease(job_id).live:
            self.jobs.transition(job_id, JobState.PAUSED, "no trainer holds the job")
        elif self._is_saved(job_id):
            self.jobs.transition(job_id, JobState.PAUSED, "the last step is saved")
        elif time.monotonic() - since > self.settings.pause_grace_seconds:
            self.jobs.transition(job_id, JobState.PAUSED, "no checkpoint came within the grace; the last one counts")

    def cancel(self, job_id: str) -> None:
        """A cancelling job is cancelled once no trainer holds it."""
        if not self.leases.lease(job_id).live:
            reason = "no trainer holds the job"
            self.jobs.transition(job_id, JobState.CANCELLED, reason, writes=[_drop_prompts(job_id)])

    def forget(self, active: Sequence[str]) -> None:
        """Drop what is remembered of jobs that ended."""
        for remembered in (self._checked_at, self._pausing_since):
            for ended in remembered.keys() - set(active):
                del remembered[ended]

    def _check_dead_letters(self, job_id: str) -> None:
        if time.monotonic() - self._checked_at.get(job_id, float("-inf")) <= DEAD_LETTER_SECONDS:
            return
        self._checked_at[job_id] = time.monotonic()
        dispatched = int(self.jobs.client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
        check_groups(self.jobs, job_id, dispatched, self.settings.max_dead_letter_share)

    def _is_saved(self, job_id: str) -> bool:
        saved = recorded_checkpoints(self.jobs.client, job_id)
        return bool(saved) and saved[-1].step >= latest_step(self.jobs.client, job_id) > 0


def _drop_prompts(job_id: str) -> Write:
    """Drop the prompts of an ended run; the consumer group stays for those who still read."""
    return ("XTRIM", redis_keys.prompts(job_id), "MAXLEN", 0)


class JobRunner:
    """The loop over all jobs that have not ended."""

    def __init__(
        self,
        jobs: JobStore,
        queue: JobQueue,
        preparation: JobPreparation,
        training: JobTraining,
        monitor: JobMonitor,
        assigner: ReplicaAssigner,
    ) -> None:
        self.jobs = jobs
        self.queue = queue
        self.preparation = preparation
        self.training = training
        self.monitor = monitor
        self.assigner = assigner
        self._tidied_at = 0.0
        self._outages: dict[str, Outage] = {}
        queue.refused = self._note_or_raise
        self._adoption = JobSteps(self._alone(self._adopt), "adoption")
        self._steps = JobSteps(self._alone(self._advance), "job-step")

    def run(self, stop: threading.Event) -> None:
        """Adopt what an earlier process left and advance all jobs until stop."""
        try:
            in_rounds(lambda: self.tick(TICK_SECONDS), stop, TICK_SECONDS, "jobs wait", _PASSING, self.adopt)
        finally:
            self._adoption.close()
            self._steps.close()

    def adopt(self) -> None:
        """Check the state of every unfinished job against its events and say that it has an owner again."""
        with self._outage_named():
            self._adoption.round(self.jobs.in_states([*ACTIVE, JobState.QUEUED]), ADOPTION_SECONDS)

    def tick(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """One round: fill the free slots, then advance every active job by one step.

        A step that takes longer than patience_seconds goes on beside the following rounds.
        """
        with self._outage_named():
            self._round(patience_seconds)

    @contextmanager
    def _outage_named(self) -> Iterator[None]:
        """While rounds fail, no job is looked after: every job's waits say why."""
        try:
            if self.monitor.outage:
                # A round need not write, and what only reads must not call it over while writes are refused.
                self.jobs.write(("ZREM", own_keys.resuming(), ""))
            yield
        except _PASSING as error:
            self.monitor.outage = (as_spo_error(error) if isinstance(error, redis.RedisError) else error).message
            raise
        self.monitor.outage = ""

    def _round(self, patience_seconds: float) -> None:
        self._tidy()
        self.queue.fill()
        active = self.jobs.in_states(ACTIVE)
        adopted_later = self._adoption.seconds_under_way()
        self._steps.round([job_id for job_id in active if job_id not in adopted_later], patience_seconds)
        for job_id, seconds in self._steps.seconds_under_way().items():
            if seconds > LONG_STEP_SECONDS:
                self.monitor.note_wait(job_id, f"its step in the orchestrator has taken {seconds:.0f} s so far")
        self.assigner.balance()

    def _tidy(self) -> None:
        if time.monotonic() - self._tidied_at > HOUSEKEEPING_SECONDS:
            self._tidied_at = time.monotonic()
            self.assigner.replicas.drop_silent()
            # Before slots are filled: what keeps a job from its slot is noted then, for as long as it is so.
            active = self.jobs.in_states(ACTIVE)
            self.monitor.forget(active)
            self.training.forget(active)
            for ended in self._outages.keys() - {*active, *self.queue.waiting()}:
                self._outages.pop(ended, None)

    def _alone(self, step: Callable[[str], None]) -> Callable[[str], None]:
        def guarded(job_id: str) -> None:
            try:
                step(job_id)
            except redis.RedisError as error:
                self._note_or_raise(job_id, error)

        return guarded

    def _adopt(self, job_id: str) -> None:
        try:
            state = self.jobs.refold(job_id)
            self.jobs.append(job_id, "adopted", {"state": state.value})
            log.info("adopted a job", job=job_id, state=state.value)
        except (redis.RedisError, NotReady):
            raise
        except NotFound:
            self._forget_ghost(job_id)
        except Exception as error:
            away = storage_error(error)
            if away:
                # Its older events are in files: it is adopted when they can be read.
                raise away from error
            self._quarantine(job_id, error)

    def _quarantine(self, job_id: str, error: Exception) -> None:
        """End one job whose history cannot be; nobody else waits for it."""
        reason = error.message if isinstance(error, SpoError) else f"{type(error).__name__}: {error}"
        log.error("a job's history is damaged; it fails, others go on", job=job_id, reason=reason)
        if not self.jobs.fail(job_id, "history_damaged", reason):
            log.error("and it cannot even be failed; it stays as it is", job=job_id)

    def _forget_ghost(self, job_id: str) -> None:
        if self.jobs.forget_ghost(job_id):
            log.error("a job that is not there was on the lists; it is taken off", job=job_id)
        else:
            self._waits(job_id, NotReady(HALF_THERE))

    def _advance(self, job_id: str) -> None:
        try:
            self._step(job_id, self.jobs.state(job_id))
            self.monitor.observe(job_id)
            self._move_events(job_id)
            self.monitor.note_wait(job_id, "")
            if outage := self._outages.pop(job_id, None):
                outage.over()
        except redis.RedisError:
            raise
        except SpoError as error:
            if error.code == "job_not_found":
                self._forget_ghost(job_id)
            elif error.retryable:
                self._waits(job_id, error)
            else:
                self.jobs.fail(job_id, error.code, error.message)
        except Exception as error:
            away = storage_error(error)
            if away:
                self._waits(job_id, away)
                return
            # A fault of ours ends this job, loudly, and no other.
            log.exception("advancing a job failed", job=job_id)
            self.jobs.fail(job_id, "internal", f"{type(error).__name__}: {error}")

    def _note_or_raise(self, job_id: str, error: redis.RedisError) -> None:
        """Raise an outage of Redis, which all jobs wait for; what it says of one job's keys holds up that job alone."""
        found = as_spo_error(error)
        if found.retryable:
            raise error
        self._waits(job_id, NotReady(refused_in_words(self.jobs.client, job_id, found)))

    def _waits(self, job_id: str, error: SpoError) -> None:
        """Name what a job waits for; a round comes every second, and a line of the log seldom."""
        self.monitor.note_wait(job_id, error.message)
        self._outages.setdefault(job_id, Outage("a job waits", job=job_id)).failed(error)

    def _move_events(self, job_id: str) -> None:
        """Keep what Redis has of the job's events within bounds. Raises NotReady where it cannot be."""
        try:
            self.jobs.move_events_to_files(job_id)
        except (OSError, IntegrityError, Unreachable) as error:
            message = f"its older events cannot be written to files, and stay in Redis: {error}"
            raise NotReady(message) from error

    def _step(self, job_id: str, state: JobState) -> None:
        if state in (JobState.ESTIMATING, JobState.RUNNING):
            self.assigner.require_served(job_id)
        match state:
            case JobState.VALIDATING:
                self.preparation.validate(job_id)
            case JobState.ESTIMATING:
                self.preparation.estimate(job_id)
            case JobState.RUNNING:
                if self.jobs.record(job_id).estimates_pending:
                    self.preparation.estimate_beside_training(job_id)
                self.training.advance(job_id)
            case JobState.PAUSING:
                self.training.pause(job_id)
            case JobState.CANCELLING:
                self.training.cancel(job_id)
            case _:
                pass
