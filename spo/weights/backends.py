"""Where published weight versions lie: what a place must offer, and a folder that all machines share.

<root>/<run>/<version:08d>/{manifest.json, *.safetensors}; the other place is a bucket (spo.weights.s3_backend).
Checkpoints lie likewise, by step, whose numbers have ten digits.
"""

from __future__ import annotations

import contextlib
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from spo.disk_space import remove_tree
from spo.errors import IntegrityError, NotFound
from spo.manifest_folder import (
    MANIFEST,
    FileEntry,
    Manifest,
    ManifestFolder,
    link_files,
    numbered_folders,
    open_folder,
    parse_manifest,
    remove_abandoned,
    remove_folder,
    seal_folder,
    staging_folder,
    verify,
)

CHECKPOINT_DIGITS = 10


class WeightBackend(Protocol):
    """Versions of all runs. Everything raises Unreachable when the place does not answer."""

    name: str

    def staging_dir(self, run_id: str, version: int) -> AbstractContextManager[Path] | None:
        """A folder to write a version in, gone when the block ends; None where any will do."""

    def seal(self, run_id: str, version: int, writing: Path, head: Manifest) -> ManifestFolder:
        """Make the files in `writing` the version, as `seal_folder` does. Raises Conflict."""

    def manifest(self, run_id: str, version: int) -> Manifest:
        """Raises NotFound, or IntegrityError when it is no manifest."""

    def in_place(self, run_id: str, version: int) -> ManifestFolder | None:
        """The verified files where they lie; None where they must be fetched. Raises IntegrityError."""

    def fetch(self, run_id: str, version: int, entry: FileEntry, destination: Path) -> None:
        """Bring one file here, verified, going on where an earlier try stopped. Raises IntegrityError."""

    def copy(self, run_id: str, version: int, into: str, head: Manifest) -> ManifestFolder:
        """The same files as another run's, without their bytes on the way where the place can.

        Raises NotFound, IntegrityError, Conflict.
        """

    def uri(self, run_id: str, version: int) -> str:
        """Where the version lies, for people."""

    def runs(self) -> list[str]:
        """Names of what may be a run's; empty where a place is not listed."""

    def versions(self, run_id: str) -> list[int]:
        """Ascending; not verified."""

    def remove(self, run_id: str, version: int) -> None:
        """At once for readers."""

    def tidy(self, run_id: str) -> None:
        """Remove what crashed writers left."""

    def remove_run(self, run_id: str) -> None:
        """All versions of a run."""


class FolderBackend:
    """A local or mounted folder."""

    def __init__(self, root: Path, digits: int = 8) -> None:
        self.root = root
        self._digits = digits
        self.name = str(root.absolute())

    def staging_dir(self, run_id: str, version: int) -> AbstractContextManager[Path] | None:
        return staging_folder(self._path(run_id, version))

    def seal(self, run_id: str, version: int, writing: Path, head: Manifest) -> ManifestFolder:
        return seal_folder(writing, self._path(run_id, version), head)

    def manifest(self, run_id: str, version: int) -> Manifest:
        path = self._path(run_id, version) / MANIFEST
        try:
            return parse_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            if path.parent.is_dir():
                raise IntegrityError(f"{path} is missing") from None
            raise NotFound(f"there is no folder {path.parent}") from None

    def in_place(self, run_id: str, version: int) -> ManifestFolder:
        return open_folder(self._path(run_id, version))

    def fetch(self, run_id: str, version: int, entry: FileEntry, destination: Path) -> None:
        source = self._path(run_id, version) / entry["name"]
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source, destination)
        verify(destination, entry, str(source))

    def copy(self, run_id: str, version: int, into: str, head: Manifest) -> ManifestFolder:
        source, destination = self.in_place(run_id, version), self._path(into, version)
        with staging_folder(destination) as writing:
            link_files(source.files, writing)
            return seal_folder(writing, destination, head)

    def uri(self, run_id: str, version: int) -> str:
        return str(self._path(run_id, version).absolute())

    def runs(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []

    def versions(self, run_id: str) -> list[int]:
        return [number for number, _ in numbered_folders(self.root / run_id)]

    def remove(self, run_id: str, version: int) -> None:
        remove_folder(self._path(run_id, version))

    def tidy(self, run_id: str) -> None:
        remove_abandoned(self.root / run_id)

    def remove_run(self, run_id: str) -> None:
        remove_tree(self.root / run_id)

    def _path(self, run_id: str, version: int) -> Path:
        return self.root / run_id / f"{version:0{self._digits}d}"
