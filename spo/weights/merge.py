"""An adapter merged into the weights that it adapts, W + alpha / rank * B A, tensor by tensor; without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spo.errors import IntegrityError, InvalidInput
from spo.model.adapter_folder import CONFIG_FILE, PARTS, PREFIX, TENSORS_FILE, read_header

_KINDS = {"float32": "F32", "bfloat16": "BF16"}
_WORDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Tensors:
    """A safetensors file, its tensors read one at a time."""

    file: Path
    header: dict[str, Any]
    begin: int

    def read(self, name: str) -> Floats:
        """A tensor of floats of any width. Raises InvalidInput on another kind."""
        described = self.header[name]
        words = _WORDS.get(described["dtype"])
        if words is None:
            raise InvalidInput(f"{name} is {described['dtype']}: only unquantised weights can be merged")
        first, end = described["data_offsets"]
        raw = np.fromfile(self.file, words, (end - first) // words.itemsize, offset=self.begin + first)
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if described["dtype"] == "BF16" else raw
        found: Floats = wide.astype(np.float32, copy=False).reshape(described["shape"])
        return found


def merge_adapter(base: Path, adapter: Path, dtype: str, destination: Path) -> None:
    """Write a safetensors file of a model with the adapter in it, every tensor in `dtype`, rounded to the nearest.

    base: one file of the model, which may hold a part of it. adapter: a folder in peft's layout. Raises IntegrityError
    when the adapter is of other shapes.
    """
    model, changes = _opened(base), _opened(adapter / TENSORS_FILE)
    config = json.loads((adapter / CONFIG_FILE).read_bytes())
    scale = np.float32(config["lora_alpha"] / config["r"])
    kind = _KINDS[dtype]
    with destination.open("wb") as stream:
        stream.write(_header(model.header, kind))
        for name in model.header:
            weights = model.read(name)
            delta = _delta(name, changes)
            if delta is not None and delta.shape != weights.shape:
                raise IntegrityError(f"{adapter} adapts {name} as {delta.shape}, and the model has {weights.shape}")
            merged = weights if delta is None else weights + scale * delta
            stream.write((_rounded(merged) if kind == "BF16" else merged).tobytes())


def _opened(file: Path) -> _Tensors:
    return _Tensors(file, *read_header(file))


def _delta(name: str, changes: _Tensors) -> Floats | None:
    down, up = (f"{PREFIX}{name.removesuffix('.weight')}{part}" for part in PARTS)
    return changes.read(up) @ changes.read(down) if down in changes.header else None


def _rounded(values: Floats) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _header(tensors: dict[str, Any], kind: str) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = _WORDS[kind].itemsize * int(np.prod(tensor["shape"], dtype=np.int64))
        described[name] = {"dtype": kind, "shape": tensor["shape"], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
