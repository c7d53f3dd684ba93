"""Where the checkpoints of a run are kept, and a folder that all ranks of all trainers see as such a place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from spo.errors import IntegrityError
from spo.manifest_folder import (
    Manifest,
    numbered_folders,
    open_folder,
    prune_folders,
    seal_folder,
    staging_folder,
)
from spo.weights.backends import CHECKPOINT_DIGITS


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

        That may be later, while training goes on. Raises OSError, ResourceExhausted and Conflict, on rank 0 alone.
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
        with told_when_full(self._root, bytes_of_all(ranks, training)):
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
        return [step for step, _ in numbered_folders(self._root)]

    def manifest(self, step: int, digest: str) -> Manifest:
        found = open_folder(self._folder(step))
        if digest not in ("", found.manifest_digest):
            raise IntegrityError(f"{found.path} is not the checkpoint that was reported")
        return found.manifest

    def parts(self, step: int, manifest: Manifest, names: Collection[str]) -> list[Path]:
        return [self._folder(step) / name for name in sorted(names)]

    def prune(self, kept: Sequence[int], epoch: int) -> None:
        prune_folders(self._root, kept, epoch)

    def abandon(self) -> None:
        """Nothing is on its way: a folder is sealed before training goes on."""

    def _folder(self, step: int) -> Path:
        return self._root / f"{step:0{CHECKPOINT_DIGITS}d}"


def _write_together(ranks: Ranks, training: TrainingState, writing: Path) -> list[OSError]:
    """What went wrong on any rank, after all have written."""
    problem = write_part(ranks, training, writing / part_name(ranks.rank))
    return [found for found in ranks.gather(problem) if found]
