"""Policy versions as weight files, verified before the engine loads them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.inference.adapters import AdapterRoom, check_adapter
from services.inference.broadcast import OfferedBroadcast, reached
from spo.errors import IntegrityError, SpoError
from spo.model.adapter_folder import Shapes, adapter_of, tensor_shapes
from spo.model.folder import inspect_model_folder
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.cache import Pin
from spo.weights.store import WeightStore

REFERENCE_VERSION = 0
# Versions that are not read and hashed again: the newest, the one before it, and some under evaluation.
REMEMBERED = 4
# A model with tied embeddings may be written with or without this copy of them.
_TIED = "lm_head.weight"


@dataclass(frozen=True)
class Weights:
    """One servable version; runs that share a model share version 0, whose run_id is empty.

    paths: None while its files are not opened, since it comes by `broadcast`.
    """

    run_id: str
    version: int
    digest: str
    paths: tuple[Path, ...] | None = field(repr=False, compare=False)
    # Keeps cached files from being evicted for as long as they may be loaded.
    pin: Pin | None = field(default=None, repr=False, compare=False)
    broadcast: OfferedBroadcast | None = field(default=None, repr=False, compare=False)


def reference_weights(model_path: Path, model_hash: str) -> Weights:
    """Version 0: the model folder itself."""
    return Weights("", REFERENCE_VERSION, model_hash, inspect_model_folder(model_path).safetensors_files)


class PolicyVersions:
    """Resolves (run, version) to verified weights; a version is read and hashed once.

    With room for adapters, versions are adapters of the reference; else they are whole weights.
    """

    def __init__(self, store: WeightStore, reference: Weights, room: AdapterRoom | None = None) -> None:
        self._store = store
        self.reference = reference
        self._room = room
        self._shapes = tensor_shapes(reference.paths or ())
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

    def offered(self, run_id: str, version: int, manifest_digest: str, offer: BroadcastOffer) -> Weights | None:
        """A version that a trainer sends; None where it is here, an adapter, or its sender is out of reach."""
        if self._room or (run_id, version) in self._verified:
            return None
        what = f"version {version} of run {run_id}"
        broadcast = reached(offer, manifest_digest, lambda shapes: _check_shapes(self._shapes, shapes, what))
        return Weights(run_id, version, manifest_digest, None, broadcast=broadcast) if broadcast else None

    def newest_intact(self, run_id: str, candidates: Iterable[tuple[int, str]]) -> Weights:
        """The first of these (version, manifest digest) that can be served; the reference when none can.

        Raises what may pass by itself: a store that does not answer.
        """
        for version, digest in candidates:
            try:
                return self.resolve(run_id, version, digest)
            except SpoError as error:
                if error.retryable:
                    raise
        return self.reference

    def _open(self, run_id: str, version: int, manifest_digest: str) -> Weights:
        stored = self._store.open(run_id, version)
        if manifest_digest not in ("", stored.manifest_digest):
            raise IntegrityError(f"version {version} of run {run_id} is not the one that was announced")
        what = f"version {version} of run {run_id}"
        if self._room:
            if stored.base_model != self.reference.digest:
                raise IntegrityError(f"{what} is no adapter of the model that is served")
            check_adapter(stored.files, self._shapes, self._room, what)
        elif adapter_of(stored.files):
            raise IntegrityError(f"{what} is an adapter, and the job trains all weights")
        else:
            _check_shapes(self._shapes, tensor_shapes(stored.files), what)
        return Weights(run_id, version, stored.manifest_digest, stored.files, stored.hold)


def _still_there(weights: Weights) -> bool:
    return all(path.is_file() for path in weights.paths or ())


def _check_shapes(expected: Shapes, found: Shapes, what: str) -> None:
    """Raise IntegrityError: a missing tensor would keep its old value, an unknown one would stop the load half-way."""
    for name in sorted((expected.keys() | found.keys()) - {_TIED}):
        if expected.get(name) != found.get(name):
            raise IntegrityError(
                f"{what} does not fit the model: {name} is {found.get(name)}, not {expected.get(name)}"
            )
