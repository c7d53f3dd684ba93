"""The trainer's loop, on every rank: take a job, carry out rank 0's orders until it ends, take the next.

lease -> load model -> resume -> [ train | skip | publish | checkpoint | wait ]* -> give back
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from services.trainer.batches import ReplayClient, TrainingSample
from services.trainer.checkpoints import TrainingProgress, load_checkpoint, save_checkpoint
from services.trainer.controller import Command, Controller
from services.trainer.learner import Learner
from services.trainer.lease import JobLease, take_lease
from services.trainer.microbatches import cut_into_minibatches
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from services.trainer.weights import run_store, store_weights
from spo.errors import SpoError
from spo.observability.logs import get_logger, lines_concern_run
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec, TrainerSpec, spec_from_json
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse
from spo.weights.store import WeightStore

log = get_logger("train")


@dataclass
class TrainerContext:
    """What rank 0 has and the others do not: the other services, the stop signal, the job in hand (for heartbeats)."""

    orchestrator: RpcClient
    replay: RpcClient
    trainer_id: str
    stop: threading.Event
    run_id: str = ""
    weight_version: int = 0


def serve_jobs(ranks: Ranks, settings: Settings, context: TrainerContext | None) -> None:
    """Work on one job after the other until rank 0 is stopped; `context` on rank 0 only."""
    while True:
        grant = ranks.share(_next_grant(context, settings) if context else None)
        if grant is None:
            return
        if grant.run_id:
            _work_on(ranks, settings, grant, context)


def _next_grant(context: TrainerContext, settings: Settings) -> LeaseJobResponse | None:
    """A job; one without run_id when there is none yet; None when stopping."""
    if context.stop.is_set():
        return None
    grant = take_lease(context.orchestrator, context.trainer_id, settings.lease_wait_seconds, context.stop)
    return grant or LeaseJobResponse()


def _work_on(ranks: Ranks, settings: Settings, grant: LeaseJobResponse, context: TrainerContext | None) -> None:
    spec = spec_from_json(grant.spec_json)
    controller = None
    if context:
        log.info("job leased", run=grant.run_id, epoch=grant.epoch, ranks=ranks.world_size)
        lease = JobLease(
            context.orchestrator,
            context.trainer_id,
            grant,
            patience_seconds=settings.patience_seconds,
            stop=context.stop,
        )
        replay = ReplayClient(context.replay, grant.run_id, spec.trainer.batch_size, spec.seed)
        controller = Controller(lease, replay, spec, settings, context.stop)
        context.run_id = grant.run_id
        lines_concern_run(grant.run_id)
    run = TrainingRun(ranks, settings, grant, spec, controller, context)
    try:
        run.go()
    except SpoError as error:
        # Raised alike on every rank; failures of rank 0 alone are the conductor's.
        log.error("the run failed", run=grant.run_id, reason=str(error))
        if controller:
            controller.fail(error.code, error.message)
    finally:
        run.close()
        if context:
            context.run_id, context.weight_version = "", 0
    if controller:
        controller.conclude(run.progress)
        lines_concern_run("")


class TrainingRun:
    """One leased job on this rank."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        grant: LeaseJobResponse,
        spec: JobSpec,
        controller: Controller | None,
        context: TrainerContext | None,
    ) -> None:
        self.progress = TrainingProgress()
        self._ranks = ranks
        self._settings = settings
        self._grant = grant
        self._spec = spec
        self._controller = controller
        self._context = context
        # Versions that may be asked for as a reference, however old: those of intervals, and what was there before.
        self._candidates: set[int] = set()
        self._learner: Learner | None = None
        self._whole_batch: Sequence[TrainingSample] = ()

    def go(self) -> None:
        """Load, resume, and carry out orders until rank 0 ends the run."""
        start = self._grant.start_version
        files = self._store.open(self._grant.run_id, start).files if start else ()
        self._learner = learner = Learner(self._ranks, self._spec, files)
        self._resume(learner)
        while True:
            command = self._next_command()
            match command.kind:
                case "train":
                    self._train(learner, command)
                case "skip":
                    self.progress = replace(self.progress, step=self.progress.step + 1)
                case "publish":
                    self._publish(learner)
                case "checkpoint":
                    self._checkpoint(learner)
                case "update_reference":
                    self._update_reference(learner, command.reference_version)
                case "wait":
                    pass
                case "end":
                    return

    def _resume(self, learner: Learner) -> None:
        self.progress = load_checkpoint(self._ranks, learner, Path(self._grant.checkpoint_path)) or TrainingProgress()
        # Versions count up over leases, whatever the checkpoint knew of them.
        self.progress = replace(self.progress, weight_version=self._grant.next_weight_version - 1)
        if self._spec.algorithm.reference_refresh:
            self._candidates.update(self._store.versions(self._grant.run_id))
        if self.progress.reference_version:
            self._update_reference(learner, self.progress.reference_version)

    def close(self) -> None:
        if self._learner:
            self._learner.close()
        self._learner = None

    def _next_command(self) -> Command:
        if not self._controller:
            return self._ranks.scatter(None)
        if self._context:
            self._context.weight_version = self.progress.weight_version
        command = self._controller.next_command(self.progress)
        self._whole_batch = command.rows
        shares = cut_into_minibatches(
            command.rows,
            self._spec.trainer.minibatches,
            self._ranks.world_size,
            self._spec.trainer.micro_batch_size,
            whole_groups=self._spec.algorithm.needs_groups,
        )
        return self._ranks.scatter([replace(command, rows=(), minibatches=share) for share in shares])

    def _train(self, learner: Learner, command: Command) -> None:
        # A fork starts elsewhere than at its reference; its parent's first batch was checked.
        if self.progress.updates == 0 and not self._grant.start_version:
            half = self._spec.model.dtype == "bfloat16"
            tolerance = self._settings.reference_tolerance_bfloat16 if half else self._settings.reference_tolerance
            micro_batches = [
                micro_batch for minibatch in command.minibatches for micro_batch in minibatch.micro_batches
            ]
            learner.check_reference(micro_batches, tolerance)
        step = self.progress.step + 1
        result = learner.learn(command.minibatches, learning_rate_at(step, self._spec.trainer))
        applied = not result.refused
        self.progress = replace(self.progress, step=step, updates=self.progress.updates + result.updates)
        if self._controller and applied:
            self._controller.step_done(self.progress, self._whole_batch, result.metrics)
        elif self._controller:
            self._controller.step_refused(step, self._whole_batch, result.refused)

    def _update_reference(self, learner: Learner, version: int) -> None:
        """Take a published version as the reference from now on. Raises on every rank alike when it is damaged."""
        learner.set_reference(self._store.open(self._grant.run_id, version).files)
        self.progress = replace(self.progress, reference_version=version)
        log.info("the reference is refreshed", run=self._grant.run_id, version=version, step=self.progress.step)

    def _publish(self, learner: Learner) -> None:
        parent, step = self.progress.weight_version, self.progress.step
        self.progress = replace(self.progress, weight_version=parent + 1, weight_step=step)
        with self._controller.owning() if self._controller else nullcontext():
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
            if self._controller and written:
                self._controller.published(written, self.progress)

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
        with self._controller.owning() if self._controller else nullcontext():
            sealed = save_checkpoint(
                self._ranks,
                learner,
                Path(self._grant.checkpoint_path),
                self.progress,
                epoch=self._grant.epoch,
                keep=self._settings.checkpoints_kept,
            )
            if self._controller:
                self._controller.checkpoint_tried(self.progress.step)
                if sealed:
                    self._controller.checkpointed(sealed, self.progress)


def learning_rate_at(step: int, trainer: TrainerSpec) -> float:
    """Linear warm-up over the first steps, then constant (paper: 200 steps); step counts from 1."""
    return trainer.learning_rate * min(1.0, step / max(1, trainer.warmup_steps))
