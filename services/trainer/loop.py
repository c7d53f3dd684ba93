"""The trainer's loop on every rank: take a job, carry out rank 0's commands until it ends, take the next.

lease -> load model -> resume -> [ train | skip | publish | checkpoint | update_reference | wait ]* -> release

Rank 0 is the service others see; the other ranks only follow it, and notify it when they are to stop.
One pod of several may get SIGTERM alone, when its node is drained. Its ranks notify rank 0 by torchrun's store, and
all write a last checkpoint together. Ranks that got no SIGTERM end with status 1, for which their torchrun starts
them anew at once: with 0 it would wait five minutes for the pod that left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from services.trainer.batches import ReplayClient
from services.trainer.checkpoints import (
    CheckpointPlace,
    SavedCheckpoint,
    TrainingProgress,
    checkpoint_place,
    load_checkpoint,
    local_folder,
    save_checkpoint,
)
from services.trainer.controller import Command, Controller, Follower, RankRole, TrainerContext
from services.trainer.deepspeed_engine import WeightCopy, WeightSource, copy_for, model_faults_named
from services.trainer.learner import Learner
from services.trainer.lease import (
    WAITING,
    Attempt,
    death_before,
    delay_before,
    forget_deaths,
    rank_memory_bytes,
    take_lease,
    tell_death,
)
from services.trainer.ranks import GroupStop, Ranks
from services.trainer.settings import Settings
from services.trainer.weights import NewVersion, run_store, store_weights
from spo.errors import DELAYING, IntegrityError, NotFound, NotReady, SpoError, StorageUnavailable, storage_faults_named
from spo.observability import get_logger, lines_concern_run, serve_metrics
from spo.rpc.client import RpcClient, show_token
from spo.rpc.server import RpcServer
from spo.service.process import ServiceProcess
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.spec.section import learning_rate_at
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest, LeaseJobResponse
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weights.broadcast import Broadcaster
from spo.weights.model_folders import MadeModels
from spo.weights.store import WeightStore

log = get_logger("loop")

# Commands that carry no work.
IDLE = ("skip", "wait", "end")


def lead_jobs(ranks: Ranks, settings: Settings, context: TrainerContext) -> None:
    """Rank 0: lease one job after the other and work on it with all ranks, until stopped."""
    while not context.stop.is_set():
        grant = take_lease(context.orchestrator, context.trainer_id, settings.lease_wait_seconds, context.stop)
        if grant and not context.belongs_to(grant.platform_id):
            break
        if grant and not _report_earlier_death(context, grant, settings):
            grant = None
        # Shared even without a job, as a response without run_id: no rank waits long for another.
        ranks.share(grant or LeaseJobResponse())
        if grant:
            spec = spec_from_json(grant.spec_json)
            log.info("job leased", run=grant.run_id, epoch=grant.epoch, ranks=ranks.world_size)
            lines_concern_run(grant.run_id)
            context.attempt = _attempt(ranks, settings, grant)
            _work_on(ranks, settings, grant, spec, Controller(ranks, settings, context, grant, spec), context.attempt)
            lines_concern_run("")
    ranks.share(None)


def _report_earlier_death(context: TrainerContext, grant: LeaseJobResponse, settings: Settings) -> bool:
    """Report to the orchestrator what the job's trainer died of, if it did; returns whether to work on the job."""
    notes = local_folder(grant, settings.state_path)
    death = death_before(notes, grant.epoch)
    if death is None:
        context.problem = delay_before(notes, grant.epoch) or context.problem
        return True
    log.warning("the trainer before died", run=grant.run_id, stage=death.stage, step=death.step, reason=death.cause)
    if (told := tell_death(context.orchestrator, context.trainer_id, grant, death)) is not None:
        forget_deaths(notes)
    return bool(told)


def follow_jobs(ranks: Ranks, settings: Settings) -> None:
    """Every other rank: work on the jobs that rank 0 leases, until it stops. They show the token as rank 0 does."""
    grant: LeaseJobResponse | None
    show_token(settings.rpc_token.get_secret_value())
    replay = RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub)
    while (grant := ranks.share(None)) is not None:
        if grant.run_id:
            attempt, spec = _attempt(ranks, settings, grant), spec_from_json(grant.spec_json)
            role = Follower(ranks, ReplayClient(replay, grant.run_id, spec))
            _work_on(ranks, settings, grant, spec, role, attempt)


def _attempt(ranks: Ranks, settings: Settings, grant: LeaseJobResponse) -> Attempt:
    return Attempt(ranks, grant, local_folder(grant, settings.state_path))


def _work_on(
    ranks: Ranks, settings: Settings, grant: LeaseJobResponse, spec: JobSpec, role: RankRole, attempt: Attempt
) -> None:
    run = TrainingRun(ranks, settings, grant, spec, role, attempt)
    with attempt.noted():
        try:
            run.carry_out()
        except SpoError as error:
            # Raised on every rank; the controller catches what fails on rank 0 alone.
            log.error("the run failed", run=grant.run_id, reason=str(error))
            role.fail(error)
        finally:
            run.close()
        role.conclude(run.progress)


class TrainingRun:
    """One leased job on this rank."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        grant: LeaseJobResponse,
        spec: JobSpec,
        role: RankRole,
        attempt: Attempt,
    ) -> None:
        self.progress = TrainingProgress()
        self._ranks = ranks
        self._settings = settings
        self._grant = grant
        self._spec = spec
        self._role = role
        self._attempt = attempt
        # Versions that may become the reference, however old: those of the refresh interval, and all of earlier leases.
        self._candidates: set[int] = set()
        # On rank 0: the checkpoints of this lease, the last ones, and the reference of each.
        self._saved: list[tuple[Future[SavedCheckpoint], int]] = []
        self._learner: Learner | None = None
        # A version that is being stored from a copy, and what it leaves the progress as: what was before, if in vain.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._publication: Future[bool] | None = None
        self._before = self.progress
        self._copy: WeightCopy | None = None
        self._checkpoints: CheckpointPlace | None = None

    def carry_out(self) -> None:
        """Load, resume, and carry out commands until rank 0 ends the run."""
        start = self._grant.start_version
        self._fetch_model()
        files = self._ranks.alike(lambda: self._store.open(self._grant.run_id, start)).files if start else ()
        together, delayed = self._ranks.together, self._attempt.delayed
        with together(delayed), model_faults_named(self._spec.model.path), storage_faults_named(self._spec.model.path):
            self._learner = learner = Learner(self._ranks, self._spec, files)
        self._checkpoints = checkpoint_place(self._grant, self._settings.state_path)
        with together(delayed):
            self._resume(learner, self._checkpoints)
        while True:
            self._attempt.begins(WAITING, self.progress.step)
            command = self._role.next_command(self.progress)
            if command.kind not in IDLE:
                self._attempt.begins(command.kind, self.progress.step)
            match command.kind:
                case "train":
                    self._train(learner, command)
                case "skip":
                    self.progress = replace(self.progress, step=self.progress.step + 1)
                case "publish":
                    self._publish(learner)
                case "checkpoint":
                    self._checkpoint(learner, self._checkpoints)
                case "update_reference":
                    self._refresh_reference(learner, command.reference_version)
                case "wait":
                    pass
                case "end":
                    return

    def _fetch_model(self) -> None:
        """Raises, on every rank alike, where a model that a fork made is in a bucket and cannot be fetched."""
        models = MadeModels(self._settings.state_place, self._settings.state_path)

        def fetch() -> None:
            try:
                for path in self._spec.model_paths.values():
                    models.here(path)
            except OSError as error:
                raise NotReady(f"a model cannot be fetched: {error}") from error

        self._ranks.alike(fetch)

    def close(self) -> None:
        """Free the models."""
        if self._checkpoints:
            self._checkpoints.abandon()
        self._behind.shutdown()
        if self._learner:
            self._learner.close()
        self._learner = None

    def _resume(self, learner: Learner, place: CheckpointPlace) -> None:
        grant = self._grant
        self._attempt.begins("resume", max((saved.step for saved in grant.checkpoints.items), default=0))
        recorded = grant.checkpoints if grant.HasField("checkpoints") else None
        loaded = load_checkpoint(self._ranks, learner, place, recorded)
        begun = loaded or TrainingProgress(weight_version=grant.start_version)
        # Versions count up over leases, whatever the checkpoint knew of them.
        self.progress = replace(begun, published_version=grant.next_weight_version - 1)
        if begun.step and begun.step >= self._spec.trainer.steps and not self._is_stored(begun.weight_version):
            # What was published is damaged or gone, and no later version will come: these weights once more.
            self.progress = replace(self.progress, weight_step=0)
        self._attempt.resumed(self.progress.step)
        self._role.resumed(self.progress, packed=learner.packed)
        if self._spec.algorithm.refreshes_by_samples:
            self._candidates.update(self._store.versions(self._grant.run_id))
        if self.progress.reference_version:
            self._update_reference(learner, self.progress.reference_version)

    def _is_stored(self, version: int) -> bool:
        """Whether a published version can be read whole, by every rank."""
        try:
            self._ranks.alike(lambda: self._store.open(self._grant.run_id, version))
        except (NotFound, IntegrityError) as problem:
            log.warning("a published version is not whole", version=version, reason=problem.message)
            return False
        return True

    def _train(self, learner: Learner, command: Command) -> None:
        mismatch: dict[str, float] = {}
        # A fork starts elsewhere than at its reference; its parent's first batch was checked. So does a run that begins
        # anew, with no checkpoint left, after its reference has moved on.
        at_reference = not (self._grant.start_version or self.progress.reference_version)
        if self.progress.updates == 0 and at_reference:
            micro_batches = [found for minibatch in command.minibatches for found in minibatch.micro_batches]
            mismatch = learner.check_reference(micro_batches, self._settings.reference_tolerance)
        step = self.progress.step + 1
        result = learner.learn(command.minibatches, learning_rate_at(step, self._spec.trainer))
        result = replace(result, metrics={**result.metrics, **mismatch})
        self.progress = replace(self.progress, step=step, updates=self.progress.updates + result.updates)
        self._role.step_done(self.progress, result)

    def _update_reference(self, learner: Learner, version: int) -> None:
        """Take a published version as the reference from now on. Raises on every rank alike when it is damaged."""
        files = self._ranks.alike(lambda: self._store.open(self._grant.run_id, version)).files
        with self._ranks.together(self._attempt.delayed), storage_faults_named(self._store.backend.name):
            learner.set_reference(files)
        self.progress = replace(self.progress, reference_version=version)
        log.info("the reference is refreshed", run=self._grant.run_id, version=version, step=self.progress.step)

    def _refresh_reference(self, learner: Learner, version: int) -> None:
        """Update the reference of a run that goes on: a store that cannot be read now is waited for."""
        try:
            self._update_reference(learner, version)
        except DELAYING as error:
            self._role.cannot_write(error)

    def _publish(self, learner: Learner) -> None:
        """Store a version: the first of a lease at once, which shows who writes; later ones while training goes on."""
        if self._publication and self._publication.result():
            self.progress = self._in_vain()
        before, self._publication = self.progress, None
        step, version = before.step, before.published_version + 1
        self.progress = replace(before, weight_version=version, weight_step=step, published_version=version)
        new = NewVersion(
            self._grant.run_id,
            version,
            parent=before.weight_version,
            step=step,
            epoch=self._grant.epoch,
            adapter=learner.adapter() if self._ranks.leads else None,
        )
        self._before = before
        if self._copy is None:
            writers, delayed = self._store_version(self._ranks, learner.engine, new, self.progress, self._spared())
            self._role.publishing(_known(delayed=delayed))
            if delayed:
                self.progress = before
            elif writers:
                self._copy = copy_for(self._ranks, learner.engine, writers, adapter=bool(self._spec.model.lora))
            return
        self._copy.take()
        given = self._ranks.beside, self._copy, new, self.progress, self._spared()
        self._publication = self._behind.submit(lambda: self._store_version(*given)[1])
        self._role.publishing(self._publication)

    def _in_vain(self) -> TrainingProgress:
        """The progress without the version that could not be stored."""
        kept = ("weight_version", "weight_step", "published_version")
        return replace(self.progress, **{name: getattr(self._before, name) for name in kept})

    def _store_version(
        self, ranks: Ranks, source: WeightSource, new: NewVersion, progress: TrainingProgress, spared: set[int]
    ) -> tuple[Sequence[int], bool]:
        """Store, announce and prune. Returns which ranks wrote, and whether the store cannot be written now."""
        store, delayed, writers = self._store, False, list[int]()
        with self._role.owning():
            try:
                written = store_weights(ranks, source, store, new)
            except DELAYING as error:
                delayed = True
                self._role.cannot_write(error)
            else:
                delayed = not self._role.published(written.version, progress)
                writers = list(written.writers)
                # Only now: a trainer that lost its lease removes nothing.
                if delayed:
                    store.backend.remove(new.run_id, new.version)
                elif written.version:
                    self._prune(store, spared)
        return ranks.share((writers, delayed))

    def _prune(self, store: WeightStore, spared: set[int]) -> None:
        try:
            store.prune(self._grant.run_id, self._settings.weights_kept, spared)
        except StorageUnavailable as error:
            # The version is there and announced; the next publication prunes what this one leaves.
            log.warning("older weights stay until the next publication", reason=error.message)

    @property
    def _store(self) -> WeightStore:
        return run_store(self._grant.run_id, self._grant.weight_store_path, self._settings)

    def _spared(self) -> set[int]:
        """References that training may go on with, this version included, and what training started from."""
        refresh, progress = self._spec.algorithm.reference_refresh, self.progress
        if refresh and refresh.values == "samples" and progress.step % refresh.interval_steps == 0:
            self._candidates.add(progress.weight_version)
        oldest = self._oldest_reference()
        self._candidates = {version for version in self._candidates if version >= oldest}
        return self._candidates | {self._grant.start_version}

    def _oldest_reference(self) -> int:
        """Of the checkpoints that may be resumed from; 0 until those of this lease are all that are kept."""
        kept = self._settings.checkpoints_kept
        going_well = [(saved, version) for saved, version in self._saved if not (saved.done() and saved.exception())]
        self._saved = going_well[-kept - 1 :]
        whole = [version for saved, version in self._saved if saved.done()][-kept:]
        return min(whole) if len(whole) == kept else 0

    def _checkpoint(self, learner: Learner, place: CheckpointPlace) -> None:
        with self._role.owning():
            saved = None
            try:
                saved = save_checkpoint(self._ranks, learner, place, self.progress, epoch=self._grant.epoch)
                if saved:
                    self._saved.append((saved, self.progress.reference_version))
            except DELAYING as error:
                self._role.cannot_write(error)
            self._role.checkpointed(saved, place, self.progress)


def _known(*, delayed: bool) -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(delayed)
    return done


def lead(process: ServiceProcess, ranks: Ranks, settings: Settings) -> int:
    """Serve health, send heartbeats and train until SIGTERM; returns the exit status."""
    context = TrainerContext(
        RpcClient("orchestrator", settings.orchestrator_address, OrchestratorServiceStub),
        RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        process.replica_id,
        process.stop,
        broadcaster=_broadcaster(settings),
        belongs_to=process.belongs_to,
    )

    devices = [rank_memory_bytes(ranks.device)] * ranks.world_size

    def report(request: HeartbeatRequest) -> None:
        request.run_id, request.policy_version = context.run_id, context.weight_version
        request.problem = context.problem or (context.attempt.long_stage if context.attempt else "")
        request.load = 1.0 if context.run_id else 0.0
        request.device_memory_bytes.extend(devices)
        request.accelerated = ranks.device.type == "cuda"

    def train(stop: threading.Event) -> None:
        lead_jobs(ranks, settings, context)

    group = GroupStop(ranks.world_size)
    process.report = report
    process.workers = [train, group.look]
    process.hold_state_when_known()
    status = process.run()
    if context.attempt and not process.failed:
        context.attempt.stopped()
    if context.broadcaster:
        context.broadcaster.close()
    return status or int(process.stopped_by is None)


def _broadcaster(settings: Settings) -> Broadcaster | None:
    if settings.weight_transfer == "files":
        return None
    return Broadcaster(
        settings.broadcast_host or settings.host,
        settings.broadcast_port,
        window_seconds=settings.broadcast_window_seconds,
        transfer_seconds=settings.broadcast_seconds,
    )


def follow(ranks: Ranks, settings: Settings) -> int:
    """Carry out rank 0's commands until it stops."""
    # On another machine than rank 0 the first process answers the probes of its pod.
    server = RpcServer(settings.host, settings.port, 2) if os.environ.get("LOCAL_RANK") == "0" else None
    if server:
        serve_metrics(settings.host, settings.metrics_port)
        server.start()
        server.set_serving(True)
    group = GroupStop(ranks.world_size)
    signal.signal(signal.SIGTERM, group.tell)
    follow_jobs(ranks, settings)
    if server:
        server.stop(1.0)
    return 0 if group.told.is_set() else 1
