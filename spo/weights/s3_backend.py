"""Weight versions, and checkpoints by step, in a bucket of an S3-compatible object store; large files in parts that
can be resumed.

One large file in parts, several at a time, that goes on where an earlier try, or an earlier process, stopped.
Beside the file lies a journal of the parts that are there; both are gone or whole when the caller's digest has been
checked. One downloader per file: who calls holds a lock.

<prefix>/<run>/<version:08d>/{manifest.json, <digest>-*.safetensors}. A version is there once its manifest is. Objects
carry their digest in their name, so that no writer overwrites another's bytes; the manifest is put on condition, so
that of two writers one wins, and only a newer lease replaces what an older one wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import ObjectStore

from spo.errors import Conflict, IntegrityError, InvalidInput, NotFound, Unreachable
from spo.manifest_folder import (
    ABANDONED_SECONDS,
    MANIFEST,
    FileEntry,
    Manifest,
    ManifestFolder,
    encode_manifest,
    entry_of,
    parse_manifest,
    verify,
)
from spo.observability import get_logger

log = get_logger("download")

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
TRIES = 5
PAUSE_SECONDS = 0.5
_NUMBER_BYTES = 4

# (start, length) -> bytes
Read = Callable[[int, int], bytes]

# A call, retries included, may take this long; bytes travel in parts of a size that takes less.
RETRY_SECONDS = 60
# What a store copies by itself in one call; larger objects are read and written again.
MAX_COPY_BYTES = 5 << 30
# S3 takes 10,000 parts of at least 5 MiB.
MOST_PARTS = 8000
MIN_PART_BYTES = 5 << 20


def download(read: Read, size_bytes: int, destination: Path) -> None:
    """Fill `destination` by ranged reads; a part that fails is tried again, then its error is raised."""
    part, journal = destination.with_name(destination.name + ".part"), destination.with_name(destination.name + ".got")
    there = _numbers(journal) if part.is_file() and part.stat().st_size == size_bytes else set()
    missing = [number for number in range(-(-size_bytes // PART_BYTES)) if number not in there]
    if there:
        log.info("a download goes on", file=destination.name, parts=len(missing), of=len(missing) + len(there))
    else:
        journal.unlink(missing_ok=True)
    with part.open("r+b" if there else "w+b") as file, journal.open("ab", buffering=0) as got:
        file.truncate(size_bytes)

        def fetch(number: int) -> None:
            start = number * PART_BYTES
            content = _persistently(read, start, min(PART_BYTES, size_bytes - start))
            os.pwrite(file.fileno(), content, start)
            got.write(number.to_bytes(_NUMBER_BYTES, "little"))

        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            # Read to the end: a part's error is raised here, after the others have been tried.
            list(threads.map(fetch, missing))
    part.replace(destination)
    journal.unlink()


def _persistently(read: Read, start: int, length: int) -> bytes:
    for left in reversed(range(TRIES)):
        try:
            content = read(start, length)
            if len(content) == length:
                return content
            problem: Exception = IntegrityError(f"{len(content)} bytes at {start} instead of {length}")
        except NotFoundError:
            raise
        except (BaseError, OSError) as error:
            problem = error
        if not left:
            raise problem
        time.sleep(PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _numbers(journal: Path) -> set[int]:
    if not journal.is_file():
        return set()
    raw = journal.read_bytes()
    whole = len(raw) - len(raw) % _NUMBER_BYTES
    return {int.from_bytes(raw[at : at + _NUMBER_BYTES], "little") for at in range(0, whole, _NUMBER_BYTES)}


class S3Backend:
    """A bucket, or a part of one; credentials and endpoint come from the usual AWS_* variables."""

    def __init__(self, url: str, digits: int = 8) -> None:
        self.name = url.rstrip("/")
        self._digits = digits
        try:
            self._store: ObjectStore = obstore.store.from_url(
                self.name,
                client_options={"allow_http": True, "timeout": f"{RETRY_SECONDS}s", "connect_timeout": "10s"},
                retry_config={"max_retries": 5},
            )
        except (BaseError, ValueError) as error:
            raise InvalidInput(f"nothing can be kept at {self.name}: {error}", code="weight_store_url") from None

    def staging_dir(self, run_id: str, version: int) -> AbstractContextManager[Path] | None:
        return None

    def seal(self, run_id: str, version: int, writing: Path, head: Manifest) -> ManifestFolder:
        manifest = {**head, "files": [entry_of(path) for path in sorted(writing.iterdir())]}
        for entry in manifest["files"]:
            self.put_file(run_id, version, entry, writing / entry["name"])
        self.put_manifest(run_id, version, manifest)
        return ManifestFolder(writing, manifest)

    def put_file(self, run_id: str, version: int, entry: FileEntry, source: Path) -> None:
        """Store one file of a version to be; nobody sees it before the manifest."""
        with self._reaching():
            obstore.put(self._store, self._object(run_id, version, entry), source, chunk_size=_part_bytes(entry))

    def holds(self, run_id: str, version: int, entry: FileEntry) -> bool:
        """Whether a file is there: objects appear when they are whole."""
        try:
            with self._reaching():
                held = obstore.head(self._store, self._object(run_id, version, entry))
        except FileNotFoundError:
            return False
        return int(held["size"]) == entry["size_bytes"]

    def copy(self, run_id: str, version: int, into: str, head: Manifest) -> ManifestFolder:
        manifest = {**head, "files": self.manifest(run_id, version)["files"]}
        for entry in manifest["files"]:
            if not self.holds(run_id, version, entry):
                raise IntegrityError(f"{self.uri(run_id, version)}/{entry['name']} is missing or not whole")
            self._copy(entry, self._object(run_id, version, entry), self._object(into, version, entry))
        self.put_manifest(into, version, manifest)
        return ManifestFolder(Path(), manifest)

    def _copy(self, entry: FileEntry, source: str, destination: str) -> None:
        with self._reaching():
            if entry["size_bytes"] <= MAX_COPY_BYTES:
                obstore.copy(self._store, source, destination)
            else:
                asyncio.run(self._pipe(source, destination, _part_bytes(entry)))

    async def _pipe(self, source: str, destination: str, part_bytes: int) -> None:
        content = await obstore.get_async(self._store, source)
        await obstore.put_async(self._store, destination, content.stream(), chunk_size=part_bytes)

    def put_manifest(self, run_id: str, version: int, manifest: Manifest) -> None:
        """Make a version of files that are there. Raises Conflict unless it is of a newer epoch than what is there."""
        with self._reaching():
            self._put_manifest(run_id, version, manifest)

    def _put_manifest(self, run_id: str, version: int, manifest: Manifest) -> None:
        path, content = self._manifest(run_id, version), encode_manifest(manifest)
        try:
            obstore.put(self._store, path, content, mode="create")
            return
        except (AlreadyExistsError, PreconditionError):
            found = obstore.get(self._store, path)
            e_tag, before = found.meta["e_tag"], bytes(found.bytes())
        if before == content:
            return
        with contextlib.suppress(IntegrityError, PreconditionError):
            if _epoch(before) < manifest["epoch"]:
                obstore.put(self._store, path, content, mode={"e_tag": e_tag})
                return
        raise Conflict(f"{self.uri(run_id, version)} was already written by another owner", code="already_written")

    def manifest(self, run_id: str, version: int) -> Manifest:
        path = self._manifest(run_id, version)
        try:
            with self._reaching():
                return parse_manifest(bytes(obstore.get(self._store, path).bytes()), f"{self.name}/{path}")
        except FileNotFoundError:
            raise NotFound(f"there is no {self.uri(run_id, version)}") from None

    def in_place(self, run_id: str, version: int) -> ManifestFolder | None:
        return None

    def fetch(self, run_id: str, version: int, entry: FileEntry, destination: Path) -> None:
        path = self._object(run_id, version, entry)
        what = f"{self.name}/{path}"
        try:
            with self._reaching():
                held = int(obstore.head(self._store, path)["size"])
                if held != entry["size_bytes"]:
                    raise IntegrityError(f"{what} holds {held} bytes, its manifest says {entry['size_bytes']}")
                download(
                    lambda start, length: bytes(obstore.get_range(self._store, path, start=start, length=length)),
                    held,
                    destination,
                )
        except FileNotFoundError:
            raise IntegrityError(f"{what} is missing") from None
        try:
            verify(destination, entry, what)
        except IntegrityError:
            # The next attempt then fetches every byte again.
            destination.unlink()
            raise

    def uri(self, run_id: str, version: int) -> str:
        return f"{self.name}/{self._folder(run_id, version)}"

    def runs(self) -> list[str]:
        # A platform has its bucket, or its part of one, to itself (`spo.service.state.BucketLock`).
        with self._reaching():
            return sorted(path.rstrip("/") for path in obstore.list_with_delimiter(self._store)["common_prefixes"])

    def versions(self, run_id: str) -> list[int]:
        return sorted({int(path.split("/")[1]) for path, _ in self._objects(run_id) if path.endswith(f"/{MANIFEST}")})

    def remove(self, run_id: str, version: int) -> None:
        with self._reaching(), contextlib.suppress(FileNotFoundError):
            # First: without it the version is gone.
            obstore.delete(self._store, self._manifest(run_id, version))
        self._delete([path for path, _ in self._objects(self._folder(run_id, version))])

    def tidy(self, run_id: str) -> None:
        objects, now = self._objects(run_id), datetime.now(UTC)
        whole = {path.split("/")[1] for path, _ in objects if path.endswith(f"/{MANIFEST}")}
        self._delete(
            [
                path
                for path, written in objects
                if path.split("/")[1] not in whole and (now - written).total_seconds() > ABANDONED_SECONDS
            ]
        )

    def remove_run(self, run_id: str) -> None:
        for version in self.versions(run_id):
            self.remove(run_id, version)
        self._delete([path for path, _ in self._objects(run_id)])

    def _folder(self, run_id: str, version: int) -> str:
        return f"{run_id}/{version:0{self._digits}d}"

    def _object(self, run_id: str, version: int, entry: FileEntry) -> str:
        return f"{self._folder(run_id, version)}/{entry['blake3'][:16]}-{entry['name']}"

    def _manifest(self, run_id: str, version: int) -> str:
        return f"{self._folder(run_id, version)}/{MANIFEST}"

    def _objects(self, prefix: str) -> list[tuple[str, datetime]]:
        """(path, time of writing) of what lies below a folder of numbered versions."""
        with self._reaching():
            found = [entry for page in obstore.list(self._store, prefix=f"{prefix}/") for entry in page]
        parts = [(entry["path"], entry["last_modified"]) for entry in found]
        return [(path, at) for path, at in parts if path.count("/") == 2 and path.split("/")[1].isdecimal()]

    def _delete(self, paths: list[str]) -> None:
        with self._reaching():
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from None
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise Unreachable(f"the store {self.name} does not answer: {str(error)[:500]}") from None


def _part_bytes(entry: FileEntry) -> int:
    """An object travels in at most MOST_PARTS parts, of which each is in memory a few times."""
    return max(MIN_PART_BYTES, -(-entry["size_bytes"] // MOST_PARTS))


def _epoch(manifest: bytes) -> int:
    """-1 for what is no manifest: anybody may replace that."""
    try:
        return int(json.loads(manifest).get("epoch", 0))
    except (ValueError, AttributeError, TypeError):
        return -1
