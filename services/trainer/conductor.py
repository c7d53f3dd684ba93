"""What rank 0 decides: after every order all ranks carry out the next one, so they never wait for different things."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from services.trainer.batches import Replay, Row, faults, groups_of
from services.trainer.checkpoints import Progress
from services.trainer.guard import Guard
from services.trainer.lease import TRANSIENT, Lease
from services.trainer.settings import Settings
from services.trainer.shares import Minibatch
from services.trainer.step_metrics import batch_metrics
from spo import tracing
from spo.errors import Conflict, InternalError, LeaseLost, SpoError
from spo.job_spec import JobSpec
from spo.logs import get_logger
from spo.metrics import POLICY_VERSION, TRAINER_STEP_SECONDS, TRAINER_WAIT_SECONDS
from spo.sealed_folder import SealedFolder
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weight_store import WeightVersion

log = get_logger("conductor")

SAY_SECONDS = 10.0
WAIT_SECONDS = 0.5
MIN_CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """`train` on a batch; `skip` counts a quarantined batch as a step; `wait` only keeps the ranks in touch.

    rows: the whole batch, before it is cut. minibatches: what one rank gets of it. `refer`: take a weight version,
    reference_version, as the reference.
    """

    kind: Literal["train", "skip", "publish", "checkpoint", "refer", "wait", "end"]
    rows: Sequence[Row] = ()
    minibatches: Sequence[Minibatch] = ()
    reference_version: int = 0


@dataclass(frozen=True)
class Ending:
    """Why a run ends here: `give_back` tells the orchestrator, otherwise the lease runs out or is already gone."""

    reason: str
    give_back: bool = False
    error_code: str = ""
    error_message: str = ""


class Conductor:
    """Decides orders for one leased job and reports their results."""

    def __init__(self, lease: Lease, replay: Replay, spec: JobSpec, settings: Settings, stop: threading.Event) -> None:
        self.lease = lease
        self.ending: Ending | None = None
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
        self._order_began = time.monotonic()
        self._quarantined_in_a_row = 0
        self._guard = Guard(spec.collapse_guard)
        self._held = False
        self._span = tracing.Span()
        # Qhat_0 under the reference in force, and which version that is.
        self._values: tuple[int, Mapping[str, float]] = (0, {})

    def next_order(self, progress: Progress) -> Order:
        """What all ranks do next."""
        order = self._interruption(progress) or self._duty(progress) or self._batch(progress)
        self._order_began = time.monotonic()
        return order

    def _interruption(self, progress: Progress) -> Order | None:
        if self.lease.lost:
            self.ending = self.ending or Ending("the lease was lost")
        if self.ending:
            return Order("end")
        if self._stop.is_set():
            if progress.step and self._tried_checkpoint_at_step != progress.step:
                return Order("checkpoint")
            return self._end(Ending("the process is stopping"))
        if self.lease.directive == wire.DIRECTIVE_CANCEL:
            return self._end(Ending("cancelled", give_back=True, error_code="cancelled", error_message="cancelled"))
        return None

    def _duty(self, progress: Progress) -> Order | None:
        if self._is_held():
            return self._save_and_wait(progress)
        trainer = self._spec.trainer
        done = progress.step >= trainer.steps
        if progress.weight_step != progress.step and (progress.step % trainer.update_interval == 0 or done):
            return Order("publish")
        saved = self._tried_checkpoint_at_step == progress.step
        if not saved and progress.step and (done or self._checkpoint_due(progress)):
            return Order("checkpoint")
        if self.lease.reference_version > progress.reference_version and not done:
            return Order("refer", reference_version=self.lease.reference_version)
        match self.lease.directive:
            case wire.DIRECTIVE_CHECKPOINT if not saved:
                return Order("checkpoint")
            case wire.DIRECTIVE_PAUSE:
                return self._save_and_wait(progress)
        return self._end(Ending("all steps done", give_back=True)) if done else None

    def _save_and_wait(self, progress: Progress) -> Order:
        if progress.step and self._tried_checkpoint_at_step != progress.step:
            return Order("checkpoint")
        self._stop.wait(WAIT_SECONDS)
        return Order("wait")

    def _is_held(self) -> bool:
        """From an alarm that pauses until a person resumes: nothing is learned and no weights leave the trainer."""
        if self._held and self.lease.has_told_all and self.lease.directive != wire.DIRECTIVE_PAUSE:
            self._held = False
            self._guard.rearm()
        return self._held

    def _checkpoint_due(self, progress: Progress) -> bool:
        if progress.step % self._spec.trainer.checkpoint_interval == 0:
            return True
        share = self._settings.checkpoint_share
        if not share:
            return False
        pause = max(MIN_CHECKPOINT_SECONDS, self._checkpoint_seconds / share)
        return time.monotonic() - self._checkpoint_ended > pause

    def _batch(self, progress: Progress) -> Order:
        step = progress.step + 1
        try:
            refreshed = self._values_under(progress.reference_version)
            with tracing.span("draw batch", run=self.lease.grant.run_id, step=step) as drawn:
                rows = self._replay.sample(step, progress.weight_version, self._settings.batch_wait_seconds, refreshed)
                drawn.link(groups_of(rows))
        except TRANSIENT as error:
            waited_seconds = time.monotonic() - self._wanted_since
            if isinstance(error, InternalError) and waited_seconds > self._settings.patience_seconds:
                return self._end(Ending("no batch", True, error.code, f"step {step}: {error.message}"))
            self._stop.wait(WAIT_SECONDS)
            if time.monotonic() - self._said > SAY_SECONDS:
                self._said = time.monotonic()
                waited = round(waited_seconds, 1)
                log.info("waiting for a batch", step=step, waited_seconds=waited, reason=error.message)
            return Order("wait")
        except SpoError as error:
            return self._end(Ending("no batch", True, error.code, f"step {step}: {error.message}"))
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
            return Order("skip")
        return Order("train", rows)

    def _values_under(self, version: int) -> Mapping[str, float]:
        """Qhat_0 under a reference; those of the model folder come with each batch."""
        if version != self._values[0]:
            self._values = (version, self.lease.reference_values(version))
        return self._values[1]

    def step_done(self, progress: Progress, rows: Sequence[Row], learned: Mapping[str, float]) -> None:
        """Report an applied step. learned: what the ranks measured."""
        seconds = time.monotonic() - self._order_began
        TRAINER_STEP_SECONDS.observe(seconds)
        self._span.end()
        self._quarantined_in_a_row = 0
        measured = {**batch_metrics(rows, progress.weight_version), **learned}
        alarms = self._guard.look(progress.step, measured)
        if alarms and self._guard.pauses:
            self._held = True
        counts = {"step_seconds": seconds, "quarantined": 0.0, "alarms": float(len(alarms))}
        self.lease.report_step(progress.step, self._reported({**measured, **counts}), alarms)

    def step_refused(self, step: int, rows: Sequence[Row], reason: str) -> None:
        """A batch that the ranks could not learn from."""
        self._quarantine(step, rows, reason)

    def _quarantine(self, step: int, rows: Sequence[Row], reason: str) -> None:
        ids = [row.trajectory.trajectory_id for row in rows]
        log.error("a batch is quarantined; it changes no weights", step=step, reason=reason, trajectories=ids)
        self._quarantined_in_a_row += 1
        self._span.end("quarantined")
        self.lease.report_quarantine(step, self._reported({"quarantined": float(len(rows))}), reason, ids)
        if self._quarantined_in_a_row >= self._settings.max_quarantined:
            message = f"{self._quarantined_in_a_row} batches in a row were unusable; the last: {reason}"
            self.ending = Ending("unusable batches", True, "batches_unusable", message)

    def _reported(self, measured: Mapping[str, float]) -> dict[str, float]:
        """A step's scalars as they travel; the wait for the next batch begins."""
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        self._wanted_since = self._said = time.monotonic()
        return {**finite, "wait_seconds": self._wait_seconds}

    def fail(self, error_code: str, error_message: str) -> None:
        """The run cannot go on; the job fails with this."""
        self.ending = Ending("failed", True, error_code, error_message)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Around what only the owner of the job may do: whatever refuses it ends the work on the run, on all ranks."""
        try:
            yield
        except (LeaseLost, Conflict, *TRANSIENT) as error:
            log.warning("gave up on the run", reason=str(error))
            self.ending = self.ending or Ending(error.message)
        except SpoError as error:
            self.fail(error.code, error.message)

    def published(self, written: WeightVersion, progress: Progress) -> None:
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
        self._checkpoint_seconds = self._checkpoint_ended - self._order_began

    def checkpointed(self, sealed: SealedFolder, progress: Progress) -> None:
        """Report a written checkpoint."""
        if self.lease.directive == wire.DIRECTIVE_CHECKPOINT:
            self.lease.directive = wire.DIRECTIVE_CONTINUE
        self.lease.report_checkpoint(
            progress.step,
            path=str(sealed.path.absolute()),
            manifest_digest=sealed.manifest_digest,
            weight_version=progress.weight_version,
        )

    def conclude(self, progress: Progress) -> None:
        """Give the job back, or let go of it."""
        ending = self.ending or Ending("unknown")
        log.info("run ended here", run=self.lease.grant.run_id, step=progress.step, reason=ending.reason)
        with self.owning():
            if ending.give_back:
                self.lease.finish(progress.step, ending.error_code, ending.error_message)
        self.lease.close()

    def _end(self, ending: Ending) -> Order:
        self.ending = ending
        return Order("end")
