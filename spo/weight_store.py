"""Versioned policy weights on a shared folder: `<root>/<run_id>/<version:08d>/` with safetensors shards and a manifest.

Version 0 is the reference model itself and is never here. A version is whole or absent, and verified when opened.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spo.errors import IntegrityError, InvalidInput, NotFound
from spo.sealed_folder import (
    SealedFolder,
    folder_aside,
    link_files,
    numbered_folders,
    open_folder,
    prune_folders,
    seal_folder,
)

if TYPE_CHECKING:
    from torch import Tensor

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\.safetensors")


@dataclass(frozen=True)
class WeightVersion:
    """One verified version; `manifest` has version, parent, step, dtype, epoch and files {name, blake3, size_bytes}."""

    path: Path
    manifest: dict[str, Any]
    files: tuple[Path, ...]
    manifest_digest: str
    size_bytes: int


@dataclass(frozen=True)
class WeightStore:
    """All runs' weights below `root` (a local or mounted folder)."""

    root: Path

    def write(
        self,
        run_id: str,
        version: int,
        *,
        parent: int,
        step: int,
        dtype: str,
        shards: Iterable[tuple[str, Mapping[str, Tensor]]],
        epoch: int = 0,
    ) -> WeightVersion:
        """Store a version; shards are (file name ending in .safetensors, contiguous CPU tensors by parameter name).

        Idempotent for equal content. Raises Conflict when a different version is there, written under this lease epoch
        or a newer one, and InvalidInput on unsafe names. A crash leaves nothing visible.
        """
        # Imported here: the orchestrator lists and prunes versions without torch.
        from safetensors.torch import save_file

        destination = self.path_of(run_id, version)
        head = {"version": version, "parent": parent, "step": step, "dtype": dtype, "epoch": epoch}
        with folder_aside(destination) as writing:
            for name, tensors in shards:
                if not _SHARD_NAME.fullmatch(name):
                    raise InvalidInput(f"{name!r} is no name for a weight shard")
                save_file(dict(tensors), writing / name)
            return _weight_version(seal_folder(writing, destination, head))

    def adopt(self, run_id: str, version: int, source: WeightVersion, *, parent: int, step: int) -> WeightVersion:
        """Store another run's verified version as one of this run; it lives on when the other is removed."""
        destination = self.path_of(run_id, version)
        dtype = source.manifest.get("dtype", "")
        head = {"version": version, "parent": parent, "step": step, "dtype": dtype, "epoch": 0}
        with folder_aside(destination) as writing:
            link_files(source.files, writing)
            return _weight_version(seal_folder(writing, destination, head))

    def open(self, run_id: str, version: int) -> WeightVersion:
        """Verify and return a version. Raises NotFound, or IntegrityError naming the damaged file."""
        path = self.path_of(run_id, version)
        if not path.is_dir():
            raise NotFound(f"run {run_id} has no weight version {version} in {self.root}")
        folder = open_folder(path)
        if folder.manifest.get("version") != version:
            raise IntegrityError(f"{path} holds version {folder.manifest.get('version')}, not {version}")
        return _weight_version(folder)

    def versions(self, run_id: str) -> list[int]:
        """The stored versions, ascending; not verified."""
        return [number for number, _ in numbered_folders(self._run_path(run_id))]

    def prune(self, run_id: str, keep: int, spare: Container[int] = ()) -> None:
        """Remove all but the newest `keep` versions and those in `spare`."""
        prune_folders(self._run_path(run_id), keep, spare)

    def path_of(self, run_id: str, version: int) -> Path:
        """The folder of a version, there or not. Raises InvalidInput on a run id that is no plain name."""
        if version < 1:
            raise InvalidInput(f"weight versions count from 1, not {version}; 0 is the reference model itself")
        return self._run_path(run_id) / f"{version:08d}"

    def _run_path(self, run_id: str) -> Path:
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidInput(f"{run_id!r} is no run id")
        return self.root / run_id


def _weight_version(folder: SealedFolder) -> WeightVersion:
    return WeightVersion(folder.path, folder.manifest, folder.files, folder.manifest_digest, folder.size_bytes)
