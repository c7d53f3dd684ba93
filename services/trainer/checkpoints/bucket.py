"""Checkpoints in a bucket, for trainers that share no folder: each rank writes here and uploads while training goes on.

A checkpoint is there once its manifest is, which rank 0 puts when the parts of all ranks have arrived. A part carries
its digest in its name, so that what a stale trainer uploads takes nobody's place; the manifest carries the epoch.
What a machine wrote or fetched last stays on its disk: who resumes there reads no network.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from services.trainer.checkpoints.places import SavedCheckpoint
from services.trainer.checkpoints.training_state import (
    TrainingProgress,
    TrainingState,
    bytes_of_all,
    manifest_head,
    part_name,
    write_part,
)
from services.trainer.ranks import Ranks
from spo.disk_space import told_when_full
from spo.errors import IntegrityError, NotFound, NotReady, Unreachable
from spo.manifest_folder import FileEntry, Manifest, ManifestFolder, entry_of, numbered_folders, verify
from spo.observability.logs import get_logger
from spo.weights.assembly import digest_of
from spo.weights.backends import CHECKPOINT_DIGITS
from spo.weights.lock_file import locked
from spo.weights.s3_backend import S3Backend

log = get_logger("checkpoints")

Answer = TypeVar("Answer")

# A checkpoint is given up on when no further part of it has arrived for so long; a bucket that is away for less only
# delays it.
UPLOAD_SECONDS = 1800.0
RETRY_SECONDS = 5.0
LOOK_SECONDS = 0.2
LONGEST_LOOK_SECONDS = 5.0
FETCH_SECONDS = 3600.0
# Parts of other jobs that nobody touched for so long are no longer worth their room.
FORGOTTEN_SECONDS = 6 * 3600.0


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
            with told_when_full(self._cache, bytes_of_all(ranks, training)):
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
        writing = folder / f".writing-{part_name(ranks.rank)}"
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
            raise IntegrityError(f"{where} is not the checkpoint that was reported")
        return found

    def parts(self, step: int, manifest: Manifest, names: Collection[str]) -> list[Path]:
        entries = {entry["name"]: entry for entry in manifest["files"]}
        missing = sorted(set(names) - entries.keys())
        if missing:
            raise IntegrityError(f"{self._backend.uri(self._run_id, step)} has no {missing[0]}")
        return [self._fetched(step, entries[name]) for name in sorted(names)]

    def _fetched(self, step: int, entry: FileEntry) -> Path:
        """The verified file here, fetched by one process of this machine if it must be."""
        path = self._file(step, entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            told_when_full(self._cache, entry["size_bytes"]),
            locked(path.with_name(f".lock-{path.name}"), FETCH_SECONDS),
        ):
            with contextlib.suppress(IntegrityError):
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
        except (NotFound, IntegrityError):
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
                raise NotReady(f"{entry['name']} of step {self._step} has not arrived in {UPLOAD_SECONDS:g} s")
            if self._abandoned.wait(pause):
                raise self._unwanted()
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    def _insist(self, call: Callable[[], Answer]) -> Answer:
        while True:
            try:
                return call()
            except Unreachable as error:
                if time.monotonic() > self._deadline or self._abandoned.is_set():
                    raise
                log.warning("a checkpoint waits for its bucket", step=self._step, reason=error.message)
            self._abandoned.wait(RETRY_SECONDS)

    def _unwanted(self) -> NotReady:
        return NotReady(f"the checkpoint of step {self._step} is not wanted any more")
