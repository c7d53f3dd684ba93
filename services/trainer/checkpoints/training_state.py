"""Training state on disk: one safetensors file per rank, and how far training was when it was written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from services.trainer.ranks import Ranks
from spo.manifest_folder import Manifest

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
