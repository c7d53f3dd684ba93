"""The policies of a run by weight version, with the trainer's forward; token values are read from them (Eq. 11, 12)."""

from __future__ import annotations

import threading

from safetensors.torch import load_file

from services.value_estimation.reference import Reference, References, on_device
from spo.errors import IntegrityError, NotFound
from spo.model.logprobs import load_policy
from spo.weights.store import WeightStore

REFERENCE_VERSION = 0


class Policies:
    """Loads one version at a time and keeps the last one used."""

    def __init__(self, references: References, store: WeightStore) -> None:
        self.references = references
        self.store = store
        self._loaded: dict[tuple[str, int], Reference] = {}
        self._lock = threading.Lock()

    def newest(self, run_id: str) -> int:
        """The newest version of a run in the weight store; 0, pi0 itself, while there is none."""
        return max(self.store.versions(run_id), default=REFERENCE_VERSION)

    def of(self, run_id: str, version: int) -> Reference:
        """The policy of a version. Raises NotFound when it is not kept, IntegrityError when it is damaged."""
        reference = self.references.of(run_id)
        if version == REFERENCE_VERSION:
            return reference
        with self._lock:
            key = (run_id, version)
            if key not in self._loaded:
                self._loaded = {}
                self._loaded = {key: self._load(run_id, version, reference)}
            return self._loaded[key]

    def _load(self, run_id: str, version: int, reference: Reference) -> Reference:
        if version < REFERENCE_VERSION:
            raise NotFound(f"run {run_id} has no weight version {version}", code="unknown_version")
        weights = self.store.open(run_id, version)
        spec = self.references.spec(run_id)
        policy = load_policy(spec.model.path, spec.model.dtype)
        state = {name: tensor for path in weights.files for name, tensor in load_file(path).items()}
        found = policy.load_state_dict(state, strict=False)
        tied = set(getattr(policy, "_tied_weights_keys", None) or ())
        if found.unexpected_keys or set(found.missing_keys) - tied:
            raise IntegrityError(f"version {version} of run {run_id} is not of the model {spec.model.path}")
        return Reference(
            model=on_device(policy, self.references.device),
            tokenizer=reference.tokenizer,
            model_hash=weights.manifest_digest,
            tokens_per_forward=reference.tokens_per_forward,
            lock=threading.Lock(),
        )
