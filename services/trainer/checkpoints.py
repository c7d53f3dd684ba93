"""Training state of all ranks: saved together in a folder or a bucket, and resumed from the best checkpoint that is
intact.

Checkpoints in a bucket, for trainers that share no folder: each rank writes here and uploads while training goes on.
A checkpoint is there once its manifest is, which rank 0 puts when the parts of all ranks have arrived. A part carries
its digest in its name, so that what a stale trainer uploads takes nobody's place; the manifest carries the epoch.
What a machine wrote or fetched last stays on its disk: who resumes there reads no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from services.trainer.ranks import Ranks
from spo import errors
from spo.manifest_folder import (
    FileEntry,
    Manifest,
    ManifestFolder,
    entry_of,
    numbered_folders,
    open_folder,
    prune_folders,
    seal_folder,
    staging_folder,
    verify,
)
from spo.model.folder import read_tensors
from spo.observability import get_logger
from spo.v1 import orchestrator_service_pb2 as wire
from spo.weights.s3_backend import S3Backend
from spo.weights.store import CHECKPOINT_DIGITS, digest_of, locked

# As safetensors names what a training state holds.
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}

log = get_logger("checkpoints")

Answer = TypeVar("Answer")

# A checkpoint is given up on when no further part of it has arrived for so long; a bucket that is away for less only
# delays it.
UPLOAD_SECONDS = 1800.0
RETRY_SECONDS = 5.0
LOOK_SECONDS = 0.2
LONGEST_LOOK_SECONDS = 5.0
FETCH_SECONDS = 3600.0
# Least pause between two checkpoints that no interval asked for, and until a place that failed is tried again.
MIN_CHECKPOINT_SECONDS = 10.0
STORAGE_SECONDS = 5.0
# Parts of other jobs that nobody touched for so long are no longer worth their room.
FORGOTTEN_SECONDS = 6 * 3600.0


class TrainingState(Protocol):
    """What a checkpoint holds of a rank."""

    @property
    def stage(self) -> int:
        """ZeRO stage that the tensors are laid out for."""

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part, by name."""

    def reshard_state_tensors(self, paths: Sequence[Path]) -> dict[str, Tensor]:
        """This rank's part of what another number of ranks wrote, one file each. Raises IntegrityError."""

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse, on the same rank of as many. Raises IntegrityError on another model's."""


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands: steps done, updates applied, the last version of its own weights and the step of that.

    published_version: the newest version of the job, which a lease that ended may have published after the step that
    training was resumed at. reference_version: the weight version that is the reference; 0 is the model folder.
    """

    step: int = 0
    updates: int = 0
    weight_version: int = 0
    weight_step: int = 0
    published_version: int = 0
    reference_version: int = 0


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file tensor by tensor: of those on a device one at a time is in the CPU's memory."""
    # The widest first: each then begins at a multiple of its width, as readers that map the file need it.
    ordered = dict(sorted(tensors.items(), key=lambda named: -named[1].element_size()))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered.values():
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def write_part(ranks: Ranks, training: TrainingState, path: Path) -> OSError | None:
    """Write this rank's part; what went wrong, since the other ranks are to hear of it."""
    try:
        write_tensors(path, training.state_tensors() | random_state(ranks))
    except (OSError, RuntimeError) as error:
        return OSError(getattr(error, "errno", None), f"rank {ranks.rank}: {error}")
    return None


def bytes_of_all(ranks: Ranks, training: TrainingState) -> int:
    """About how large the parts of all ranks are."""
    return ranks.world_size * sum(tensor.nbytes for tensor in training.state_tensors().values())


def manifest_head(ranks: Ranks, training: TrainingState, progress: TrainingProgress, epoch: int) -> Manifest:
    """What a checkpoint's manifest says beside its files."""
    return {**vars(progress), "epoch": epoch, "world_size": ranks.world_size, "zero_stage": training.stage}


def progress_in(manifest: Manifest) -> TrainingProgress:
    """How far training was; fields that an older release did not write have their defaults."""
    return TrainingProgress(**{name: manifest[name] for name in vars(TrainingProgress()) if name in manifest})


def random_state(ranks: Ranks) -> dict[str, Tensor]:
    """Of the generators of this rank, by name."""
    state: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def part_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole one: of what progress, where it lies, blake3 of its manifest in hex."""

    progress: TrainingProgress
    path: str
    manifest_digest: str


class CheckpointPlace(Protocol):
    """The checkpoints of one run, by step."""

    def save(
        self, ranks: Ranks, training: TrainingState, progress: TrainingProgress, epoch: int
    ) -> Future[SavedCheckpoint] | None:
        """All ranks write their part; rank 0 gets what is done once the checkpoint is whole.

        That may be later, while training goes on. Raises OSError, ResourceExhausted, StorageUnavailable and Conflict,
        on rank 0 alone.
        """

    def steps(self) -> list[int]:
        """Of all that are there, ascending."""

    def manifest(self, step: int, digest: str) -> Manifest:
        """Rank 0: the one with this manifest digest, "" for any. Raises NotFound, IntegrityError, Unreachable."""

    def parts(self, step: int, manifest: Manifest, names: Collection[str]) -> list[Path]:
        """Verified files of it, in order of their names, on this rank's machine. Raises as `manifest`."""

    def prune(self, kept: Sequence[int], epoch: int) -> None:
        """Remove the others, but for those of a newer epoch. Raises Unreachable."""

    def abandon(self) -> None:
        """What is not whole yet need not become so: the job is somebody else's."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """Written by all ranks at `step`; whole in its place once `saved` is done."""

    step: int
    saved: Future[SavedCheckpoint]
    place: CheckpointPlace


class CheckpointSchedule:
    """When a checkpoint is due, the one that is pending, and how long a place that cannot be written is left alone.

    interval: steps. share: the share of the time that checkpoints between the intervals may take; 0: there are none.
    One is pending at a time; training goes on meanwhile, and without a checkpoint that could not be written.
    """

    def __init__(self, interval: int, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pending: PendingCheckpoint | None = None
        self._interval = interval
        self._share = share
        self._clock = clock
        self._tried_at_step = -1
        # One that was due and is not there: the place could not be written, or another was pending.
        self._owed = False
        self._writable_at = 0.0
        self._ended = clock()
        self._seconds = 0.0

    def resumed(self, step: int) -> None:
        """Training goes on from a checkpoint of this step, or from its beginning."""
        self._tried_at_step = step

    def tried(self, step: int) -> bool:
        """Whether a checkpoint of this step was written, or could not be."""
        return self._tried_at_step == step

    def settled(self, step: int) -> bool:
        """Whether this step needs no further try now: it is saved, or could not be written a moment ago."""
        return self.tried(step) and not (self._owed and self.may_write())

    def may_write(self) -> bool:
        """Whether the places of weights and checkpoints may be written, as far as is known."""
        return self._clock() >= self._writable_at

    def due(self, step: int) -> bool:
        """Whether a checkpoint of this step is to be written. One that is due while another is pending follows it."""
        at_interval = step % self._interval == 0
        if self.pending:
            self._owed = self._owed or at_interval
            return False
        if at_interval:
            return True
        if self._owed:
            return self.may_write()
        if not self._share:
            return False
        return self._clock() - self._ended > max(MIN_CHECKPOINT_SECONDS, self._seconds / self._share)

    def write_failed(self) -> None:
        """A place of weights or checkpoints is full or cannot be used: it is tried again STORAGE_SECONDS later."""
        self._writable_at = self._clock() + STORAGE_SECONDS

    def ended(self, step: int, pending: PendingCheckpoint | None, began: float) -> None:
        """All ranks have tried to write this step since `began` (by `clock`); None when they could not."""
        self._tried_at_step = step
        self._ended = self._clock()
        self._seconds = self._ended - began
        self._owed = pending is None and not self.may_write()
        self.pending = pending

    def take_whole(self) -> PendingCheckpoint | None:
        """The pending checkpoint, once it is whole or has failed; the next one may be written then."""
        if self.pending is None or not self.pending.saved.done():
            return None
        whole, self.pending = self.pending, None
        return whole

    def lost(self) -> None:
        """A checkpoint that was pending did not become whole: another is owed, of whatever step it then is."""
        self._owed = True
        self.write_failed()


class CheckpointFolder:
    """A folder with one sealed folder a step, which every rank of this trainer, and of the next one, sees."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(
        self, ranks: Ranks, training: TrainingState, progress: TrainingProgress, epoch: int
    ) -> Future[SavedCheckpoint] | None:
        if not ranks.leads:
            writing: Path | None = ranks.share(None)
            if writing:
                _write_together(ranks, training, writing)
            return None
        saved: Future[SavedCheckpoint] = Future()
        with errors.storage_faults_named(self._root, bytes_of_all(ranks, training)):
            saved.set_result(self._seal(ranks, training, progress, epoch))
        return saved

    def _seal(self, ranks: Ranks, training: TrainingState, progress: TrainingProgress, epoch: int) -> SavedCheckpoint:
        destination, shared = self._folder(progress.step), False
        try:
            with staging_folder(destination) as writing:
                shared, _ = True, ranks.share(writing)
                for problem in _write_together(ranks, training, writing):
                    raise problem
                sealed = seal_folder(writing, destination, manifest_head(ranks, training, progress, epoch))
        finally:
            # Where there was no room even for a folder: the other ranks wait for its name.
            if not shared:
                ranks.share(None)
        return SavedCheckpoint(progress, str(sealed.path.absolute()), sealed.manifest_digest)

    def steps(self) -> list[int]:
        with errors.storage_faults_named(self._root):
            return [step for step, _ in numbered_folders(self._root)]

    def manifest(self, step: int, digest: str) -> Manifest:
        with errors.storage_faults_named(self._root):
            found = open_folder(self._folder(step))
        if digest not in ("", found.manifest_digest):
            raise errors.IntegrityError(f"{found.path} is not the checkpoint that was reported")
        return found.manifest

    def parts(self, step: int, manifest: Manifest, names: Collection[str]) -> list[Path]:
        return [self._folder(step) / name for name in sorted(names)]

    def prune(self, kept: Sequence[int], epoch: int) -> None:
        with errors.storage_faults_named(self._root):
            prune_folders(self._root, kept, epoch)

    def abandon(self) -> None:
        """Nothing is on its way: a folder is sealed before training goes on."""

    def _folder(self, step: int) -> Path:
        return self._root / f"{step:0{CHECKPOINT_DIGITS}d}"


def _write_together(ranks: Ranks, training: TrainingState, writing: Path) -> list[OSError]:
    """What went wrong on any rank, after all have written."""
    problem = write_part(ranks, training, writing / part_name(ranks.rank))
    return [found for found in ranks.gather(problem) if found]


class CheckpointBucket:
    """The checkpoints of one run below a URL; `cache` is this machine's folder for them."""

    def __init__(self, url: str, cache: Path) -> None:
        place, _, self._run_id = url.rpartition("/")
        self._backend = S3Backend(place, CHECKPOINT_DIGITS)
        self._cache = cache
        self._abandoned = threading.Event()

    def save(
        self, ranks: Ranks, training: TrainingState, progress: TrainingProgress, epoch: int
    ) -> Future[SavedCheckpoint] | None:
        written: FileEntry | OSError
        try:
            written = self._write(ranks, training, progress.step)
        except OSError as error:
            written = error
        found = ranks.gather(written)
        problems = [each for each in found if isinstance(each, OSError)]
        if problems:
            with errors.storage_faults_named(self._cache, bytes_of_all(ranks, training)):
                if ranks.leads:
                    raise problems[0]
            return None
        entries = [each for each in found if not isinstance(each, OSError)]
        manifest = {**manifest_head(ranks, training, progress, epoch), "files": entries}
        done: Future[SavedCheckpoint] = Future()
        upload = _Upload(self._backend, self._run_id, progress.step, self._abandoned)

        def carry_out() -> None:
            try:
                upload.put_part(entries[ranks.rank], self._file(progress.step, entries[ranks.rank]))
                if ranks.leads:
                    upload.seal(manifest)
                self._forget_parts(progress.step, ranks)
            except Exception as error:  # It is raised where the future is asked.
                if not ranks.leads:
                    log.error("this rank's part of a checkpoint was not uploaded", step=progress.step, why=str(error))
                done.set_exception(error)
            else:
                sealed = ManifestFolder(Path(), manifest)
                uri = self._backend.uri(self._run_id, progress.step)
                done.set_result(SavedCheckpoint(progress, uri, sealed.manifest_digest))

        threading.Thread(target=carry_out, name="checkpoint upload", daemon=True).start()
        return done if ranks.leads else None

    def _write(self, ranks: Ranks, training: TrainingState, step: int) -> FileEntry:
        """This rank's part in the cache, named by what is in it."""
        self._forget_jobs()
        folder = self._folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        writing = folder / f".writing-{os.getpid()}-{part_name(ranks.rank)}"
        try:
            problem = write_part(ranks, training, writing)
            if problem:
                raise problem
            entry: FileEntry = {**entry_of(writing), "name": part_name(ranks.rank)}
            writing.rename(self._file(step, entry))
        finally:
            writing.unlink(missing_ok=True)
        return entry

    def steps(self) -> list[int]:
        return self._backend.versions(self._run_id)

    def manifest(self, step: int, digest: str) -> Manifest:
        found = self._backend.manifest(self._run_id, step)
        if digest not in ("", digest_of(found)):
            where = self._backend.uri(self._run_id, step)
            raise errors.IntegrityError(f"{where} is not the checkpoint that was reported")
        return found

    def parts(self, step: int, manifest: Manifest, names: Collection[str]) -> list[Path]:
        entries = {entry["name"]: entry for entry in manifest["files"]}
        missing = sorted(set(names) - entries.keys())
        if missing:
            raise errors.IntegrityError(f"{self._backend.uri(self._run_id, step)} has no {missing[0]}")
        return [self._fetched(step, entries[name]) for name in sorted(names)]

    def _fetched(self, step: int, entry: FileEntry) -> Path:
        """The verified file here, fetched by one process of this machine if it must be."""
        path = self._file(step, entry)
        with errors.storage_faults_named(self._cache):
            path.parent.mkdir(parents=True, exist_ok=True)
        with (
            errors.storage_faults_named(self._cache, entry["size_bytes"]),
            locked(path.with_name(f".lock-{path.name}"), FETCH_SECONDS),
        ):
            with contextlib.suppress(errors.IntegrityError):
                verify(path, entry)
                return path
            path.unlink(missing_ok=True)
            self._backend.fetch(self._run_id, step, entry, path)
        return path

    def prune(self, kept: Sequence[int], epoch: int) -> None:
        for step in self.steps():
            if step not in kept and self._epoch_of(step) <= epoch:
                self._backend.remove(self._run_id, step)
        self._backend.tidy(self._run_id)

    def _epoch_of(self, step: int) -> int:
        try:
            return int(self._backend.manifest(self._run_id, step).get("epoch", 0))
        except (errors.NotFound, errors.IntegrityError):
            return -1

    def abandon(self) -> None:
        self._abandoned.set()

    def _forget_parts(self, step: int, ranks: Ranks) -> None:
        """Of older checkpoints: what this rank wrote, and what no rank writes any more."""
        for other, folder in numbered_folders(self._cache):
            for part in folder.glob("*-rank-*.safetensors") if other != step else ():
                rank = int(part.stem.rpartition("-")[2])
                if rank == ranks.rank or rank >= ranks.world_size:
                    part.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Other ranks' parts are there.
                if other != step and not list(folder.glob("*.safetensors")):
                    shutil.rmtree(folder)

    def _forget_jobs(self) -> None:
        for job in self._cache.parent.glob("*") if self._cache.parent.is_dir() else ():
            with contextlib.suppress(OSError):
                if job != self._cache and time.time() - job.stat().st_mtime > FORGOTTEN_SECONDS:
                    shutil.rmtree(job)

    def _folder(self, step: int) -> Path:
        return self._cache / f"{step:0{CHECKPOINT_DIGITS}d}"

    def _file(self, step: int, entry: FileEntry) -> Path:
        return self._folder(step) / f"{entry['blake3'][:16]}-{entry['name']}"


class _Upload:
    """One checkpoint on its way to the bucket. An abandoned one gets no manifest.

    Its parts are not taken back: the next trainer's may be the same objects. They go when the run is tidied or removed.
    """

    def __init__(self, backend: S3Backend, run_id: str, step: int, abandoned: threading.Event) -> None:
        self._backend = backend
        self._run_id = run_id
        self._step = step
        self._abandoned = abandoned
        self._deadline = time.monotonic() + UPLOAD_SECONDS

    def put_part(self, entry: FileEntry, file: Path) -> None:
        """Raises Unreachable, OSError."""
        self._insist(lambda: self._backend.put_file(self._run_id, self._step, entry, file))
        self._deadline = time.monotonic() + UPLOAD_SECONDS

    def seal(self, manifest: Manifest) -> None:
        """Put the manifest once the parts of all ranks are there.

        Raises Conflict, NotReady where it is not wanted any more or some part does not come, and as put_part.
        """
        for entry in manifest["files"]:
            self._wait_for(entry)
            self._deadline = time.monotonic() + UPLOAD_SECONDS
        if self._abandoned.is_set():
            raise self._unwanted()
        self._insist(lambda: self._backend.put_manifest(self._run_id, self._step, manifest))

    def _wait_for(self, entry: FileEntry) -> None:
        pause = LOOK_SECONDS
        while not self._insist(lambda: self._backend.holds(self._run_id, self._step, entry)):
            if time.monotonic() > self._deadline:
                raise errors.NotReady(f"{entry['name']} of step {self._step} has not arrived in {UPLOAD_SECONDS:g} s")
            if self._abandoned.wait(pause):
                raise self._unwanted()
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    def _insist(self, call: Callable[[], Answer]) -> Answer:
        while True:
            try:
                return call()
            except errors.Unreachable as error:
                if time.monotonic() > self._deadline or self._abandoned.is_set():
                    raise
                log.warning("a checkpoint waits for its bucket", step=self._step, reason=error.message)
            self._abandoned.wait(RETRY_SECONDS)

    def _unwanted(self) -> errors.NotReady:
        return errors.NotReady(f"the checkpoint of step {self._step} is not wanted any more")


def checkpoint_place(grant: wire.LeaseJobResponse, state_path: Path) -> CheckpointPlace:
    """Where a leased job's checkpoints are. Raises InvalidInput where that is no place."""
    if "://" not in grant.checkpoint_path:
        return CheckpointFolder(Path(grant.checkpoint_path))
    # Imported here: a trainer with a shared folder needs no client of object stores.

    return CheckpointBucket(grant.checkpoint_path, local_folder(grant, state_path))


def local_folder(grant: wire.LeaseJobResponse, state_path: Path) -> Path:
    """The job's folder on this machine; with a shared folder its checkpoints are in there."""
    if "://" not in grant.checkpoint_path:
        return Path(grant.checkpoint_path)
    return state_path.absolute() / "checkpoints" / grant.run_id


def save_checkpoint(
    ranks: Ranks, training: TrainingState, place: CheckpointPlace, progress: TrainingProgress, *, epoch: int
) -> Future[SavedCheckpoint] | None:
    """All ranks write their part; rank 0 gets what is done once the checkpoint is whole.

    None when it could not be written: logged, the previous one stays, training goes on. Raises, on rank 0 alone,
    ResourceExhausted where there is no room, StorageUnavailable and Conflict when a newer owner has written this step.
    """
    try:
        return place.save(ranks, training, progress, epoch)
    except OSError as error:
        log.error("the checkpoint was not written; training goes on without it", step=progress.step, why=str(error))
        return None


def load_checkpoint(
    ranks: Ranks, training: TrainingState, place: CheckpointPlace, recorded: wire.RecordedCheckpoints | None = None
) -> TrainingProgress | None:
    """Bring every rank to the first recorded checkpoint that is intact; None when there is none.

    recorded: what owners of the job reported while they were; None takes the newest. A damaged one is named in the log
    and passed over, like one that another trainer put in its place; one of another number of ranks is resharded.
    Raises, on all ranks alike, PreconditionFailed when it was written at another ZeRO stage, Unreachable.
    """
    candidates, problem = _candidates(place, recorded) if ranks.leads else ([], None)
    candidates, problem = ranks.share((candidates, problem))
    if problem:
        raise problem
    for step, digest in candidates:
        manifest = _told(ranks, step, *_manifest(place, step, digest) if ranks.leads else (None, None))
        if manifest is None:
            continue
        written_by, stage = int(manifest["world_size"]), int(manifest["zero_stage"])
        if stage != training.stage:
            raise errors.PreconditionFailed(
                f"checkpoint {step} was written at ZeRO stage {stage}; resume it so, not at {training.stage}",
                code="checkpoint_layout",
            )
        wanted = [ranks.rank] if written_by == ranks.world_size else range(written_by)
        files = _parts(ranks, place, step, manifest, [part_name(rank) for rank in wanted])
        if files is None:
            continue
        if ranks.leads:
            log.info("resuming", step=step, written_by_ranks=written_by, ranks=ranks.world_size)
        _load(ranks, training, files, written_by)
        return progress_in(manifest)
    if candidates and ranks.leads:
        log.error("no checkpoint of the run is intact; training begins anew", tried=[step for step, _ in candidates])
    return None


def _candidates(
    place: CheckpointPlace, recorded: wire.RecordedCheckpoints | None
) -> tuple[list[tuple[int, str]], errors.SpoError | None]:
    """(step, manifest digest or "" for any), the one to prefer first; or why they cannot be listed."""
    try:
        if recorded is None:
            return [(step, "") for step in reversed(place.steps())], None
    except errors.SpoError as error:
        return [], error
    return [(each.step, each.manifest_digest) for each in recorded.items], None


def _manifest(place: CheckpointPlace, step: int, digest: str) -> tuple[Manifest | None, errors.SpoError | None]:
    try:
        return place.manifest(step, digest), None
    except errors.SpoError as error:
        return None, error


def _told(ranks: Ranks, step: int, manifest: Manifest | None, problem: errors.SpoError | None) -> Manifest | None:
    """Rank 0's manifest on every rank, None where it is damaged; its other errors are raised on all."""
    found = ranks.share((manifest, problem))
    return None if _passed_over(ranks, step, [found[1]]) else found[0]


def _parts(
    ranks: Ranks, place: CheckpointPlace, step: int, manifest: Manifest, names: Sequence[str]
) -> list[Path] | None:
    """This rank's files; None on every rank where those of any are damaged."""
    files: list[Path] = []
    problem: errors.SpoError | None = None
    try:
        files = place.parts(step, manifest, names)
    except errors.SpoError as error:
        problem = error
    return None if _passed_over(ranks, step, ranks.gather(problem)) else files


def _passed_over(ranks: Ranks, step: int, problems: Sequence[errors.SpoError | None]) -> bool:
    """Whether a checkpoint is damaged; raises what else went wrong on any rank."""
    found = [problem for problem in problems if problem]
    for problem in found:
        if not isinstance(problem, errors.IntegrityError | errors.NotFound):
            raise problem
        if ranks.leads:
            log.warning("a damaged checkpoint is passed over", step=step, reason=problem.message)
    return bool(found)


def _load(ranks: Ranks, training: TrainingState, files: Sequence[Path], written_by: int) -> None:
    if written_by == ranks.world_size:
        with errors.storage_faults_named(files[0].parent):
            tensors = read_tensors(files[0])
        torch.set_rng_state(tensors.pop("random.cpu"))
        if ranks.device.type == "cuda":
            torch.cuda.set_rng_state(tensors.pop("random.cuda"), ranks.device)
    else:
        # The policy is trained without dropout: nothing draws random numbers, so none are carried over.
        tensors = training.reshard_state_tensors(files)
    training.load_state_tensors(tensors)
