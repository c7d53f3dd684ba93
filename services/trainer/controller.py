"""What rank 0 decides: after every order all ranks carry out the next one, so they never wait for different things."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from services.trainer.batches import ReplayClient, TrainingSample, faults, groups_of
from services.trainer.checkpoints import TrainingProgress
from services.trainer.collapse_monitor import CollapseMonitor
from services.trainer.lease import TRANSIENT, JobLease
from services.trainer.microbatches import Minibatch
from services.trainer.settings import Settings
from services.trainer.step_metrics import batch_metrics
from spo.errors import Conflict, InternalError, LeaseLost, SpoError
from spo.manifest_folder import ManifestFolder
from spo.observability import tracing
from spo.observability.logs import get_logger
from spo.observability.metrics import POLICY_VERSION, TRAINER_STEP_SECONDS, TRAINER_WAIT_SECONDS
from spo.spec.job_spec import JobSpec
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.store import StoredVersion

log = get_logger("controller")

SAY_SECONDS = 10.0
WAIT_SECONDS = 0.5
MIN_CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Command:
    """`train` on a batch; `skip` counts a quarantined batch as a step; `wait` only keeps the ranks in touch.

    rows: the whole batch, before it is cut. minibatches: what one rank gets of it. `refer`: take a weight version,
    reference_version, as the reference.
    """

    kind: Literal["train", "skip", "publish", "checkpoint", "update_reference", "wait", "end"]
    rows: Sequence[TrainingSample] = ()
    minibatches: Sequence[Minibatch] = ()
    reference_version: int = 0


@dataclass(frozen=True)
class RunOutcome:
    """Why a run ends here: `give_back` tells the orchestrator, otherwise the lease runs out or is already gone."""

    reason: str
    give_back: bool = False
    error_code: str = ""
    error_message: str = ""


class Controller:
    """Decides orders for one leased job and reports their results."""

    def __init__(
        self, lease: JobLease, replay: ReplayClient, spec: JobSpec, settings: Settings, stop: threading.Event
    ) -> None:
        self.lease = lease
        self.outcome: RunOutcome | None = None
        self._replay = replay
        self._spec = spec
        self._settings = settings
        self._stop = stop
        self._tried_checkpoint_at_step = -1
        self._checkpoint_ended = time.monotonic()
        self._checkpoint_seconds = 0.0
        self._wanted_since = time.monotonic()
        self._said = time.monotonic()
        self._wait_seconds = 0.0
        self._command_began = time.monotonic()
        self._quarantined_in_a_row = 0
        self._monitor = CollapseMonitor(spec.collapse_guard)
        self._held = False
        self._span = tracing.Span()
        # Qhat_0 under the reference in force, and which version that is.
        self._values: tuple[int, Mapping[str, float]] = (0, {})

    def next_command(self, progress: TrainingProgress) -> Command:
        """What all ranks do next."""
        command = self._interruption(progress) or self._duty(progress) or self._batch(progress)
        self._command_began = time.monotonic()
        return command

    def _interruption(self, progress: TrainingProgress) -> Command | None:
        if self.lease.lost:
            self.outcome = self.outcome or RunOutcome("the lease was lost")
        if self.outcome:
            return Command("end")
        if self._stop.is_set():
            if progress.step and self._tried_checkpoint_at_step != progress.step:
                return Command("checkpoint")
            return self._end(RunOutcome("the process is stopping"))
        if self.lease.directive == wire.DIRECTIVE_CANCEL:
            return self._end(RunOutcome("cancelled", give_back=True, error_code="cancelled", error_message="cancelled"))
        return None

    def _duty(self, progress: TrainingProgress) -> Command | None:
        if self._is_held():
            return self._save_and_wait(progress)
        trainer = self._spec.trainer
        done = progress.step >= trainer.steps
        if progress.weight_step != progress.step and (progress.step % trainer.update_interval == 0 or done):
            return Command("publish")
        saved = self._tried_checkpoint_at_step == progress.step
        if not saved and progress.step and (done or self._checkpoint_due(progress)):
            return Command("checkpoint")
        if self.lease.reference_version > progress.reference_version and not done:
            return Command("update_reference", reference_version=self.lease.reference_version)
        match self.lease.directive:
            case wire.DIRECTIVE_CHECKPOINT if not saved:
                return Command("checkpoint")
            case wire.DIRECTIVE_PAUSE:
                return self._save_and_wait(progress)
        return self._end(RunOutcome("all steps done", give_back=True)) if done else None

    def _save_and_wait(self, progress: TrainingProgress) -> Command:
        if progress.step and self._tried_checkpoint_at_step != progress.step:
            return Command("checkpoint")
        self._stop.wait(WAIT_SECONDS)
        return Command("wait")

    def _is_held(self) -> bool:
        """From an alarm that pauses until a person resumes: nothing is learned and no weights leave the trainer."""
        if self._held and self.lease.has_told_all and self.lease.directive != wire.DIRECTIVE_PAUSE:
            self._held = False
            self._monitor.rearm()
        return self._held

    def _checkpoint_due(self, progress: TrainingProgress) -> bool:
        if progress.step % self._spec.trainer.checkpoint_interval == 0:
            return True
        share = self._settings.checkpoint_share
        if not share:
            return False
        pause = max(MIN_CHECKPOINT_SECONDS, self._checkpoint_seconds / share)
        return time.monotonic() - self._checkpoint_ended > pause

    def _batch(self, progress: TrainingProgress) -> Command:
        step = progress.step + 1
        try:
            refreshed = self._values_under(progress.reference_version)
            with tracing.span("draw batch", run=self.lease.grant.run_id, step=step) as drawn:
                rows = self._replay.sample(step, progress.weight_version, self._settings.batch_wait_seconds, refreshed)
                drawn.link(groups_of(rows))
        except TRANSIENT as error:
            waited_seconds = time.monotonic() - self._wanted_since
            if isinstance(error, InternalError) and waited_seconds > self._settings.patience_seconds:
                return self._end(RunOutcome("no batch", True, error.code, f"step {step}: {error.message}"))
            self._stop.wait(WAIT_SECONDS)
            if time.monotonic() - self._said > SAY_SECONDS:
                self._said = time.monotonic()
                waited = round(waited_seconds, 1)
                log.info("waiting for a batch", step=step, waited_seconds=waited, reason=error.message)
            return Command("wait")
        except SpoError as error:
            return self._end(RunOutcome("no batch", True, error.code, f"step {step}: {error.message}"))
        self._span = tracing.begin("train step", parent=drawn.header, run=self.lease.grant.run_id, step=step)
        self._span.link(groups_of(rows))
        self._wait_seconds = time.monotonic() - self._wanted_since
        TRAINER_WAIT_SECONDS.observe(self._wait_seconds)
        found = faults(
            rows,
            cached_reference=self._spec.trainer.reference == "cached",
            behaviour=self._spec.algorithm.needs_behaviour,
        )
        if found:
            self._quarantine(step, rows, str(found))
            return Command("skip")
        return Command("train", rows)

    def _values_under(self, version: int) -> Mapping[str, float]:
        """Qhat_0 under a reference; those of the model folder come with each batch."""
        if version != self._values[0]:
            self._values = (version, self.lease.reference_values(version))
        return self._values[1]

    def step_done(
        self, progress: TrainingProgress, rows: Sequence[TrainingSample], result: Mapping[str, float]
    ) -> None:
        """Report an applied step. learned: what the ranks measured."""
        seconds = time.monotonic() - self._command_began
        TRAINER_STEP_SECONDS.observe(seconds)
        self._span.end()
        self._quarantined_in_a_row = 0
        measured = {**batch_metrics(rows, progress.weight_version), **result}
        alarms = self._monitor.look(progress.step, measured)
        if alarms and self._monitor.pauses:
            self._held = True
        counts = {"step_seconds": seconds, "quarantined": 0.0, "alarms": float(len(alarms))}
        self.lease.report_step(progress.step, self._reported({**measured, **counts}), alarms)

    def step_refused(self, step: int, rows: Sequence[TrainingSample], reason: str) -> None:
        """A batch that the ranks could not learn from."""
        self._quarantine(step, rows, reason)

    def _quarantine(self, step: int, rows: Sequence[TrainingSample], reason: str) -> None:
        ids = [row.trajectory.trajectory_id for row in rows]
        log.error("a batch is quarantined; it changes no weights", step=step, reason=reason, trajectories=ids)
        self._quarantined_in_a_row += 1
        self._span.end("quarantined")
        self.lease.report_quarantine(step, self._reported({"quarantined": float(len(rows))}), reason, ids)
        if self._quarantined_in_a_row >= self._settings.max_quarantined:
            message = f"{self._quarantined_in_a_row} batches in a row were unusable; the last: {reason}"
            self.outcome = RunOutcome("unusable batches", True, "batches_unusable", message)

    def _reported(self, measured: Mapping[str, float]) -> dict[str, float]:
        """A step's scalars as they travel; the wait for the next batch begins."""
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        self._wanted_since = self._said = time.monotonic()
        return {**finite, "wait_seconds": self._wait_seconds}

    def fail(self, error_code: str, error_message: str) -> None:
        """The run cannot go on; the job fails with this."""
        self.outcome = RunOutcome("failed", True, error_code, error_message)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Around what only the owner of the job may do: whatever refuses it ends the work on the run, on all ranks."""
        try:
            yield
        except (LeaseLost, Conflict, *TRANSIENT) as error:
            log.warning("gave up on the run", reason=str(error))
            self.outcome = self.outcome or RunOutcome(error.message)
        except SpoError as error:
            self.fail(error.code, error.message)

    def published(self, written: StoredVersion, progress: TrainingProgress) -> None:
        """Announce a stored version."""
        self.lease.publish(
            progress.weight_version,
            progress.weight_step,
            uri=written.uri,
            manifest_digest=written.manifest_digest,
            size_bytes=written.size_bytes,
        )
        POLICY_VERSION.labels(role="trainer").set(progress.weight_version)
        log.info("weights published", version=progress.weight_version, step=progress.weight_step)

    def checkpoint_tried(self, step: int) -> None:
        """Note the time and cost of a checkpoint, written or not."""
        self._tried_checkpoint_at_step = step
        self._checkpoint_ended = time.monotonic()
        self._checkpoint_seconds = self._checkpoint_ended - self._command_began

    def checkpointed(self, sealed: ManifestFolder, progress: TrainingProgress) -> None:
        """Report a written checkpoint."""
        if self.lease.directive == wire.DIRECTIVE_CHECKPOINT:
            self.lease.directive = wire.DIRECTIVE_CONTINUE
        self.lease.report_checkpoint(
            progress.step,
            path=str(sealed.path.absolute()),
            manifest_digest=sealed.manifest_digest,
            weight_version=progress.weight_version,
        )

    def conclude(self, progress: TrainingProgress) -> None:
        """Give the job back, or let go of it."""
        outcome = self.outcome or RunOutcome("unknown")
        log.info("run ended here", run=self.lease.grant.run_id, step=progress.step, reason=outcome.reason)
        with self.owning():
            if outcome.give_back:
                self.lease.finish(progress.step, outcome.error_code, outcome.error_message)
        self.lease.close()

    def _end(self, outcome: RunOutcome) -> Command:
        self.outcome = outcome
        return Command("end")
