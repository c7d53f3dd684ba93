"""Training state on disk: one safetensors file per rank and a manifest, whole or absent, verified when read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.ranks import Ranks
from spo.errors import IntegrityError, PreconditionFailed
from spo.manifest_folder import (
    ManifestFolder,
    numbered_folders,
    open_folder,
    prune_folders,
    seal_folder,
    staging_folder,
)
from spo.observability.logs import get_logger

log = get_logger("checkpoints")


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
    """Where a run stands: steps done, updates applied, the newest weight version and the step it was gathered after.

    reference_version: the weight version that is the reference; 0 is the model folder.
    """

    step: int = 0
    updates: int = 0
    weight_version: int = 0
    weight_step: int = 0
    reference_version: int = 0


# Folder, progress, how many ranks wrote it.
_Found = tuple[Path, TrainingProgress, int] | PreconditionFailed | None


def save_checkpoint(
    ranks: Ranks, training: TrainingState, root: Path, progress: TrainingProgress, *, epoch: int, keep: int
) -> ManifestFolder | None:
    """All ranks write their part, rank 0 seals the folder and prunes older ones; rank 0 gets it.

    None when it could not be written (a full disk): logged, the previous one stays, training goes on. Raises Conflict
    when a newer owner has written this step.
    """
    destination = root / f"{progress.step:010d}"
    if not ranks.leads:
        _save_part(ranks, training, ranks.share(None))
        return None
    with staging_folder(destination) as writing:
        problems = _save_part(ranks, training, ranks.share(writing))
        if problems:
            log.error("the checkpoint was not written; training goes on without it", step=progress.step, why=problems)
            return None
        head = {**vars(progress), "epoch": epoch, "world_size": ranks.world_size, "zero_stage": training.stage}
        sealed = seal_folder(writing, destination, head)
    prune_folders(root, keep)
    return sealed


def _save_part(ranks: Ranks, training: TrainingState, writing: Path) -> list[str]:
    """What went wrong on any rank, after all have written."""
    problem = ""
    try:
        save_file(training.state_tensors() | _random_state(ranks), writing / _part_name(ranks.rank))
    except (OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    return [found for found in ranks.gather(problem) if found]


def load_checkpoint(ranks: Ranks, training: TrainingState, root: Path) -> TrainingProgress | None:
    """Bring every rank to the newest intact checkpoint of the run; None when there is none.

    A damaged one is named in the log and passed over; one of another number of ranks is resharded. Raises
    PreconditionFailed when it was written at another ZeRO stage.
    """
    newest = _newest_intact(ranks, training, root) if ranks.leads else None
    found = cast(_Found, ranks.share(newest))
    if isinstance(found, PreconditionFailed):
        raise found
    if found is None:
        return None
    path, progress, written_by = found
    if written_by == ranks.world_size:
        tensors = load_file(path / _part_name(ranks.rank))
        torch.set_rng_state(tensors.pop("random.cpu"))
        if ranks.device.type == "cuda":
            torch.cuda.set_rng_state(tensors.pop("random.cuda"), ranks.device)
    else:
        # The policy is trained without dropout: nothing draws random numbers, so none are carried over.
        tensors = training.reshard_state_tensors([path / _part_name(rank) for rank in range(written_by)])
    training.load_state_tensors(tensors)
    return progress


def _newest_intact(ranks: Ranks, training: TrainingState, root: Path) -> _Found:
    for step, path in reversed(numbered_folders(root)):
        try:
            manifest = open_folder(path).manifest
        except IntegrityError as error:
            log.warning("a damaged checkpoint is passed over", step=step, reason=error.message)
            continue
        written_by, stage = int(manifest["world_size"]), int(manifest["zero_stage"])
        if stage != training.stage:
            return PreconditionFailed(
                f"checkpoint {path.name} was written at ZeRO stage {stage}; resume it so, not at {training.stage}",
                code="checkpoint_layout",
            )
        log.info("resuming", step=step, written_by_ranks=written_by, ranks=ranks.world_size)
        progress = TrainingProgress(**{name: manifest[name] for name in vars(TrainingProgress()) if name in manifest})
        return path, progress, written_by
    return None


def _random_state(ranks: Ranks) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
