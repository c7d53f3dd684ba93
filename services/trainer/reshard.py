"""Training state for another number of ranks: each new rank reads only its own stretch of what the old ranks wrote.

ZeRO lays parameters out as segments and cuts every segment into equal parts, one per rank, with padding in the last. A
segment is a whole parameter group at stages 1 and 2, and one parameter at stage 3. At stage 0 every rank holds all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spo.errors import IntegrityError

_KINDS = ("master", "exp_avg", "exp_avg_sq")
_STEP = "step"


def reshard_state(
    paths: Sequence[Path],
    prefix: str,
    wanted: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    segments: Sequence[int] | None,
) -> dict[str, Tensor]:
    """This rank's state tensors, from the files of all ranks that wrote the checkpoint, in rank order.

    wanted: what this rank holds now, under the same names. segments: values per parameter at stage 3; None at stages 1
    and 2, where whole groups are cut; empty at stage 0. Raises IntegrityError on another model's state.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        names = {name.removeprefix(prefix) for name in files[0].keys() if name.startswith(prefix)}  # noqa: SIM118
        if segments is not None and not segments:
            return {name: files[0].get_tensor(prefix + name) for name in names if not name.startswith("random")}
        masters = [wanted[f"master.{index}"].numel() for index in range(_count(wanted, "master"))]
        found: dict[str, Tensor] = {}
        for kind in (kind for kind in _KINDS if f"{kind}.0" in names):
            old = _Written(files, prefix + kind, _count(names, kind))
            cuts = _cuts(old, masters, segments, world_size)
            flat = torch.cat([old.stretch(at, size, part, rank) for at, size, part in cuts])
            if flat.numel() != sum(masters):
                raise IntegrityError("the checkpoint holds other parameters than the model")
            found |= {f"{kind}.{index}": part for index, part in enumerate(torch.split(flat, masters))}
        if f"{_STEP}.0" in names:
            step = files[0].get_tensor(f"{prefix}{_STEP}.0")
            found |= {f"{_STEP}.{index}": step.clone() for index in range(len(masters))}
        return found


class _Written:
    """One kind of state of all old ranks; a rank's tensors count as one row, whatever groups they were stored in."""

    def __init__(self, files: Sequence[Any], prefix: str, count: int) -> None:
        self.files = files
        self.names = [f"{prefix}.{index}" for index in range(count)]
        self.sizes = [int(files[0].get_slice(name).get_shape()[0]) for name in self.names]

    def stretch(self, at: int, size: int, part: int, rank: int) -> Tensor:
        """The `part` values of new rank `rank` in a segment whose old parts of `size` begin at `at` in every row."""
        found = torch.zeros(part)
        start, stop = rank * part, min((rank + 1) * part, size * len(self.files))
        for old in range(len(self.files)):
            first, last = max(start, old * size), min(stop, (old + 1) * size)
            if first < last:
                row = self._row(old, at + first - old * size, at + last - old * size)
                found[first - start : last - start] = row
        return found

    def _row(self, rank: int, start: int, stop: int) -> Tensor:
        parts, begins = [], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            first, last = max(start, begins) - begins, min(stop, begins + size) - begins
            if first < last:
                parts.append(self.files[rank].get_slice(name)[first:last])
            begins += size
        return torch.cat(parts)


def _cuts(
    old: _Written, masters: Sequence[int], segments: Sequence[int] | None, world_size: int
) -> list[tuple[int, int, int]]:
    """(offset in an old rank's row, size of an old part, size of a new part) of every segment."""
    ranks = len(old.files)
    if segments is None:
        if len(masters) != len(old.sizes):
            raise IntegrityError("the checkpoint holds other parameter groups than the model")
        sizes = list(zip(old.sizes, masters, strict=True))
    else:
        sizes = [(-(-values // ranks), -(-values // world_size)) for values in segments]
    cuts, at = [], 0
    for size, part in sizes:
        cuts.append((at, size, part))
        at += size
    if at != sum(old.sizes):
        raise IntegrityError("the checkpoint holds other parameters than the model")
    return cuts


def _count(names: Iterable[str], kind: str) -> int:
    return sum(name.rpartition(".")[0] == kind for name in names)
