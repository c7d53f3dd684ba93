"""LoRA adapters as the engine takes them: the room that it makes for them, and the adapter that changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from spo.errors import IntegrityError
from spo.model.adapter_folder import (
    CONFIG_FILE,
    PARTS,
    PREFIX,
    TENSORS_FILE,
    Shapes,
    adapted_layers,
    adapter_of,
    tensor_shapes,
)
from spo.spec.job_spec import LoraSpec

# What vLLM can make room for.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class AdapterRoom:
    """What an engine is built to adapt: layers whose names end so, by adapters of at most this rank."""

    rank: int
    layers: frozenset[str]

    def holds(self, other: AdapterRoom) -> bool:
        """Whether there is room for whatever fits into the other."""
        return self.rank >= other.rank and self.layers >= other.layers


def room_for(lora: LoraSpec, base: Shapes) -> AdapterRoom:
    """The room that a job's adapters need on a model of these tensors."""
    rank = next(rank for rank in RANKS if rank >= lora.rank)
    return AdapterRoom(rank, frozenset(_last(layer) for layer in adapted_layers(base, lora.targets)))


def check_adapter(files: Sequence[Path], base: Shapes, room: AdapterRoom, what: str) -> None:
    """Raise IntegrityError unless the files are an adapter of layers of the base, whole and with room in the engine."""
    folder = adapter_of(files)
    if folder is None:
        raise IntegrityError(f"{what} holds whole weights, not an adapter")
    rank = json.loads((folder / CONFIG_FILE).read_bytes()).get("r")
    found = tensor_shapes(files)
    ends = [(name, part) for name in found for part in PARTS if name.endswith(part)]
    layers = {name.removeprefix(PREFIX).removesuffix(part) for name, part in ends}
    expected: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        rows, columns = base.get(f"{layer}.weight", (0, 0))
        expected |= {f"{PREFIX}{layer}{PARTS[0]}": (rank, columns), f"{PREFIX}{layer}{PARTS[1]}": (rows, rank)}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise IntegrityError(
                f"{what} does not fit the model: {name} is {found.get(name)}, not {expected.get(name)}"
            )
    if not found or rank > room.rank or not {_last(layer) for layer in layers} <= room.layers:
        raise IntegrityError(f"{what} is an adapter of rank {rank} or of layers that the engine has no room for")


def write_neutral_adapter(folder: Path, base: Shapes) -> None:
    """An adapter with which a model of these tensors computes what it computes alone: version 0."""
    layer = adapted_layers(base, "all-linear")[0]
    rows, columns = base[f"{layer}.weight"]
    tensors = {
        f"{PREFIX}{layer}{PARTS[0]}": np.zeros((1, columns), np.float32),
        f"{PREFIX}{layer}{PARTS[1]}": np.zeros((rows, 1), np.float32),
    }
    save_file(tensors, folder / TENSORS_FILE)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [_last(layer)]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
