"""Rank 0 of a run: it decides each command, which all ranks carry out together: none waits for another thing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from services.trainer.batches import (
    CollapseMonitor,
    ForwardLimits,
    Minibatch,
    OwnRows,
    ReplayClient,
    TrainingSample,
    batch_metrics,
    fetch_own_rows,
    groups_of,
    sampler_alarm,
    shares_of_ranks,
)
from services.trainer.checkpoints import (
    CheckpointPlace,
    CheckpointSchedule,
    PendingCheckpoint,
    SavedCheckpoint,
    TrainingProgress,
)
from services.trainer.learner import StepResult
from services.trainer.lease import TRANSIENT, Attempt, JobLease
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo import errors, observability
from spo.observability import (
    POLICY_VERSION,
    TRAINER_STEP_SECONDS,
    TRAINER_WAIT_SECONDS,
    get_logger,
)
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse
from spo.weights.broadcast import Broadcaster
from spo.weights.store import StoredVersion

log = get_logger("controller")

LOG_SECONDS = 10.0
WAIT_SECONDS = 0.5
# A rank that did not get its rows so often in a row cannot: it may stand where no service but rank 0's is reached.
MOST_UNFETCHED = 3
# Commands that write files of the run.
WRITING = ("publish", "checkpoint")


@dataclass(frozen=True)
class Command:
    """`train` on a batch; `skip` counts a quarantined batch as a step; `wait` only keeps the ranks in touch.

    minibatches: this rank's part of the batch; outlined: its tokens are still with the replay buffer.
    `update_reference`: take weight version reference_version as the reference.
    """

    kind: Literal["train", "skip", "publish", "checkpoint", "update_reference", "wait", "end"]
    minibatches: Sequence[Minibatch] = ()
    outlined: bool = False
    reference_version: int = 0

    def with_rows(self, own: OwnRows) -> Command:
        """Of `train` on rows that all ranks tried to fetch: a batch that some rank did not get is asked for again."""
        if own.problem:
            return Command("wait")
        return Command("skip") if own.faults else replace(self, minibatches=own.minibatches)


class RankRole(Protocol):
    """A rank's part in a run apart from the commands: rank 0 decides and reports, the others follow."""

    def resumed(self, progress: TrainingProgress, *, packed: bool) -> None:
        """Training goes on from here; what was loaded is saved already. packed: the model computes without padding."""

    def next_command(self, progress: TrainingProgress) -> Command:
        """What this rank does next; all ranks do it together."""

    def step_done(self, progress: TrainingProgress, result: StepResult) -> None:
        """A batch was learned from, or refused."""

    def owning(self) -> AbstractContextManager[None]:
        """Around what only the owner of the job may do."""

    def publishing(self, publication: Future[bool]) -> None:
        """A version is being stored while training goes on; what it gives is whether that was in vain."""

    def published(self, written: StoredVersion | None, progress: TrainingProgress) -> bool:
        """The weights were stored; rank 0 gets the version. Returns whether it may be told of."""

    def checkpointed(
        self, saved: Future[SavedCheckpoint] | None, place: CheckpointPlace, progress: TrainingProgress
    ) -> None:
        """A checkpoint was tried; rank 0 gets what is done once it is whole, None when it could not be written."""

    def cannot_write(self, error: errors.SpoError) -> None:
        """The place of weights or checkpoints is full, or cannot be used now: it is tried again."""

    def fail(self, error: errors.SpoError) -> None:
        """The run cannot go on here."""

    def conclude(self, progress: TrainingProgress) -> None:
        """The work on the run has ended here."""


class Follower:
    """Every rank but the first: receives commands and reports nothing."""

    def __init__(self, ranks: Ranks, replay: ReplayClient) -> None:
        self._ranks = ranks
        self._replay = replay

    def resumed(self, progress: TrainingProgress, *, packed: bool) -> None:
        """Rank 0 decides when to save."""

    def next_command(self, progress: TrainingProgress) -> Command:
        """Wait for rank 0's decision, and fetch this rank's rows."""
        command: Command = self._ranks.scatter(None)
        if not command.outlined:
            return command
        step, version = progress.step + 1, progress.published_version
        return command.with_rows(fetch_own_rows(self._ranks, self._replay, command.minibatches, step, version))

    def step_done(self, progress: TrainingProgress, result: StepResult) -> None:
        """Rank 0 reports."""

    def owning(self) -> AbstractContextManager[None]:
        """Rank 0 holds the lease."""
        return nullcontext()

    def publishing(self, publication: Future[bool]) -> None:
        """Rank 0 waits for it where it must."""

    def published(self, written: StoredVersion | None, progress: TrainingProgress) -> bool:
        """Rank 0 announces."""
        return True

    def checkpointed(
        self, saved: Future[SavedCheckpoint] | None, place: CheckpointPlace, progress: TrainingProgress
    ) -> None:
        """Rank 0 reports."""

    def cannot_write(self, error: errors.SpoError) -> None:
        """Rank 0 writes."""

    def fail(self, error: errors.SpoError) -> None:
        """The error is raised on rank 0 too."""

    def conclude(self, progress: TrainingProgress) -> None:
        """Rank 0 gives the job back."""


@dataclass
class TrainerContext:
    """What rank 0 has and the others do not: the other services, the stop signal, and what its heartbeats report."""

    orchestrator: RpcClient
    replay: RpcClient
    trainer_id: str
    stop: threading.Event
    run_id: str = ""
    weight_version: int = 0
    problem: str = ""
    broadcaster: Broadcaster | None = None
    attempt: Attempt | None = None
    belongs_to: Callable[[str], bool] = lambda platform_id: True


@dataclass(frozen=True)
class RunOutcome:
    """Why a run ends here. `give_back`: it is reported; otherwise the lease expires or is lost already."""

    reason: str
    error_code: str = ""
    error_message: str = ""
    give_back: bool = field(default=False, kw_only=True)


class Controller:
    """Rank 0's part in one leased job: decides what all ranks do next, and reports what came of it."""

    def __init__(
        self, ranks: Ranks, settings: Settings, context: TrainerContext, grant: LeaseJobResponse, spec: JobSpec
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._context = context
        self._spec = spec
        self._stop = context.stop
        self._lease = JobLease(
            context.orchestrator,
            context.trainer_id,
            grant,
            patience_seconds=settings.patience_seconds,
            stop=context.stop,
        )
        self._replay = ReplayClient(context.replay, grant.run_id, spec, outlines=ranks.world_size > 1)
        # How often in a row a rank did not get its rows.
        self._unfetched = 0
        self._outcome: RunOutcome | None = None
        # The version that is being stored, and the newest that is announced.
        self._publication: Future[bool] | None = None
        self._announced = grant.next_weight_version - 1
        self._limits = ForwardLimits.of(spec.trainer, packed=False)
        # The batch that is being learned from.
        self._rows: Sequence[TrainingSample] = ()
        self._resumed_step = 0
        self._checkpoints = CheckpointSchedule(spec.trainer.checkpoint_interval, settings.checkpoint_share)
        self._waiting_since = time.monotonic()
        self._last_logged = time.monotonic()
        self._wait_seconds = 0.0
        self._command_started = time.monotonic()
        self._quarantined_in_a_row = 0
        self._monitor = CollapseMonitor(spec.collapse_guard)
        self._paused_by_alarm = False
        self._span = observability.Span()
        # Qhat_0 under the current reference, and which version that is; None for the model folder's.
        self._values: tuple[int, Mapping[str, float] | None] = (0, None)
        context.run_id = grant.run_id

    def resumed(self, progress: TrainingProgress, *, packed: bool) -> None:
        """Training goes on from here; what was loaded is saved already. packed: the model computes without padding."""
        self._limits = ForwardLimits.of(self._spec.trainer, packed=packed)
        self._resumed_step = progress.step
        self._checkpoints.resumed(progress.step)

    def next_command(self, progress: TrainingProgress) -> Command:
        """Decide what all ranks do next, and give each its part of it."""
        self._context.weight_version = self._announced
        self._rows = tuple[TrainingSample, ...]()
        self._report_saved(progress)
        command = self._interruption(progress) or self._due(progress) or self._next_batch(progress)
        if command.kind in WRITING and not self._still_owns():
            command = Command("end")
        unfinished = self._unfinished(command.kind)
        if unfinished and not self._lease.lost:
            command = self._await(unfinished)
        self._command_started = time.monotonic()
        shares = shares_of_ranks(self._rows, self._spec, self._ranks.world_size, self._limits)
        outlined = any(row.outlined for row in self._rows)
        command = self._ranks.scatter([replace(command, minibatches=share, outlined=outlined) for share in shares])
        return self._with_own_rows(command, progress) if command.outlined else command

    def _with_own_rows(self, command: Command, progress: TrainingProgress) -> Command:
        step, version = progress.step + 1, progress.published_version
        own = fetch_own_rows(self._ranks, self._replay, command.minibatches, step, version)
        self._unfetched = self._unfetched + 1 if own.problem else 0
        if own.problem:
            log.warning("a rank did not get its rows; the step is asked for again", step=step, reason=str(own.problem))
            self._span.end("unfetched")
            if not isinstance(own.problem, TRANSIENT):
                self._outcome = RunOutcome("no batch", own.problem.code, own.problem.message, give_back=True)
            if self._unfetched >= MOST_UNFETCHED:
                log.error("ranks do not reach the replay buffer: rank 0 fetches for all from now on", step=step)
                self._replay = replace(self._replay, outlines=False)
            self._stop.wait(WAIT_SECONDS)
        elif own.faults:
            self._quarantine(step, self._rows, str(own.faults))
        return command.with_rows(own)

    def _still_owns(self) -> bool:
        with self.owning():
            self._lease.confirm()
        return self._outcome is None

    def _interruption(self, progress: TrainingProgress) -> Command | None:
        if self._lease.lost:
            self._outcome = self._outcome or RunOutcome("the lease was lost")
        if self._outcome:
            return Command("end")
        if self._stop.is_set():
            if progress.step and not self._checkpoints.tried(progress.step):
                return Command("checkpoint")
            return self._end(RunOutcome("the process is stopping"))
        if self._lease.directive == wire.DIRECTIVE_CANCEL:
            return self._end(RunOutcome("cancelled", give_back=True, error_code="cancelled", error_message="cancelled"))
        return None

    def _due(self, progress: TrainingProgress) -> Command | None:
        if self._is_paused_by_alarm():
            return self._save_and_wait(progress)
        trainer = self._spec.trainer
        done = progress.step >= trainer.steps
        if self._was_in_vain() and self._checkpoints.may_write():
            return Command("publish")
        if progress.weight_step != progress.step and (progress.step % trainer.update_interval == 0 or done):
            return Command("publish") if self._checkpoints.may_write() else self._pause_a_little()
        saved = self._checkpoints.settled(progress.step)
        if not saved and progress.step and (done or self._checkpoints.due(progress.step)):
            return Command("checkpoint")
        if self._lease.reference_version > progress.reference_version and not done:
            if not self._checkpoints.may_write():
                return self._pause_a_little()
            return Command("update_reference", reference_version=self._lease.reference_version)
        match self._lease.directive:
            case wire.DIRECTIVE_CHECKPOINT if not saved and not self._checkpoints.pending:
                return Command("checkpoint")
            case wire.DIRECTIVE_PAUSE:
                return self._save_and_wait(progress)
        if done and self._publication and (self._was_in_vain() or not self._publication.done()):
            return self._await([self._publication])
        return self._end(RunOutcome("all steps done", give_back=True)) if done else None

    def _was_in_vain(self) -> bool:
        return self._publication is not None and self._publication.done() and self._publication.result()

    def _unfinished(self, kind: str) -> list[Future[Any]]:
        """What is to be there before such a command: one version and one checkpoint are on their way at a time, and
        none is left behind by a trainer that goes.
        """
        publication, pending = self._publication, self._checkpoints.pending
        found: list[Future[Any]] = []
        if pending and kind in ("checkpoint", "end"):
            found.append(pending.saved)
        # A checkpoint names its version, which is to be announced before it is reported.
        if publication and not publication.done() and (found or kind in ("publish", "end")):
            found.append(publication)
        return found

    def _await(self, unfinished: Sequence[Future[Any]]) -> Command:
        pending = self._checkpoints.pending
        if pending and self._lease.directive == wire.DIRECTIVE_CANCEL:
            pending.place.abandon()
        if all(each.done() for each in unfinished):
            self._stop.wait(WAIT_SECONDS)
        wait(unfinished, WAIT_SECONDS)
        return Command("wait")

    def _save_and_wait(self, progress: TrainingProgress) -> Command:
        if progress.step and not self._checkpoints.settled(progress.step):
            return Command("checkpoint")
        return self._pause_a_little()

    def _pause_a_little(self) -> Command:
        self._stop.wait(WAIT_SECONDS)
        return Command("wait")

    def _is_paused_by_alarm(self) -> bool:
        """Whether an alarm has stopped the run until a person resumes it: no steps, no weights published."""
        if self._paused_by_alarm and self._lease.has_reported_all and self._lease.directive != wire.DIRECTIVE_PAUSE:
            self._paused_by_alarm = False
            self._monitor.rearm()
        return self._paused_by_alarm

    def _next_batch(self, progress: TrainingProgress) -> Command:
        step = progress.step + 1
        try:
            refreshed = self._values_under(progress.reference_version)
            with observability.span("draw batch", run=self._lease.grant.run_id, step=step) as drawn:
                rows = self._replay.sample(step, self._announced, self._settings.batch_wait_seconds, refreshed)
                drawn.link(groups_of(rows))
        except TRANSIENT as error:
            waited_seconds = time.monotonic() - self._waiting_since
            if (
                isinstance(error, errors.InternalError | errors.ResourceExhausted)
                and waited_seconds > self._settings.patience_seconds
            ):
                return self._end(RunOutcome("no batch", error.code, f"step {step}: {error.message}", give_back=True))
            self._stop.wait(WAIT_SECONDS)
            if time.monotonic() - self._last_logged > LOG_SECONDS:
                self._last_logged = time.monotonic()
                waited = round(waited_seconds, 1)
                log.info("waiting for a batch", step=step, waited_seconds=waited, reason=error.message)
            return Command("wait")
        except errors.SpoError as error:
            return self._end(RunOutcome("no batch", error.code, f"step {step}: {error.message}", give_back=True))
        self._span = observability.begin("train step", parent=drawn.header, run=self._lease.grant.run_id, step=step)
        self._span.link(groups_of(rows))
        self._wait_seconds = time.monotonic() - self._waiting_since
        TRAINER_WAIT_SECONDS.observe(self._wait_seconds)
        # Of outlines each rank looks at its own, once their tokens are there.
        found = {} if any(row.outlined for row in rows) else self._replay.faults(rows)
        if found or not rows:
            self._quarantine(step, rows, str(found or "no prompt of the batch has a value under the reference"))
            return Command("skip")
        self._rows = rows
        return Command("train")

    def _values_under(self, version: int) -> Mapping[str, float] | None:
        """Qhat_0 under a reference; None for the model folder's, which come with each batch."""
        if version != self._values[0]:
            self._values = (version, self._lease.reference_values(version))
        return self._values[1]

    def step_done(self, progress: TrainingProgress, result: StepResult) -> None:
        """Report a step, or quarantine the batch that the ranks could not learn from."""
        if result.refused:
            self._quarantine(progress.step, self._rows, result.refused)
            return
        seconds = time.monotonic() - self._command_started
        TRAINER_STEP_SECONDS.observe(seconds)
        self._span.end()
        self._quarantined_in_a_row = 0
        measured = {**batch_metrics(self._rows, self._announced), **result.metrics}
        alarms = self._monitor.check(progress.step, measured)
        if alarms and self._monitor.pauses:
            self._paused_by_alarm = True
        engines_differ = sampler_alarm(measured)
        for reason in engines_differ.values():
            log.warning("the sampler and the trainer disagree", step=progress.step, reason=reason)
        counts = {"step_seconds": seconds, "quarantined": 0.0, "alarms": float(len(alarms))}
        self._lease.report_step(progress.step, self._reported({**measured, **counts}), {**alarms, **engines_differ})

    def _quarantine(self, step: int, rows: Sequence[TrainingSample], reason: str) -> None:
        ids = [row.trajectory.trajectory_id for row in rows]
        log.error("a batch is quarantined; it changes no weights", step=step, reason=reason, trajectories=ids)
        self._quarantined_in_a_row += 1
        self._span.end("quarantined")
        self._lease.report_quarantine(step, self._reported({"quarantined": float(len(rows))}), reason, ids)
        if self._quarantined_in_a_row >= self._settings.max_quarantined:
            message = f"{self._quarantined_in_a_row} batches in a row were unusable; the last: {reason}"
            self._outcome = RunOutcome("unusable batches", "batches_unusable", message, give_back=True)

    def _reported(self, measured: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics as they are reported, without those that are not finite; the next wait begins here."""
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        self._waiting_since = self._last_logged = time.monotonic()
        return {**finite, "wait_seconds": self._wait_seconds}

    def fail(self, error: errors.SpoError) -> None:
        """The run cannot go on; the job fails with this error, or is tried again where that may help."""
        if error.retryable:
            self._context.problem = error.message
            self._outcome = RunOutcome(error.message)
        else:
            self._outcome = RunOutcome("failed", error.code, error.message, give_back=True)

    def cannot_write(self, error: errors.SpoError) -> None:
        """The place of weights or checkpoints is full or cannot be used now: report it, try again a little later."""
        log.error("a folder is full or cannot be used; tried again", run=self._lease.grant.run_id, reason=error.message)
        self._context.problem = error.message
        self._checkpoints.write_failed()

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Around what only the owner of the job may do: whatever refuses it ends the work on the run, on all ranks."""
        try:
            yield
        except (errors.LeaseLost, errors.Conflict, *TRANSIENT) as error:
            log.warning("gave up on the run", reason=str(error))
            self._outcome = self._outcome or RunOutcome(error.message)
        except errors.SpoError as error:
            self.fail(error)

    def publishing(self, publication: Future[bool]) -> None:
        """Note the version that is on its way."""
        self._publication = publication

    def published(self, written: StoredVersion | None, progress: TrainingProgress) -> bool:
        """Announce a stored version, unless an alarm has sounded since it was copied: engines went back before it."""
        if written is None:
            raise errors.InternalError("rank 0 was given no stored version")
        if self._paused_by_alarm:
            return False
        broadcaster = self._context.broadcaster
        # An adapter is small, and no whole model.
        offer = broadcaster.offer() if broadcaster and not self._spec.model.lora else None
        replicas = self._lease.publish(progress.weight_version, progress.weight_step, written, offer)
        if broadcaster and offer:
            broadcaster.send(written, offer, replicas)
        self._context.problem, self._announced = "", progress.weight_version
        POLICY_VERSION.labels(role="trainer").set(progress.weight_version)
        log.info("weights published", version=progress.weight_version, step=progress.weight_step)
        return True

    def checkpointed(
        self, saved: Future[SavedCheckpoint] | None, place: CheckpointPlace, progress: TrainingProgress
    ) -> None:
        """Note the time and cost of a checkpoint, and report it once it is whole, if it could be written."""
        pending = None if saved is None else PendingCheckpoint(progress.step, saved, place)
        self._checkpoints.ended(progress.step, pending, self._command_started)
        if pending is None:
            return
        self._context.problem = ""
        if self._lease.directive == wire.DIRECTIVE_CHECKPOINT:
            self._lease.directive = wire.DIRECTIVE_CONTINUE
        self._report_saved(progress)

    def _report_saved(self, progress: TrainingProgress) -> None:
        """Report the checkpoint that was on its way, once it is whole and its version announced."""
        if self._publication and not self._publication.done():
            return
        whole = self._checkpoints.take_whole()
        if whole is None:
            return
        with self.owning():
            try:
                saved = whole.saved.result()
            except (OSError, errors.NotReady, errors.IntegrityError) as error:
                log.error("a checkpoint did not arrive; tried again", step=whole.step, why=str(error))
                self._context.problem = f"the checkpoint of step {whole.step} did not arrive: {error}"
                self._checkpoints.lost()
                return
            if self._lease.directive == wire.DIRECTIVE_PAUSE and whole.step != progress.step:
                # Reporting it would complete the pause before the last steps are saved.
                return
            self._report_checkpoint(saved, whole.place)

    def _report_checkpoint(self, saved: SavedCheckpoint, place: CheckpointPlace) -> None:
        kept = self._lease.report_checkpoint(
            saved.progress.step,
            path=saved.path,
            manifest_digest=saved.manifest_digest,
            weight_version=saved.progress.weight_version,
            keep=self._settings.checkpoints_kept,
            resumed_step=self._resumed_step,
        )
        # Only now: a trainer that lost its lease removes nothing, and what is removed is recorded no longer.
        if kept:
            try:
                place.prune(kept, self._lease.grant.epoch)
            except errors.StorageUnavailable as error:
                log.warning("older checkpoints stay until the next one", reason=error.message)

    def conclude(self, progress: TrainingProgress) -> None:
        """Report the end of the job, or release it."""
        self._context.run_id, self._context.weight_version = "", 0
        outcome = self._outcome or RunOutcome("unknown")
        log.info("run ended here", run=self._lease.grant.run_id, step=progress.step, reason=outcome.reason)
        with self.owning():
            if outcome.give_back:
                self._lease.finish(progress.step, outcome.error_code, outcome.error_message)
        self._lease.close()

    def _end(self, outcome: RunOutcome) -> Command:
        self._outcome = outcome
        return Command("end")
