"""Putting a version's whole files together on this machine, from its anchor, or a base that is here, and its deltas."""

from __future__ import annotations

import shutil
from pathlib import Path

from spo.errors import IntegrityError
from spo.manifest_folder import FileEntry, Manifest, ManifestFolder, check_entry, verify
from spo.weights.backends import FolderBackend, WeightBackend
from spo.weights.cache import Cached, WeightCache

DELTA_NAME = "delta-"


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
