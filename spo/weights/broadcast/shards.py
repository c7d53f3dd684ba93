"""The tensors of safetensors files in the order of their bytes, so that their digest is that of the files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from spo.errors import IntegrityError
from spo.manifest_folder import FileEntry

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(path: Path) -> bytes:
    """What stands in a file before its tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def layout(header: bytes) -> list[TensorLayout]:
    """The tensors of a file in the order of their bytes. Raises IntegrityError on dtypes that policies have not."""
    described = {name: found for name, found in json.loads(header[8:]).items() if name != "__metadata__"}
    in_order = sorted(described.items(), key=lambda item: item[1]["data_offsets"])
    try:
        return [TensorLayout(name, _DTYPES[found["dtype"]], tuple(found["shape"])) for name, found in in_order]
    except KeyError as error:
        raise IntegrityError(f"weights of dtype {error} are not broadcast") from None


def stored_tensors(path: Path, tensors: Sequence[TensorLayout]) -> Iterator[Tensor]:
    """The tensors of a file in their order, each mapped from the file when it is asked for."""
    with safe_open(path, framework="pt", device="cpu") as shard:
        for tensor in tensors:
            yield shard.get_tensor(tensor.name)


class DigestCheck:
    """Compares received tensors with the files they are said to be."""

    def __init__(self, entries: Sequence[FileEntry], headers: Sequence[bytes]) -> None:
        self._left = [
            (entry, header, [tensor.name for tensor in layout(header)])
            for entry, header in zip(entries, headers, strict=True)
        ]
        self._open: list[str] = []
        self._hasher = blake3()
        self._begin()

    def _begin(self) -> None:
        if self._left:
            _, header, names = self._left[0]
            self._open = list(names)
            self._hasher = blake3(header, max_threads=blake3.AUTO)

    def take(self, name: str, tensor: Tensor) -> None:
        """Count the next tensor in. Raises IntegrityError where its file turns out to be another."""
        if not self._open or self._open.pop(0) != name:
            raise IntegrityError(f"{name} was received where another tensor was expected")
        self._hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        if not self._open:
            entry, _, _ = self._left.pop(0)
            if self._hasher.hexdigest() != entry["blake3"]:
                raise IntegrityError(f"{entry['name']} was received with other bytes than are stored")
            self._begin()

    def finish(self) -> None:
        """Raise IntegrityError when something is missing."""
        if self._left:
            raise IntegrityError(f"{self._left[0][0]['name']} was not received whole")
