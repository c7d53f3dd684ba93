"""Versioned policy weights: whole or absent, verified when opened, in a shared folder or an object store.

Version 0 is the reference model itself and is never here. A version is stored whole (an anchor) or as what changed
since the one before (a delta); whoever opens it gets whole files either way, whose digests the manifest holds. What
does not lie in a folder of this machine is put together in its cache (spo.weights.cache).
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spo.disk_space import told_when_full
from spo.errors import IntegrityError, InvalidInput, NotFound
from spo.manifest_folder import FileEntry, Manifest, ManifestFolder, entry_of, link_files, verify
from spo.model.adapter_folder import Adapter
from spo.observability.logs import get_logger
from spo.weights.assembly import (
    DELTA_NAME,
    assemble,
    digest_of,
    emptied,
    whole_entries,
    whole_here,
)
from spo.weights.backends import FolderBackend, WeightBackend
from spo.weights.cache import Cached, Pin, WeightCache

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger("weights")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\.safetensors")
# A delta that saves less than this is not worth a chain.
WORTHWHILE_SHARE = 0.9


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
        or a newer one, InvalidInput on unsafe names, and Unreachable; ResourceExhausted where no space is left. A crash
        leaves nothing visible.
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
        with told_when_full(self.backend.name, size_bytes):
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
            told_when_full(self.backend.name, _bytes_in(source)),
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
        with told_when_full(self.backend.name, source.size_bytes):
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

        Raises NotFound, IntegrityError naming the damaged file, Unreachable, or ResourceExhausted.
        """
        _check(run_id, version)
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
