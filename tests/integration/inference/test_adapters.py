"""The real engine with LoRA adapters: samples of base and adapter, swaps in place, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.inference.engine import Engine, EngineSpec, Sample, SampleRequest
from services.inference.settings import Settings
from services.inference.weights import AdapterRoom, PolicyVersions, Weights, reference_weights, room_for
from spo.errors import IntegrityError
from spo.model.folder import TENSORS_FILE, Adapter, tensor_shapes
from spo.model.logprobs import adapter_name, adapter_off, add_adapter, load_policy, response_logprobs
from spo.spec.job_spec import LoraSpec
from spo.testing.trainer import write_random_llama
from spo.weights.store import StoredVersion, WeightStore

pytestmark = pytest.mark.slow
RUN = "job_test"
WAIT_SECONDS = 240.0
PROMPT = tuple(range(5, 45))
LORA = LoraSpec(rank=4, alpha=8)


def random_adapter(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in learned.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return {adapter_name(name): parameter.detach().clone() for name, parameter in learned.items()}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "model"
    write_random_llama(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def store(model_path: Path) -> WeightStore:
    return WeightStore(model_path.parent / "weights")


def write_adapter(
    store: WeightStore, model_path: Path, version: int, *, rank: int = 4, base: str = "hash"
) -> tuple[StoredVersion, torch.nn.Module]:
    model = load_policy(model_path, "float32")
    config = add_adapter(model, {"r": rank, "lora_alpha": 8, "target_modules": "all-linear"}, seed=0)
    shards = [(TENSORS_FILE, random_adapter(model, version))]
    written = store.write(
        RUN, version, parent=0, step=version, dtype="float32", shards=shards, adapter=Adapter(base, config)
    )
    return written, model


@pytest.fixture(scope="module")
def room(model_path: Path) -> AdapterRoom:
    return room_for(LORA, tensor_shapes(model_path.glob("*.safetensors")))


def test_samples_are_of_the_base_with_the_adapter_that_is_loaded_running_ones_included(
    model_path: Path, store: WeightStore, room: AdapterRoom
) -> None:
    reference = reference_weights(model_path, "hash")
    versions = PolicyVersions(store, reference, room)
    models = {version: write_adapter(store, model_path, version)[1] for version in (1, 2)}
    spec = EngineSpec(model_path, "hash", "float32", 128, room)
    settings = Settings(max_sequences=8, kv_cache_memory_bytes=32 << 20, turn_seconds=0.05, in_flight="keep")
    engine = Engine(spec, settings)
    for version in (0, 1, 2, 0):
        weights = versions.resolve(RUN, version)
        engine.load(weights.paths, version)
        samples = sampled(engine)
        if version:
            expected = response_logprobs(models[version], [PROMPT] * 4, [s.token_ids for s in samples], 4096)
        else:
            with adapter_off(models[1]):
                expected = response_logprobs(models[1], [PROMPT] * 4, [s.token_ids for s in samples], 4096)
        assert {(sample.version_first, sample.version_last) for sample in samples} == {(version, version)}
        for sample, logprobs in zip(samples, expected, strict=True):
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-3)

    # A sequence that runs while adapters are swapped goes on with the new one, its prefix computed anew.
    first = versions.resolve(RUN, 1)
    switched = sampled(engine, swap_after=10, to=first)[0]
    assert (switched.version_first, switched.version_last) == (0, 1)
    tail = response_logprobs(models[1], [PROMPT], [switched.token_ids], 4096)[0]
    assert switched.logprobs[15:] == pytest.approx(tail[15:], abs=1e-3)


def sampled(engine: Engine, swap_after: int = -1, to: Weights | None = None) -> list[Sample]:
    for seed in range(4):
        engine.add(str(seed), SampleRequest(PROMPT, temperature=1.0, top_p=1.0, max_tokens=24, seed=seed))
    found: dict[str, Sample] = {}
    steps = 0
    while len(found) < 4:
        found |= dict(engine.step())
        steps += 1
        if to and steps == swap_after:
            engine.load(to.paths, to.version)
    return [found[key] for key in sorted(found)]


def test_versions_that_do_not_fit_are_refused(model_path: Path, store: WeightStore, room: AdapterRoom) -> None:
    write_adapter(store, model_path, 11, rank=16)
    write_adapter(store, model_path, 12, base="another")
    versions = PolicyVersions(store, reference_weights(model_path, "hash"), room)

    with pytest.raises(IntegrityError, match="no room"):
        versions.resolve(RUN, 11)
    with pytest.raises(IntegrityError, match="no adapter of the model"):
        versions.resolve(RUN, 12)
    with pytest.raises(IntegrityError, match="is an adapter"):
        PolicyVersions(store, reference_weights(model_path, "hash")).resolve(RUN, 11)


def test_an_engine_serves_the_adapters_that_it_has_room_for(model_path: Path, room: AdapterRoom) -> None:
    spec = EngineSpec(model_path, "hash", "float32", 128, room)

    assert spec.fits(replace(spec, adapters=replace(room, rank=1, layers=frozenset({"q_proj"}))))
    assert not spec.fits(replace(spec, adapters=replace(room, rank=16)))
    assert not spec.fits(replace(spec, adapters=None))
    assert not replace(spec, adapters=None).fits(spec)
