"""Training state on disk: one safetensors file per rank and a manifest, whole or absent, verified when read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.ranks import Ranks
from spo.disk_space import told_when_full
from spo.errors import IntegrityError, NotFound, PreconditionFailed
from spo.manifest_folder import (
    ManifestFolder,
    numbered_folders,
    open_folder,
    seal_folder,
    staging_folder,
)
from spo.observability.logs import get_logger
from spo.v1 import orchestrator_service_pb2 as wire

log = get_logger("checkpoints")

# As safetensors names what a training state holds.
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}


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


# Folder, progress, how many ranks wrote it.
_Found = tuple[Path, TrainingProgress, int] | PreconditionFailed | None


def save_checkpoint(
    ranks: Ranks, training: TrainingState, root: Path, progress: TrainingProgress, *, epoch: int
) -> ManifestFolder | None:
    """All ranks write their part, rank 0 seals the folder and gets it.

    None when it could not be written: logged, the previous one stays, training goes on. Raises, on rank 0 alone,
    ResourceExhausted where there is no room and Conflict when a newer owner has written this step.
    """
    if not ranks.leads:
        writing: Path | None = ranks.share(None)
        if writing:
            _save_part(ranks, training, writing)
        return None
    needed = ranks.world_size * sum(tensor.nbytes for tensor in training.state_tensors().values())
    try:
        with told_when_full(root, needed):
            return _save_and_seal(ranks, training, root, progress, epoch)
    except OSError as error:
        log.error("the checkpoint was not written; training goes on without it", step=progress.step, why=str(error))
        return None


def _save_and_seal(
    ranks: Ranks, training: TrainingState, root: Path, progress: TrainingProgress, epoch: int
) -> ManifestFolder:
    destination, shared = _folder(root, progress.step), False
    head = {**vars(progress), "epoch": epoch, "world_size": ranks.world_size, "zero_stage": training.stage}
    try:
        with staging_folder(destination) as writing:
            shared, _ = True, ranks.share(writing)
            for problem in _save_part(ranks, training, writing):
                raise problem
            return seal_folder(writing, destination, head)
    finally:
        # Where there was no room even for a folder: the other ranks wait for its name.
        if not shared:
            ranks.share(None)


def _save_part(ranks: Ranks, training: TrainingState, writing: Path) -> list[OSError]:
    """What went wrong on any rank, after all have written."""
    problem = None
    try:
        write_tensors(writing / _part_name(ranks.rank), training.state_tensors() | _random_state(ranks))
    except (OSError, RuntimeError) as error:
        problem = OSError(getattr(error, "errno", None), f"rank {ranks.rank}: {error}")
    return [found for found in ranks.gather(problem) if found]


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


def load_checkpoint(
    ranks: Ranks, training: TrainingState, root: Path, recorded: wire.RecordedCheckpoints | None = None
) -> TrainingProgress | None:
    """Bring every rank to the first recorded checkpoint that is intact; None when there is none.

    recorded: what owners of the job reported while they were; None takes the newest folder. A damaged one is named in
    the log and passed over, like a folder that another trainer put in its place; one of another number of ranks is
    resharded. Raises PreconditionFailed when it was written at another ZeRO stage.
    """
    candidates = (
        _in_folder(root) if recorded is None else [(item.step, item.manifest_digest) for item in recorded.items]
    )
    newest = _first_intact(ranks, training, root, candidates) if ranks.leads else None
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


def _in_folder(root: Path) -> list[tuple[int, str]]:
    return [(step, "") for step, _ in reversed(numbered_folders(root))]


def _first_intact(ranks: Ranks, training: TrainingState, root: Path, candidates: Sequence[tuple[int, str]]) -> _Found:
    """candidates: (step, manifest digest or "" for any), the one to prefer first."""
    for step, digest in candidates:
        path = _folder(root, step)
        try:
            found = open_folder(path)
            if digest not in ("", found.manifest_digest):
                raise IntegrityError(f"{path} is not the checkpoint that was reported")
        except (IntegrityError, NotFound) as error:
            log.warning("a damaged checkpoint is passed over", step=step, reason=error.message)
            continue
        manifest = found.manifest
        written_by, stage = int(manifest["world_size"]), int(manifest["zero_stage"])
        if stage != training.stage:
            return PreconditionFailed(
                f"checkpoint {path.name} was written at ZeRO stage {stage}; resume it so, not at {training.stage}",
                code="checkpoint_layout",
            )
        log.info("resuming", step=step, written_by_ranks=written_by, ranks=ranks.world_size)
        progress = TrainingProgress(**{name: manifest[name] for name in vars(TrainingProgress()) if name in manifest})
        return path, progress, written_by
    if candidates:
        log.error("no checkpoint of the run is intact; training begins anew", tried=[step for step, _ in candidates])
    return None


def _folder(root: Path, step: int) -> Path:
    return root / f"{step:010d}"


def _random_state(ranks: Ranks) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
