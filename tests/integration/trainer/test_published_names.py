"""What is published of a model has the names and values that its folder would have, whatever family it is of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.orchestrator import checks
from services.trainer.deepspeed_engine import take_weights
from services.trainer.learner import Policy
from services.trainer.ranks import Ranks
from services.trainer.weights import NewVersion, store_weights
from spo.errors import InvalidInput
from spo.model.check_model import check_names
from spo.model.folder import ALL_LINEAR, ONE_NAME, adapted_layers, inspect_model_folder, tensor_shapes
from spo.model.folder_names import FolderNames, tensors_of
from spo.model.logprobs import load_policy
from spo.spec.job_spec import parse_job_spec
from spo.weights.store import WeightStore

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
# Fields that other families do not have are kept and do nothing.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 3),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
}
STACKED = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "phimoe", "glm4_moe", "deepseek_v2", "deepseek_v3"]


def write_family(folder: Path, kind: str, seed: int = 0) -> Path:
    config = AutoConfig.for_model(kind, **SIZES, **EXPERTS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for _, tensor in tensors_of(model):
            tensor.data += torch.randn_like(tensor)
        model.save_pretrained(folder)
    return folder


def stored_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", [*STACKED, *sorted(ONE_NAME)])
def test_names_and_values_are_the_folders(kind: str, tmp_path: Path) -> None:
    folder, other = write_family(tmp_path / "model", kind), write_family(tmp_path / "other", kind, seed=1)
    model = load_policy(folder, "bfloat16")
    names = FolderNames(model)
    names.check(tensor_shapes(folder.glob("*.safetensors")))
    assert all(each.transform is None for each in names.to_stored) == (kind in ONE_NAME)

    published: dict[str, torch.Tensor] = {}
    held = dict(tensors_of(model))
    for conversion in names.to_stored:
        published |= conversion.apply_apart({name: held[name].detach() for name in conversion.sources})

    stored = stored_of(folder)
    assert published.keys() == stored.keys() - ({"lm_head.weight"} - published.keys())
    assert all(torch.equal(tensor, stored[name].to(tensor)) for name, tensor in published.items())
    version = {name: tensor for name, tensor in stored_of(other).items() if name in published}
    save_file(version, tmp_path / "version.safetensors")
    take_weights(model, [tmp_path / "version.safetensors"])
    wanted = dict(tensors_of(load_policy(other, "bfloat16")))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors_of(model))


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")
@pytest.mark.parametrize(("stage", "anchor_interval"), [(1, 10), (3, 1)])
def test_a_version_is_published_and_training_begins_with_it(
    ranks: Ranks, tmp_path: Path, stage: int, anchor_interval: int
) -> None:
    folder = write_family(tmp_path / "model", "mixtral")
    begins = write_family(tmp_path / "other", "mixtral", seed=1) / "model.safetensors"
    trainer = {"zero_stage": stage, "batch_size": 4}
    spec = parse_job_spec({"model": {"path": str(folder), "dtype": "bfloat16"}, "trainer": trainer})
    store = WeightStore(tmp_path / "weights", anchor_interval=anchor_interval)
    versions = []
    for number, start in enumerate([(), (begins,)], start=1):
        policy = Policy(spec, ranks, start, passes=1)
        stored = store_weights(
            ranks, policy.engine, store, NewVersion("job", number, parent=number - 1, step=number, epoch=1)
        ).version
        policy.close()
        assert stored
        versions.append({name: tensor for file in stored.files for name, tensor in load_file(file).items()})

    for version, expected in zip(versions, (stored_of(folder), stored_of(begins.parent)), strict=True):
        assert version.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in version.items())


def renamed(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {("foreign." if key == name else "") + key: tensor for key, tensor in tensors.items()}


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensors: tensors, ""),
        (lambda tensors: tensors | {"model.layers.2.mlp.gate.weight": torch.zeros(3, 32)}, "layers.2.mlp.gate"),
        (lambda tensors: tensors | {"mtp.weight": torch.zeros(3)}, "not trained or published: mtp.weight"),
        (lambda tensors: {**tensors, "model.norm.weight": torch.zeros(5)}, "other shapes than the model's: model.norm"),
        (lambda tensors: renamed("model.norm.weight", tensors), "foreign.model.norm.weight"),
        (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != EXPERT}, "experts"),
    ],
)
def test_a_folder_whose_versions_engines_would_refuse_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], reason: str
) -> None:
    folder = write_family(tmp_path / "model", "qwen3_moe")
    save_file(spoil(stored_of(folder)), folder / "model.safetensors", metadata={"format": "pt"})

    found = check_names({"folder": str(folder), "adapter": False})["faults"]

    assert [pointer for pointer, _ in found] == (["/model/path"] if reason else [])
    assert reason in "".join(message for _, message in found)
    assert not check_names({"folder": str(folder), "adapter": True})["faults"]


def test_the_orchestrator_refuses_by_pointer_what_cannot_be_built_or_published(tmp_path: Path) -> None:
    moe, gpt_oss = write_family(tmp_path / "moe", "qwen3_moe"), write_family(tmp_path / "gpt_oss", "gpt_oss")
    (fault,) = checks.name_faults(inspect_model_folder(gpt_oss), adapter=True)
    assert (fault.pointer, "GptOssForCausalLM does not support" in fault.message) == ("/model/path", True)
    beyond = stored_of(moe) | {"model.layers.2.norm.weight": torch.zeros(3)}
    save_file(beyond, moe / "model.safetensors", {"format": "pt"})
    (fault,) = checks.name_faults(inspect_model_folder(moe), adapter=False)
    assert (fault.pointer, "the model 2 layers" in fault.message) == ("/model/path", True)


def test_the_trainer_says_so_before_its_first_step(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "llama")
    save_file(stored_of(folder) | {"model.extra": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"not trained or published: model\.extra"):
        FolderNames(load_policy(folder, "bfloat16")).check(tensor_shapes([folder / "model.safetensors"]))


def test_an_adapter_is_of_the_attention_where_experts_are_stacked(tmp_path: Path) -> None:
    shapes = tensor_shapes(write_family(tmp_path / "model", "qwen3_moe").glob("*.safetensors"))
    layers = adapted_layers(shapes, ALL_LINEAR)
    assert {layer.rpartition(".")[2] for layer in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted_layers(shapes, ["gate_proj"]) == []
