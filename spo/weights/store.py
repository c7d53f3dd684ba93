"""Versioned policy weights: whole or absent, put together from anchors and deltas, verified when opened; the folder
they lie in, and a machine's cache.

Where published weight versions lie: what a place must offer, and a folder that all machines share.
<root>/<run>/<version:08d>/{manifest.json, *.safetensors}; the other place is a bucket (spo.weights.s3_backend).
Checkpoints lie likewise, by step, whose numbers have ten digits.

Whole weight versions on this machine: one download for all its replicas, in memory (/dev/shm) where they fit.
    <root>/<store>/<run>/<version:08d>-<manifest digest>/*.safetensors

A folder is there once it is whole. Whoever uses one holds a shared lock on it, which ends with its process: only what
nobody holds is removed. Another lock makes one process of the machine fetch a version while the others wait for it.

Version 0 is the reference model itself and is never here. A version is stored whole (an anchor) or as what changed
since the one before (a delta); whoever opens it gets whole files either way, whose digests the manifest holds. What
does not lie in a folder of this machine is put together in its cache (spo.weights.store).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spo import redis_keys
from spo.errors import IntegrityError, InvalidInput, NotFound, NotReady, storage_faults_named
from spo.manifest_folder import (
    MANIFEST,
    FileEntry,
    Manifest,
    ManifestFolder,
    check_entry,
    entry_of,
    link_files,
    numbered_folders,
    open_folder,
    parse_manifest,
    remove_abandoned,
    remove_folder,
    remove_tree,
    seal_folder,
    staging_folder,
    verify,
)
from spo.model.folder import Adapter
from spo.observability import get_logger

if TYPE_CHECKING:
    from torch import Tensor


POLL_SECONDS = 0.05

CHECKPOINT_DIGITS = 10

SHARED_MEMORY = Path("/dev/shm")
# Room for this many copies must be free in shared memory: the one served, the next one, and some for everybody else.
COPIES = 3
KEPT = 2
FETCH_SECONDS = 1800.0
FORGOTTEN_SECONDS = 6 * 3600.0

DELTA_NAME = "delta-"

log = get_logger("weights")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\.safetensors")
# A delta that saves less than this is not worth a chain.
WORTHWHILE_SHARE = 0.9


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Holds the lock of a file, which is made. Raises NotReady where another process has held it for `seconds`."""
    deadline = time.monotonic() + seconds
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NotReady(f"another process has held {path} for {seconds:g} s") from None
                time.sleep(POLL_SECONDS)
        yield


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


class Pin:
    """A folder in use: it stays while this object lives."""

    def __init__(self, descriptor: int) -> None:
        self._release = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        self._release()


@dataclass(frozen=True)
class Cached:
    """Whole files in use; those of a shared folder are held by nobody."""

    path: Path
    hold: Pin | None


class WeightCache:
    """One store's versions on this machine; `root` "" takes shared memory or, for what does not fit, TMPDIR."""

    def __init__(self, root: str, store: str) -> None:
        named = f"spo-weights-{os.getuid()}"
        roots = [Path(root)] if root else [base / named for base in (SHARED_MEMORY, Path(tempfile.gettempdir()))]
        usable = roots if root else [base for base in roots if _is_ours(base)]
        self._roots = [base / redis_keys.digest(store)[:16] for base in usable]

    def find(self, run_id: str, version: int, digest: str) -> Cached | None:
        """The version with this manifest digest, if it is here; not verified."""
        for root in self._roots:
            path = root / run_id / _name(version, digest)
            hold = _held(path, fcntl.LOCK_SH)
            if hold:
                return Cached(path, hold)
        return None

    @contextlib.contextmanager
    def stage(self, run_id: str, name: str, size_bytes: int) -> Iterator[Path]:
        """A folder of that name to put a version together in, kept when the block raises so that a retry goes on there.

        One process at a time has it. Raises NotReady when another had it for FETCH_SECONDS, ResourceExhausted.
        """
        with storage_faults_named(self._roots[0], size_bytes):
            parent = self._root_for(size_bytes) / run_id
        with storage_faults_named(parent, size_bytes), self._alone(run_id, name):
            path = parent / f".stage-{name}"
            path.mkdir(parents=True, exist_ok=True)
            yield path
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, staged: Path, run_id: str, version: int, digest: str) -> Cached:
        """Make a folder in a stage the cached version, and forget those before that nobody uses."""
        path = staged.parent.parent / _name(version, digest)
        with contextlib.suppress(OSError):  # It is there already.
            os.rename(staged, path)
        cached = self.find(run_id, version, digest)
        if cached is None:
            raise NotReady(f"the cached weights at {path} were removed by somebody else", code="cache_lost")
        os.utime(path)
        self._prune(run_id)
        return cached

    def drop(self, cached: Cached) -> None:
        """Remove a version that turned out to be damaged."""
        remove_folder(cached.path)

    def _root_for(self, size_bytes: int) -> Path:
        first = self._roots[0]
        first.mkdir(parents=True, exist_ok=True, mode=0o700)
        roomy = len(self._roots) == 1 or shutil.disk_usage(first).free >= COPIES * size_bytes
        return first if roomy else self._roots[1]

    @contextlib.contextmanager
    def _alone(self, run_id: str, name: str) -> Iterator[None]:
        folder = self._roots[0] / run_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder / f".lock-{name}", FETCH_SECONDS):
            yield

    def _prune(self, run_id: str) -> None:
        for root in self._roots:
            for run in root.glob("*"):
                versions = sorted(path for path in run.glob("[0-9]*") if path.is_dir())
                forgotten = [path for path in versions if _age_seconds(path) > FORGOTTEN_SECONDS]
                for path in versions[:-KEPT] if run.name == run_id else forgotten:
                    hold = _held(path, fcntl.LOCK_EX)
                    if hold:
                        remove_folder(path)
                        hold.release()
                for lock in run.glob(".*"):
                    if _age_seconds(lock) > FORGOTTEN_SECONDS:
                        shutil.rmtree(lock, ignore_errors=True) if lock.is_dir() else lock.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put anything there: both parents are open to all users of the machine."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        return False


def _name(version: int, digest: str) -> str:
    return f"{version:08d}-{digest[:32]}"


def _held(path: Path, kind: int) -> Pin | None:
    """A lock on a folder that is still there; None when it is not, or is in use and wanted alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    hold = Pin(descriptor)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        # Between the two it may have been removed.
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return hold
    except (BlockingIOError, FileNotFoundError):
        pass
    hold.release()
    return None


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def whole_entries(manifest: Manifest) -> list[FileEntry]:
    """The whole files of a version, however it is stored. Raises IntegrityError."""
    try:
        entries: list[FileEntry] = manifest["delta"]["files"] if "delta" in manifest else manifest["files"]
        for entry in entries:
            check_entry(entry)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"version {manifest.get('version')} is not described: {error}") from None
    return entries


def digest_of(manifest: Manifest) -> str:
    """The digest that names a stored version."""
    return ManifestFolder(Path(), manifest).manifest_digest


def emptied(folder: Path) -> Path:
    """The folder, with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def whole_here(backend: WeightBackend, cache: WeightCache, run_id: str, manifest: Manifest) -> Cached | None:
    """A version's whole files if this machine has them, not verified: users check the digests of what they make."""
    if "delta" not in manifest and isinstance(backend, FolderBackend):
        return Cached(Path(backend.uri(run_id, int(manifest["version"]))), None)
    return cache.find(run_id, int(manifest["version"]), digest_of(manifest))


def assemble(backend: WeightBackend, cache: WeightCache, run_id: str, manifest: Manifest, stage: Path) -> Path:
    """Walk back to a version that is here, or to the anchor, and forth again over the deltas; verified.

    What was fetched stays in `stage` when this is interrupted. Raises IntegrityError, NotFound, Unreachable.
    """
    deltas: list[Manifest] = []
    at, base = manifest, None
    while "delta" in at and base is None:
        deltas.append(at)
        delta = at["delta"]
        at = backend.manifest(run_id, int(delta["base"]))
        if digest_of(at) != delta["base_digest"]:
            raise IntegrityError(f"version {delta['base']} of run {run_id} is not the base of its delta any more")
        base = whole_here(backend, cache, run_id, at)
    fetched, whole = stage / "fetched", emptied(stage / "whole")
    fetched.mkdir(exist_ok=True)
    try:
        for entry in whole_entries(at):
            if base:
                shutil.copyfile(base.path / entry["name"], whole / entry["name"])
            else:
                _fetch(backend, run_id, at, entry, fetched).rename(whole / entry["name"])
        for delta in reversed(deltas):
            _apply(backend, run_id, delta, fetched, whole)
        for entry in whole_entries(manifest):
            verify(whole / entry["name"], entry, f"{backend.uri(run_id, int(manifest['version']))}/{entry['name']}")
    except IntegrityError:
        # The next attempt then fetches every byte again.
        shutil.rmtree(fetched)
        raise
    return whole


def _apply(backend: WeightBackend, run_id: str, manifest: Manifest, fetched: Path, whole: Path) -> None:
    from spo.weights.delta import apply_delta

    for entry in manifest["files"]:
        target = whole / entry["name"].removeprefix(DELTA_NAME)
        if not target.is_file():
            raise IntegrityError(f"version {manifest['version']} of run {run_id} changes a file that its base lacks")
        apply_delta(target, _fetch(backend, run_id, manifest, entry, fetched))


def _fetch(backend: WeightBackend, run_id: str, manifest: Manifest, entry: FileEntry, folder: Path) -> Path:
    path = folder / f"{entry['blake3'][:32]}-{entry['name']}"
    if not path.is_file():
        backend.fetch(run_id, int(manifest["version"]), entry, path)
    return path


@dataclass(frozen=True)
class StoredVersion:
    """One verified version; `manifest` has version, parent, step, dtype, epoch and files {name, blake3, size_bytes}.

    Where `base_model` is given it is an adapter of the model folder with this hash, as a folder that peft loads.
    size_bytes: of the whole files; stored_bytes: of what the store holds for it. The files stay while `hold` lives.
    """

    path: Path
    manifest: Manifest
    files: tuple[Path, ...]
    manifest_digest: str
    size_bytes: int
    stored_bytes: int
    uri: str
    hold: Pin | None = field(default=None, repr=False, compare=False)

    @property
    def base_model(self) -> str:
        """Hash of the model that this is an adapter of; empty for whole weights."""
        return str(self.manifest.get("base_model", ""))


class WeightStore:
    """All runs' weights below `place`, a folder or a URL such as s3://bucket/weights.

    anchor_interval: every so many versions one is stored whole, the others as deltas; 1: all whole. cache_path: where
    this machine keeps whole versions; default: shared memory where they fit, else TMPDIR.
    """

    def __init__(self, place: str | Path, *, cache_path: str = "", anchor_interval: int = 1) -> None:
        self.backend: WeightBackend = backend_at(place)
        self.anchor_interval = anchor_interval
        self._cache = WeightCache(cache_path, self.backend.name)
        # Manifests change only when their version is written again: each is read once for pruning, not at every push.
        self._base_of: dict[tuple[str, int], int] = {}

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
        size_bytes: int = 0,
        adapter: Adapter | None = None,
    ) -> StoredVersion:
        """Store a version; shards are (file name ending in .safetensors, contiguous CPU tensors by parameter name).

        size_bytes: about how large it will be. adapter: what the tensors adapt; being small, it is stored whole.
        Idempotent for equal content. Raises Conflict when a different version is there, written under this lease epoch
        or a newer one, InvalidInput on unsafe names, and Unreachable; ResourceExhausted where no space is left, and
        StorageUnavailable where the place cannot be used now. A crash leaves nothing visible.
        """
        head: Manifest = {"version": version, "parent": parent, "step": step, "dtype": dtype, "epoch": epoch}
        if adapter:
            head["base_model"] = adapter.base_model
        return self.write_files(run_id, head, partial(_save, shards, adapter=adapter), size_bytes)

    def write_files(
        self, run_id: str, head: Manifest, write_into: Callable[[Path], None], size_bytes: int = 0
    ) -> StoredVersion:
        """As `write`, of the files that write_into puts into a folder; other processes may have a part in that.

        head: version, parent, step, dtype, epoch, and of an adapter base_model.
        """
        version, epoch = int(head["version"]), int(head["epoch"])
        _check(run_id, version)
        with storage_faults_named(self.backend.name, size_bytes):
            self._base_of.pop((run_id, version), None)
            staging_dir = self.backend.staging_dir(run_id, version)
            if staging_dir is not None and (self.anchor_interval == 1 or "base_model" in head):
                with staging_dir as writing:
                    write_into(writing)
                    return self._version(run_id, self.backend.seal(run_id, version, writing, head))
            with self._cache.stage(run_id, f"{version:08d}-written-{epoch}", size_bytes) as stage:
                whole = emptied(stage / "whole")
                write_into(whole)
                manifest = self._seal(run_id, head, whole, emptied(stage / "delta"))
                # Into the cache: the next delta's base, and what replicas of this machine need not fetch.
                sealed = ManifestFolder(whole, manifest)
                cached = self._cache.keep(whole, run_id, version, sealed.manifest_digest)
            return self._version(run_id, sealed, cached)

    def _seal(self, run_id: str, head: Manifest, whole: Path, delta: Path) -> Manifest:
        """Store a delta where there is a base for one and it is small, else the whole; returns the manifest."""
        version = head["version"]
        based = {} if "base_model" in head else self._write_delta(run_id, head["parent"], whole, delta)
        source = delta if based else whole
        staging_dir = self.backend.staging_dir(run_id, version)
        with (
            storage_faults_named(self.backend.name, _bytes_in(source)),
            staging_dir or contextlib.nullcontext(source) as writing,
        ):
            if staging_dir:
                shutil.copytree(source, writing, dirs_exist_ok=True)
            return self.backend.seal(run_id, version, writing, head | based).manifest

    def _write_delta(self, run_id: str, parent: int, whole: Path, delta: Path) -> Manifest:
        """What the manifest says of a delta, whose files are written; empty when the version is to be stored whole."""
        from spo.weights.delta import write_delta

        if parent < 1:
            return {}
        try:
            before = self.backend.manifest(run_id, parent)
        except (NotFound, IntegrityError):
            return {}
        depth = before.get("delta", {}).get("depth", 0) + 1
        base = whole_here(self.backend, self._cache, run_id, before) if depth < self.anchor_interval else None
        if base is None:
            return {}
        for path in sorted(whole.iterdir()):
            older = base.path / path.name
            if not (older.is_file() and write_delta(older, path, delta / f"{DELTA_NAME}{path.name}")):
                return {}
        if _bytes_in(delta) > WORTHWHILE_SHARE * _bytes_in(whole):
            return {}
        facts = {"base": parent, "base_digest": digest_of(before), "depth": depth}
        return {"delta": {**facts, "files": [entry_of(path) for path in sorted(whole.iterdir())]}}

    def adopt(self, run_id: str, version: int, source: StoredVersion, *, parent: int, step: int) -> StoredVersion:
        """Store another run's verified version as one of this run; it lives on when the other is removed."""
        _check(run_id, version)
        with storage_faults_named(self.backend.name, source.size_bytes):
            dtype = source.manifest.get("dtype", "")
            head = {"version": version, "parent": parent, "step": step, "dtype": dtype, "epoch": 0}
            if source.base_model:
                head["base_model"] = source.base_model
            staging_dir = self.backend.staging_dir(run_id, version)
            if staging_dir is not None:
                with staging_dir as writing:
                    link_files(source.files, writing)
                    return self._version(run_id, self.backend.seal(run_id, version, writing, head))
            with self._cache.stage(run_id, f"{version:08d}-adopted", source.size_bytes) as stage:
                whole = emptied(stage / "whole")
                link_files(source.files, whole)
                sealed = self.backend.seal(run_id, version, whole, head)
                return self._version(run_id, sealed, self._cache.keep(whole, run_id, version, sealed.manifest_digest))

    def open(self, run_id: str, version: int) -> StoredVersion:
        """Verify and return a version, fetched first where it must be.

        Raises NotFound, IntegrityError naming the damaged file, Unreachable, StorageUnavailable or ResourceExhausted.
        """
        _check(run_id, version)
        with storage_faults_named(self.backend.name):
            try:
                manifest = self.backend.manifest(run_id, version)
            except NotFound:
                raise NotFound(f"run {run_id} has no weight version {version} in {self.backend.name}") from None
            if manifest.get("version") != version:
                where = self.backend.uri(run_id, version)
                raise IntegrityError(f"{where} holds version {manifest.get('version')}, not {version}")
            if "delta" not in manifest:
                in_place = self.backend.in_place(run_id, version)
                if in_place:
                    return self._version(run_id, in_place)
            return self._version(run_id, ManifestFolder(Path(), manifest), self._cached(run_id, manifest))

    def _cached(self, run_id: str, manifest: Manifest) -> Cached:
        version, digest = int(manifest["version"]), digest_of(manifest)
        wanted = whole_entries(manifest)
        found = self._intact(run_id, version, digest, wanted)
        if found:
            return found
        size_bytes = sum(int(entry["size_bytes"]) for entry in wanted)
        with self._cache.stage(run_id, f"{version:08d}-{digest[:32]}", size_bytes) as stage:
            # Another process may have done it meanwhile.
            found = self._intact(run_id, version, digest, wanted)
            if found:
                return found
            whole = assemble(self.backend, self._cache, run_id, manifest, stage)
            return self._cache.keep(whole, run_id, version, digest)

    def _intact(self, run_id: str, version: int, digest: str, wanted: list[FileEntry]) -> Cached | None:
        found = self._cache.find(run_id, version, digest)
        if found:
            try:
                for entry in wanted:
                    verify(found.path / entry["name"], entry)
            except IntegrityError as error:
                log.warning("a cached weight version is damaged and fetched again", reason=error.message)
                self._cache.drop(found)
                return None
        return found

    def _version(self, run_id: str, stored: ManifestFolder, cached: Cached | None = None) -> StoredVersion:
        entries = whole_entries(stored.manifest)
        path = cached.path if cached else stored.path
        return StoredVersion(
            path=path,
            manifest=stored.manifest,
            files=tuple(path / entry["name"] for entry in entries),
            manifest_digest=stored.manifest_digest,
            size_bytes=sum(int(entry["size_bytes"]) for entry in entries),
            stored_bytes=stored.size_bytes,
            uri=self.backend.uri(run_id, int(stored.manifest["version"])),
            hold=cached.hold if cached else None,
        )

    def versions(self, run_id: str) -> list[int]:
        """The stored versions, ascending; not verified."""
        with storage_faults_named(self.backend.name):
            return self.backend.versions(_run(run_id))

    def prune(self, run_id: str, keep: int, spare: Container[int] = ()) -> None:
        """Remove all but the newest `keep` versions, those in `spare`, and what their deltas are based on."""
        versions = self.versions(run_id)
        kept = {version for version in versions if version in spare} | set(versions[max(0, len(versions) - keep) :])
        for version in tuple(kept):
            base = self._base(run_id, version)
            while base and base not in kept:
                kept.add(base)
                base = self._base(run_id, base)
        self._base_of = {key: base for key, base in self._base_of.items() if key[0] == run_id and key[1] in kept}
        with storage_faults_named(self.backend.name):
            for version in versions:
                if version not in kept:
                    self.backend.remove(run_id, version)
            self.backend.tidy(run_id)

    def _base(self, run_id: str, version: int) -> int:
        """The version that a delta is based on; 0 for a whole version and for one that cannot be read."""
        known = self._base_of.get((run_id, version))
        if known is not None:
            return known
        try:
            with storage_faults_named(self.backend.name):
                delta = self.backend.manifest(run_id, version).get("delta")
        except (NotFound, IntegrityError):
            return 0
        base = self._base_of[run_id, version] = int(delta["base"]) if delta else 0
        return base

    def remove_run(self, run_id: str) -> None:
        """Remove everything of a run."""
        self.backend.remove_run(_run(run_id))


def backend_at(place: str | Path, digits: int = 8) -> WeightBackend:
    """The place of weights named by a path or a URL. Raises InvalidInput when it is none."""
    if "://" not in str(place):
        return FolderBackend(Path(place), digits)
    try:
        from spo.weights.s3_backend import S3Backend
    except ImportError:
        raise InvalidInput(f"what is kept at {place} needs the package obstore", code="weight_store_url") from None
    return S3Backend(str(place), digits)


def _save(shards: Iterable[tuple[str, Mapping[str, Tensor]]], folder: Path, *, adapter: Adapter | None) -> None:
    # Imported here: the orchestrator lists and prunes versions without torch.
    from safetensors.torch import save_file

    for name, tensors in shards:
        if not _SHARD_NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} is no name for a weight shard")
        save_file(dict(tensors), folder / name)
    if adapter:
        adapter.write(folder)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _run(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise InvalidInput(f"{run_id!r} is no run id")
    return run_id


def _check(run_id: str, version: int) -> None:
    _run(run_id)
    if version < 1:
        raise InvalidInput(f"weight versions count from 1, not {version}; 0 is the reference model itself")
