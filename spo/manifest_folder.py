"""Folders that are whole or absent: files written aside, a manifest of digests last, one atomic rename.

Weights and checkpoints are kept this way. A folder carries the epoch of the lease it was written under; only a newer
epoch may replace it, so a trainer that lost its lease cannot overwrite what its successor wrote (a fencing token).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from blake3 import blake3
from ulid import ULID

from spo.errors import Conflict, IntegrityError, NotFound

MANIFEST = "manifest.json"
ABANDONED_SECONDS = 3600.0
# Files hashed at once.
MOST_THREADS = 16

T = TypeVar("T")
U = TypeVar("U")


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it; one that is not there is removed. Raises OSError: what is left is no secret."""
    while folder.exists():
        # What somebody else removes meanwhile is no fault.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


class FileEntry(TypedDict):
    """A file of a folder: its name, the blake3 of its content in hex, its size."""

    name: str
    blake3: str
    size_bytes: int


Manifest = dict[str, Any]
"""The head that the writer gave, which holds an int `epoch`, and `files`, a list of FileEntry."""


@dataclass(frozen=True)
class ManifestFolder:
    """A verified folder; `manifest` is the head given when it was sealed plus `files`: {name, blake3, size_bytes}."""

    path: Path
    manifest: Manifest

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path / entry["name"] for entry in self.manifest["files"])

    @property
    def size_bytes(self) -> int:
        return sum(int(entry["size_bytes"]) for entry in self.manifest["files"])

    @property
    def manifest_digest(self) -> str:
        """blake3 hex of the manifest; it covers every file, since the manifest holds their digests."""
        return blake3(encode_manifest(self.manifest)).hexdigest()


@contextlib.contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """A hidden folder beside `destination` to write files into before `seal_folder`; gone when the block ends."""
    writing = destination.parent / f".writing-{destination.name}-{ULID()}"
    writing.mkdir(parents=True)
    try:
        yield writing
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def link_files(files: Iterable[Path], folder: Path) -> None:
    """Put files that nobody will change into another folder, without their bytes where the file system can."""
    for file in files:
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copy2(file, folder / file.name)


def seal_folder(writing: Path, destination: Path, head: Manifest) -> ManifestFolder:
    """Make everything in `writing` visible as `destination`, durably and at once; `head` must hold an int `epoch`.

    Idempotent: an equal folder already there is returned. Raises Conflict when another one, of this epoch or a newer
    one, is there.
    """
    manifest = {**head, "files": _beside(entry_of, sorted(writing.iterdir()))}
    (writing / MANIFEST).write_bytes(encode_manifest(manifest))
    for path in writing.iterdir():
        _fsync(path)
    _fsync(writing)
    epoch = int(manifest["epoch"])
    for _ in range(2):  # The second time after a replacement.
        if _renamed(writing, destination):
            return ManifestFolder(destination, manifest)
        existing = _intact(destination)
        if existing and existing.manifest == manifest:
            return existing
        # A damaged one is replaced by its own epoch too.
        if not remove_written_until(destination, epoch - 1 if existing else epoch):
            break
    raise Conflict(f"{destination} was already written by another owner", code="already_written")


def _renamed(writing: Path, destination: Path) -> bool:
    """Whether this writer won the name: rename refuses a folder that is there, so of two writers one succeeds."""
    try:
        os.rename(writing, destination)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    _fsync(destination.parent)
    return True


def _intact(path: Path) -> ManifestFolder | None:
    try:
        return open_folder(path)
    except (IntegrityError, NotFound):
        return None


def open_folder(path: Path) -> ManifestFolder:
    """Check every size and digest and return the folder.

    Raises NotFound when there is none and IntegrityError naming the file that is missing, truncated or altered.
    """
    if not path.is_dir():
        raise NotFound(f"there is no folder {path}")
    manifest = read_manifest(path / MANIFEST)
    _beside(lambda entry: verify(path / entry["name"], entry), manifest["files"])
    return ManifestFolder(path, manifest)


def remove_folder(path: Path) -> None:
    """Take a folder away in one step, so that no reader meets half of it."""
    shutil.rmtree(_taken_away(path), ignore_errors=True)


def remove_written_until(path: Path, epoch: int) -> bool:
    """Take a folder away unless a newer epoch wrote it; False when one did. One without manifest is nobody's.

    Judged again once it is away: a writer that was stopped in between may find its successor's folder under the name,
    which it puts back.
    """
    if _epoch_of(path) > epoch:
        return False
    hidden = _taken_away(path)
    if _epoch_of(hidden) > epoch:
        with contextlib.suppress(OSError):  # Somebody newer still has the name.
            os.rename(hidden, path)
            return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def _taken_away(path: Path) -> Path:
    hidden = path.parent / f".writing-removed-{ULID()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, hidden)
    return hidden


def _epoch_of(path: Path) -> int:
    with contextlib.suppress(IntegrityError, NotFound, ValueError, TypeError):
        return int(read_manifest(path / MANIFEST).get("epoch", 0))
    return -1


def numbered_folders(parent: Path) -> list[tuple[int, Path]]:
    """(number, folder) of the sealed folders in `parent` whose names are numbers, ascending; not verified."""
    if not parent.is_dir():
        return []
    return sorted((int(path.name), path) for path in parent.iterdir() if path.name.isdecimal() and path.is_dir())


def prune_folders(parent: Path, kept: Container[int], epoch: int) -> None:
    """Remove the numbered folders that are not kept, and what crashed writers left; a newer epoch's stay."""
    for number, path in numbered_folders(parent):
        if number not in kept:
            remove_written_until(path, epoch)
    remove_abandoned(parent)


def remove_abandoned(parent: Path) -> None:
    """Remove what crashed writers left behind."""
    for path in _abandoned(parent):
        shutil.rmtree(path, ignore_errors=True)


def _abandoned(parent: Path) -> Iterator[Path]:
    for path in parent.glob(".writing-*") if parent.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                yield path


def entry_of(path: Path) -> FileEntry:
    """A file as its manifest names it."""
    return {"name": path.name, "blake3": file_digest(path), "size_bytes": path.stat().st_size}


def verify(path: Path, entry: FileEntry, what: str = "") -> None:
    """Raise IntegrityError unless the file is the one its manifest's entry names; `what` it is for people."""
    what = what or str(path)
    if path.is_symlink() or not path.is_file():
        raise IntegrityError(f"{what} is missing")
    size = path.stat().st_size
    if size != entry["size_bytes"]:
        raise IntegrityError(f"{what} holds {size} bytes, its manifest says {entry['size_bytes']}")
    if file_digest(path) != entry["blake3"]:
        raise IntegrityError(f"{what} does not match the digest in its manifest")


def read_manifest(path: Path) -> Manifest:
    """Raises IntegrityError when it is missing or no manifest."""
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing") from None


def parse_manifest(content: bytes, what: str) -> Manifest:
    """The manifest in `content`. Raises IntegrityError, naming `what`, when it is none."""
    try:
        manifest = json.loads(content)
        for entry in manifest["files"]:
            check_entry(entry)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{what} is not a manifest: {error}") from None
    return dict(manifest)


def check_entry(entry: FileEntry) -> None:
    """Raise ValueError, KeyError or TypeError on an entry that is none, or that would lead out of its folder."""
    name, _, _ = entry["name"], str(entry["blake3"]), int(entry["size_bytes"])
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"unsafe file name {name!r}")


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest, and what its digest is of."""
    return json.dumps(manifest, sort_keys=True, indent=1).encode()


def _beside(call: Callable[[T], U], files: Sequence[T]) -> list[U]:
    """The call's answers in order, several files at once: one thread hashes 3 GB a second, a large model has hundreds.

    Raises what the first of them that fails raises.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(files))
    if threads <= 1:
        return [call(file) for file in files]
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return list(pool.map(call, files))


def file_digest(path: Path) -> str:
    """blake3 hex of a file. Raises OSError."""
    # Not mapped: where the disk fails, a read is an error and a mapped page the end of the process.
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
