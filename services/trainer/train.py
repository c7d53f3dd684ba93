"""The trainer's loop, on every rank: take a job, carry out rank 0's orders until it ends, take the next.

lease -> load model -> resume -> [ train | skip | publish | checkpoint | wait ]* -> give back
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from services.trainer.batches import Replay, Row
from services.trainer.checkpoints import Progress, load_checkpoint, save_checkpoint
from services.trainer.conductor import Conductor, Order
from services.trainer.learner import Learner
from services.trainer.lease import Lease, take_lease
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.shares import cut_into_minibatches
from services.trainer.weights import run_store, store_weights
from spo.errors import SpoError
from spo.job_spec import JobSpec, TrainerSpec, spec_from_json
from spo.logs import get_logger
from spo.rpc import Client
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse
from spo.weight_store import WeightStore

log = get_logger("train")


@dataclass
class Desk:
    """What rank 0 has and the others do not: the other services, the stop signal, the job in hand (for heartbeats)."""

    orchestrator: Client
    replay: Client
    trainer_id: str
    stop: threading.Event
    run_id: str = ""
    weight_version: int = 0


def serve_jobs(ranks: Ranks, settings: Settings, desk: Desk | None) -> None:
    """Work on one job after the other until rank 0 is stopped; `desk` on rank 0 only."""
    while True:
        grant = ranks.share(_next_grant(desk, settings) if desk else None)
        if grant is None:
            return
        if grant.run_id:
            _work_on(ranks, settings, grant, desk)


def _next_grant(desk: Desk, settings: Settings) -> LeaseJobResponse | None:
    """A job; one without run_id when there is none yet; None when stopping."""
    if desk.stop.is_set():
        return None
    grant = take_lease(desk.orchestrator, desk.trainer_id, settings.lease_wait_seconds, desk.stop)
    return grant or LeaseJobResponse()


def _work_on(ranks: Ranks, settings: Settings, grant: LeaseJobResponse, desk: Desk | None) -> None:
    spec = spec_from_json(grant.spec_json)
    conductor = None
    if desk:
        log.info("job leased", run=grant.run_id, epoch=grant.epoch, ranks=ranks.world_size)
        lease = Lease(
            desk.orchestrator,
            desk.trainer_id,
            grant,
            patience_seconds=settings.patience_seconds,
            stop=desk.stop,
        )
        replay = Replay(desk.replay, grant.run_id, spec.trainer.batch_size, spec.seed)
        conductor = Conductor(lease, replay, spec, settings, desk.stop)
        desk.run_id = grant.run_id
    run = TrainingRun(ranks, settings, grant, spec, conductor, desk)
    try:
        run.go()
    except SpoError as error:
        # Raised alike on every rank; failures of rank 0 alone are the conductor's.
        log.error("the run failed", run=grant.run_id, reason=str(error))
        if conductor:
            conductor.fail(error.code, error.message)
    finally:
        run.close()
        if desk:
            desk.run_id, desk.weight_version = "", 0
    if conductor:
        conductor.conclude(run.progress)


class TrainingRun:
    """One leased job on this rank."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        grant: LeaseJobResponse,
        spec: JobSpec,
        conductor: Conductor | None,
        desk: Desk | None,
    ) -> None:
        self.progress = Progress()
        self._ranks = ranks
        self._settings = settings
        self._grant = grant
        self._spec = spec
        self._conductor = conductor
        self._desk = desk
        # Versions that may be asked for as a reference, however old: those of intervals, and what was there before.
        self._candidates: set[int] = set()
        self._learner: Learner | None = None
        self._whole_batch: Sequence[Row] = ()

    def go(self) -> None:
        """Load, resume, and carry out orders until rank 0 ends the run."""
        start = self._grant.start_version
        files = self._store.open(self._grant.run_id, start).files if start else ()
        self._learner = learner = Learner(self._ranks, self._spec, files)
        self._resume(learner)
        while True:
            order = self._next_order()
            match order.kind:
                case "train":
                    self._train(learner, order)
                case "skip":
                    self.progress = replace(self.progress, step=self.progress.step + 1)
                case "publish":
                    self._publish(learner)
                case "checkpoint":
                    self._checkpoint(learner)
                case "refer":
                    self._refer(learner, order.reference_version)
                case "wait":
                    pass
                case "end":
                    return

    def _resume(self, learner: Learner) -> None:
        self.progress = load_checkpoint(self._ranks, learner, Path(self._grant.checkpoint_path)) or Progress()
        # Versions count up over leases, whatever the checkpoint knew of them.
        self.progress = replace(self.progress, weight_version=self._grant.next_weight_version - 1)
        if self._spec.algorithm.reference_refresh:
            self._candidates.update(self._store.versions(self._grant.run_id))
        if self.progress.reference_version:
            self._refer(learner, self.progress.reference_version)

    def close(self) -> None:
        if self._learner:
            self._learner.close()
        self._learner = None

    def _next_order(self) -> Order:
        if not self._conductor:
            return self._ranks.scatter(None)
        if self._desk:
            self._desk.weight_version = self.progress.weight_version
        order = self._conductor.next_order(self.progress)
        self._whole_batch = order.rows
        shares = cut_into_minibatches(
            order.rows,
            self._spec.trainer.minibatches,
            self._ranks.world_size,
            self._spec.trainer.micro_batch_size,
            whole_groups=self._spec.algorithm.needs_groups,
        )
        return self._ranks.scatter([replace(order, rows=(), minibatches=share) for share in shares])

    def _train(self, learner: Learner, order: Order) -> None:
        # A fork starts elsewhere than at its reference; its parent's first batch was checked.
        if self.progress.updates == 0 and not self._grant.start_version:
            half = self._spec.model.dtype == "bfloat16"
            tolerance = self._settings.reference_tolerance_bfloat16 if half else self._settings.reference_tolerance
            pieces = [piece for minibatch in order.minibatches for piece in minibatch.pieces]
            learner.check_reference(pieces, tolerance)
        step = self.progress.step + 1
        learned = learner.learn(order.minibatches, learning_rate_at(step, self._spec.trainer))
        applied = not learned.refused
        self.progress = replace(self.progress, step=step, updates=self.progress.updates + learned.updates)
        if self._conductor and applied:
            self._conductor.step_done(self.progress, self._whole_batch, learned.metrics)
        elif self._conductor:
            self._conductor.step_refused(step, self._whole_batch, learned.refused)

    def _refer(self, learner: Learner, version: int) -> None:
        """Take a published version as the reference from now on. Raises on every rank alike when it is damaged."""
        learner.set_reference(self._store.open(self._grant.run_id, version).files)
        self.progress = replace(self.progress, reference_version=version)
        log.info("the reference is refreshed", run=self._grant.run_id, version=version, step=self.progress.step)

    def _publish(self, learner: Learner) -> None:
        parent, step = self.progress.weight_version, self.progress.step
        self.progress = replace(self.progress, weight_version=parent + 1, weight_step=step)
        with self._conductor.owning() if self._conductor else nullcontext():
            written = store_weights(
                self._ranks,
                learner.engine,
                self._store,
                self._grant.run_id,
                version=parent + 1,
                parent=parent,
                step=step,
                epoch=self._grant.epoch,
                keep=self._settings.weights_kept,
                spare=self._spared(),
            )
            if self._conductor and written:
                self._conductor.published(written, self.progress)

    @property
    def _store(self) -> WeightStore:
        return run_store(self._grant.run_id, self._grant.weight_store_path, self._settings)

    def _spared(self) -> set[int]:
        """The reference and what may follow it, this version included, and what training started from."""
        refresh, progress = self._spec.algorithm.reference_refresh, self.progress
        if refresh and progress.step % refresh.interval_steps == 0:
            self._candidates.add(progress.weight_version)
        self._candidates = {each for each in self._candidates if each >= progress.reference_version}
        return self._candidates | {self._grant.start_version}

    def _checkpoint(self, learner: Learner) -> None:
        with self._conductor.owning() if self._conductor else nullcontext():
            sealed = save_checkpoint(
                self._ranks,
                learner,
                Path(self._grant.checkpoint_path),
                self.progress,
                epoch=self._grant.epoch,
                keep=self._settings.checkpoints_kept,
            )
            if self._conductor:
                self._conductor.checkpoint_tried(self.progress.step)
                if sealed:
                    self._conductor.checkpointed(sealed, self.progress)


def learning_rate_at(step: int, trainer: TrainerSpec) -> float:
    """Linear warm-up over the first steps, then constant (paper: 200 steps); step counts from 1."""
    return trainer.learning_rate * min(1.0, step / max(1, trainer.warmup_steps))
