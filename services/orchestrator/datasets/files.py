"""The files of uploaded task sets: a part is appended to one that lies here, or in a bucket is an object of its own."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from ulid import ULID

from spo.disk_space import remove_tree, told_when_full
from spo.errors import IntegrityError
from spo.service.state_place import StateBucket, StatePlace

FOLDER = "datasets"
PART = "part-"
COPIED_AT_ONCE = 1 << 20


class DatasetFiles:
    """`datasets/<id>/tasks.*` in the state path; with a bucket it is a copy of the parts, made where one is needed."""

    def __init__(self, place: StatePlace, state_path: Path) -> None:
        self._bucket = place if isinstance(place, StateBucket) else None
        self.root = state_path / FOLDER
        self._fetching = threading.Lock()

    def begin(self, dataset_id: str) -> None:
        """Make room for a new one. Raises ResourceExhausted, OSError."""
        with told_when_full(self.root):
            (self.root / dataset_id).mkdir(parents=True)

    def new_part(self, dataset_id: str) -> Path:
        """Where to write a part on this machine."""
        if self._bucket:
            # Another machine may have begun the upload.
            (self.root / dataset_id).mkdir(parents=True, exist_ok=True)
        return self.root / dataset_id / f"{PART}{ULID()}"

    def append(self, file: Path, offset: int, part: Path) -> str:
        """Keep a part for good, and return the name of its object; "" where it is in the file."""
        if self._bucket:
            self._bucket.put(f"{FOLDER}/{file.parent.name}/{part.name}", part)
            return part.name
        with told_when_full(file.parent, part.stat().st_size):
            file.touch()
            _copy_to(file, offset, part)
        return ""

    def here(self, file: Path, size_bytes: int, digest: str, parts: Sequence[str]) -> Path:
        """The file on this machine, fetched if it must be; digest "" is not compared.

        Raises IntegrityError where parts are missing or others, Unreachable, ResourceExhausted.
        """
        # One that is here does not wait for others that are fetched.
        if not self._bucket or _is_whole(file, size_bytes):
            return file
        with self._fetching:
            if not _is_whole(file, size_bytes):
                with told_when_full(self.root, size_bytes):
                    self._fetch(self._bucket, file, size_bytes, digest, parts)
        return file

    def _fetch(self, bucket: StateBucket, file: Path, size_bytes: int, digest: str, parts: Sequence[str]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole, part = file.with_name(f".whole-{ULID()}"), file.with_name(f".fetched-{ULID()}")
        found = blake3()
        try:
            with whole.open("wb") as target:
                for name in parts:
                    bucket.fetch(f"{FOLDER}/{file.parent.name}/{name}", part)
                    found.update_mmap(part)
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, target, COPIED_AT_ONCE)
            if whole.stat().st_size != size_bytes or digest not in ("", found.hexdigest()):
                raise IntegrityError(f"the parts of {file.parent.name} in the bucket are not what was uploaded")
            whole.rename(file)
        except FileNotFoundError as error:
            raise IntegrityError(f"a part of {file.parent.name} is missing in the bucket: {error}") from None
        finally:
            whole.unlink(missing_ok=True)
            part.unlink(missing_ok=True)

    def remove(self, dataset_id: str) -> None:
        """All of one. Raises OSError, Unreachable."""
        remove_tree(self.root / dataset_id)
        if self._bucket:
            self._bucket.remove_folder(f"{FOLDER}/{dataset_id}")


def _is_whole(file: Path, size_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size == size_bytes


def _copy_to(file: Path, offset: int, part: Path) -> None:
    with file.open("r+b") as target, part.open("rb") as source:
        # A crash may have left bytes beyond those the record counts.
        target.truncate(offset)
        target.seek(offset)
        shutil.copyfileobj(source, target, COPIED_AT_ONCE)
        target.flush()
        os.fsync(target.fileno())
