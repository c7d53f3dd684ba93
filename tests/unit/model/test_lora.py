"""An adapter's version as folders for other programs: peft's own, and merged into a whole model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.orchestrator.checks import _adapter_faults
from spo.errors import InvalidInput
from spo.model.folder import TENSORS_FILE, Adapter, inspect_model_folder
from spo.model.logprobs import adapter_name, adapter_off, add_adapter, load_policy, take_adapter, token_logprobs
from spo.spec.job_spec import LoraSpec, ModelSpec
from spo.testing.trainer import write_random_llama
from spo.weights.model_folders import write_export
from spo.weights.store import StoredVersion, WeightStore

TOKENS_BL = torch.arange(4, 28).reshape(2, 12)
OPTIONS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "pi0"
    write_random_llama(folder, seed=0, width=64)
    return folder


def with_adapter(model_path: Path, dtype: str, size: float = 0.05) -> tuple[PreTrainedModel, Adapter]:
    model = load_policy(model_path, dtype)
    config = add_adapter(model, OPTIONS, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    return model, Adapter(inspect_model_folder(model_path).model_hash, config)


def stored(place: str | Path, model: PreTrainedModel, adapter: Adapter, dtype: str, interval: int = 1) -> StoredVersion:
    tensors = {adapter_name(name): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    store = WeightStore(place, anchor_interval=interval)
    for version in (1, 2):
        store.write(
            "job_a",
            version,
            parent=version - 1,
            step=version,
            dtype=dtype,
            shards=[(TENSORS_FILE, tensors)],
            adapter=adapter,
        )
    return store.open("job_a", 2)


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    return token_logprobs(model, TOKENS_BL, torch.ones_like(TOKENS_BL))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.4)])
def test_an_exported_version_computes_what_the_trainer_computed(
    model_path: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    model, adapter = with_adapter(model_path, dtype)
    version = stored(tmp_path / "weights", model, adapter, dtype)

    write_export(model_path, version, tmp_path / "adapter", merge=False)
    write_export(model_path, version, tmp_path / "merged", merge=True)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    unmerged = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), autocast_adapter_dtype=False).eval()
    # As the folder itself says: its dtype is the job's.
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()

    expected = logprobs(model)
    torch.testing.assert_close(logprobs(unmerged), expected, atol=1e-5 if dtype == "float32" else 0.1, rtol=0)
    torch.testing.assert_close(logprobs(merged), expected, atol=tolerance, rtol=0)
    assert merged.dtype == getattr(torch, dtype)
    with adapter_off(model):
        assert (logprobs(model) - expected).abs().max() > tolerance
    if dtype == "bfloat16":
        for name, tensor in unmerged.merge_and_unload().state_dict().items():
            torch.testing.assert_close(merged.state_dict()[name], tensor, atol=2e-3, rtol=2**-7)


def test_adapters_are_stored_whole_between_anchors_and_adopted_as_adapters(model_path: Path, tmp_path: Path) -> None:
    model, adapter = with_adapter(model_path, "float32")

    version = stored(tmp_path / "weights", model, adapter, "float32", interval=10)
    adopted = WeightStore(tmp_path / "weights").adopt("job_b", 1, version, parent=0, step=0)

    assert "delta" not in version.manifest
    assert adopted.base_model == version.base_model == adapter.base_model
    assert {file.name for file in adopted.files} == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_copy_that_shares_the_weights_of_pi0_takes_a_published_adapter(model_path: Path, tmp_path: Path) -> None:
    model, adapter = with_adapter(model_path, "float32")
    version = stored(tmp_path / "weights", model, adapter, "float32")
    pi0 = load_policy(model_path, "float32")
    alone = logprobs(pi0)

    policy = deepcopy(pi0, {id(tensor): tensor for tensor in (*pi0.parameters(), *pi0.buffers())})
    add_adapter(policy, OPTIONS, seed=5)
    take_adapter(policy, version.files)

    torch.testing.assert_close(logprobs(policy), logprobs(model))
    torch.testing.assert_close(logprobs(pi0), alone)
    own = {parameter.data_ptr() for parameter in pi0.parameters()}
    assert own <= {parameter.data_ptr() for parameter in policy.parameters()}


def test_a_target_that_is_no_layer_is_refused(model_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not fit the model") as refusal:
        add_adapter(load_policy(model_path, "float32"), OPTIONS | {"target_modules": ["nowhere"]}, seed=0)

    assert refusal.value.code == "lora_targets"


def test_targets_that_the_model_has_not_are_refused_by_index(model_path: Path) -> None:
    lora = LoraSpec(targets=("q_proj", "nowhere", "layers.0.mlp.up_proj"))
    spec = ModelSpec(path=str(model_path), lora=lora)

    faults = list(_adapter_faults(inspect_model_folder(model_path), spec))

    assert [fault.pointer for fault in faults] == ["/model/lora/targets/1"]
    assert "gate_proj" in faults[0].message


def test_an_adapter_of_a_real_models_shapes_is_a_fiftieth_of_it(tmp_path: Path) -> None:
    """The shapes of SmolLM2-135M in bfloat16, rank 8."""
    wide, narrow = 1536, 192
    layer = 576 * (576 + 2 * narrow + 576 + 3 * wide)
    whole = 2 * (30 * layer + 49_152 * 576)
    ends = [(576, 576), (narrow, 576), (narrow, 576), (576, 576), (wide, 576), (wide, 576), (576, wide)]
    tensors = {}
    for number in range(30):
        for position, (rows, columns) in enumerate(ends):
            tensors[f"base_model.model.layers.{number}.l{position}.lora_A.weight"] = torch.zeros(8, columns).bfloat16()
            tensors[f"base_model.model.layers.{number}.l{position}.lora_B.weight"] = torch.zeros(rows, 8).bfloat16()

    written = WeightStore(tmp_path).write(
        "job_a", 1, parent=0, step=1, dtype="bfloat16", shards=[(TENSORS_FILE, tensors)], adapter=Adapter("hash", {})
    )

    assert written.stored_bytes < 0.02 * whole
