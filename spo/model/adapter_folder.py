"""LoRA adapters as folders in peft's layout, and which layers of a model they change. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
# What peft puts before the names of a model's layers, and the ends of an adapter's tensors.
PREFIX = "base_model.model."
PARTS = (".lora_A.weight", ".lora_B.weight")

ALL_LINEAR: Literal["all-linear"] = "all-linear"
# The embedding, and the layer that makes logits: log-probs are computed without calling it.
NEVER_ADAPTED = frozenset({"lm_head", "embed_tokens", "embed_out", "wte", "wpe"})

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapter:
    """What a version holds in place of whole weights; base_model: hash of the model folder, config: peft's."""

    base_model: str
    config: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Put peft's configuration beside the tensors."""
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, sort_keys=True, indent=2))


def adapter_of(files: Iterable[Path]) -> Path | None:
    """The adapter's folder where these files of a version are one; None where they are whole weights."""
    return next((file.parent for file in files if file.name == CONFIG_FILE), None)


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in safetensors files; others are passed over."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix == ".safetensors":
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in read_header(file)[0].items()}
    return shapes


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file as its header describes them, and where their bytes begin."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def adapted_layers(shapes: Shapes, targets: str | Sequence[str]) -> list[str]:
    """The layers of a model that an adapter of these targets changes, by peft's rule for names."""
    matrices = [name.removesuffix(".weight") for name, shape in shapes.items() if is_matrix(name, shape)]
    if targets == ALL_LINEAR:
        return matrices
    return [layer for layer in matrices if any(f".{layer}".endswith(f".{target}") for target in targets)]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer that may be adapted."""
    layer = name.removesuffix(".weight")
    return layer != name and len(shape) == 2 and layer.rpartition(".")[2] not in NEVER_ADAPTED
