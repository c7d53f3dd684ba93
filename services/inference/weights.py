"""Policy versions as weight files, verified before the engine loads them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from spo.errors import IntegrityError
from spo.weights.cache import Pin
from spo.weights.store import WeightStore

REFERENCE_VERSION = 0
# Versions that are not read and hashed again: the newest, the one before it, and some under evaluation.
REMEMBERED = 4
# A model with tied embeddings may be written with or without this copy of them.
_TIED = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weights:
    """One servable version; runs that share a model share version 0, whose run_id is empty."""

    run_id: str
    version: int
    digest: str
    paths: tuple[Path, ...] = field(repr=False)
    # Keeps cached files from being evicted for as long as they may be loaded.
    pin: Pin | None = field(default=None, repr=False, compare=False)


def reference_weights(model_path: Path, model_hash: str) -> Weights:
    """Version 0: the model folder itself."""
    return Weights("", REFERENCE_VERSION, model_hash, tuple(sorted(model_path.glob("*.safetensors"))))


class PolicyVersions:
    """Resolves (run, version) to verified weights; a version is read and hashed once."""

    def __init__(self, store: WeightStore, reference: Weights) -> None:
        self._store = store
        self.reference = reference
        self._shapes = _shapes_of(reference.paths)
        self._verified: dict[tuple[str, int], Weights] = {}
        self._lock = threading.Lock()

    def resolve(self, run_id: str, version: int, manifest_digest: str = "") -> Weights:
        """Return verified weights; a manifest_digest, when given, must be that of the stored version.

        Raises NotFound when the version is not kept, IntegrityError when it is damaged or of another model.
        """
        if version == REFERENCE_VERSION:
            return self.reference
        with self._lock:
            known = self._verified.pop((run_id, version), None)
            if not (known and manifest_digest in ("", known.digest) and _still_there(known)):
                known = self._open(run_id, version, manifest_digest)
            self._verified[run_id, version] = known
            while len(self._verified) > REMEMBERED:
                del self._verified[next(iter(self._verified))]
            return known

    def _open(self, run_id: str, version: int, manifest_digest: str) -> Weights:
        stored = self._store.open(run_id, version)
        if manifest_digest not in ("", stored.manifest_digest):
            raise IntegrityError(f"version {version} of run {run_id} is not the one that was announced")
        _check_shapes(self._shapes, _shapes_of(stored.files), f"version {version} of run {run_id}")
        return Weights(run_id, version, stored.manifest_digest, stored.files, stored.hold)


def _still_there(weights: Weights) -> bool:
    return all(path.is_file() for path in weights.paths)


def _shapes_of(paths: Iterable[Path]) -> Shapes:
    shapes: Shapes = {}
    for path in paths:
        with safe_open(path, framework="numpy") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(shard.get_slice(name).get_shape())
    return shapes


def _check_shapes(expected: Shapes, found: Shapes, what: str) -> None:
    """Raise IntegrityError: a missing tensor would keep its old value, an unknown one would stop the load half-way."""
    for name in sorted((expected.keys() | found.keys()) - {_TIED}):
        if expected.get(name) != found.get(name):
            raise IntegrityError(
                f"{what} does not fit the model: {name} is {found.get(name)}, not {expected.get(name)}"
            )
