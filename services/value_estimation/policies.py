"""The policies of a run by weight version, with the trainer's forward; token values are read from them (Eq. 11, 12)."""

from __future__ import annotations

import threading
from copy import deepcopy

from safetensors.torch import load_file
from transformers import PreTrainedModel

from services.value_estimation.reference import Reference, References, on_device
from spo.errors import IntegrityError, NotFound
from spo.model.logprobs import load_policy
from spo.model.lora import add_adapter, take_adapter
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, LoraSpec
from spo.weights.store import StoredVersion, WeightStore

log = get_logger("policies")

REFERENCE_VERSION = 0


class Policies:
    """Loads one version at a time and keeps the last one used."""

    def __init__(self, references: References, store: WeightStore) -> None:
        self.references = references
        self.store = store
        self._loaded: dict[tuple[str, int], Reference] = {}
        self._lock = threading.Lock()

    def newest(self, run_id: str) -> int:
        """The newest version of a run that is intact; 0, pi0 itself, where there is none. Damaged ones are logged."""
        for version in reversed(self.store.versions(run_id)):
            try:
                self.of(run_id, version)
                return version
            except IntegrityError as error:
                log.warning("a damaged version is passed over", run=run_id, version=version, reason=error.message)
        return REFERENCE_VERSION

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
        lora = spec.model.lora
        policy = _adapted(reference, lora, spec.seed, weights) if lora else _whole(spec, weights)
        return Reference(
            model=on_device(policy, self.references.device),
            tokenizer=reference.tokenizer,
            model_hash=weights.manifest_digest,
            tokens_per_forward=reference.tokens_per_forward,
            lock=threading.Lock(),
            chat=reference.chat,
        )


def _whole(spec: JobSpec, weights: StoredVersion) -> PreTrainedModel:
    policy = load_policy(spec.model.path, spec.model.dtype, packing=spec.trainer.packing)
    state = {name: tensor for path in weights.files for name, tensor in load_file(path).items()}
    found = policy.load_state_dict(state, strict=False)
    tied = set(getattr(policy, "_tied_weights_keys", None) or ())
    if found.unexpected_keys or set(found.missing_keys) - tied:
        raise IntegrityError(f"{weights.uri} is not of the model {spec.model.path}")
    return policy


def _adapted(reference: Reference, lora: LoraSpec, seed: int, weights: StoredVersion) -> PreTrainedModel:
    """The reference's own weights again, not copied, with the version's adapter beside them."""
    tensors = (*reference.model.parameters(), *reference.model.buffers())
    policy = deepcopy(reference.model, {id(tensor): tensor for tensor in tensors})
    add_adapter(policy, lora.peft_options(), seed=seed)
    take_adapter(policy, weights.files)
    return policy
