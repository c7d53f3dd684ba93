"""Folders that no trainer or engine can load are refused from their files, each with its own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spo.errors import InvalidInput
from spo.model.check_model import weight_faults
from spo.model.folder import inspect_model_folder
from spo.testing.runs import write_model_without_weights

Tensors = dict[str, Any]


def tensors() -> Tensors:
    names = (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    return {name: np.ones((4, 4), np.float32) for name in names}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(change: Callable[[Tensors], object] = lambda held: None, **config: Any) -> Path:
        write_model_without_weights(tmp_path / "model", **config)
        held = tensors()
        change(held)
        save_file(held, tmp_path / "model" / "model.safetensors")
        return tmp_path / "model"

    return write


def faults_of(folder: Path) -> str:
    try:
        inspect_model_folder(folder)
    except InvalidInput as error:
        return error.violations[0].message
    return "; ".join(weight_faults(folder))


def without_head(held: Tensors) -> None:
    del held["lm_head.weight"]


def with_values(name: str, dtype: str, value: float) -> Callable[[Tensors], object]:
    def change(held: Tensors) -> None:
        held[name] = np.full((4, 4), 1, dtype)
        held[name][3, 3] = value

    return change


def with_buffers(held: Tensors) -> None:
    held["model.layers.0.attn.bias"] = np.ones((4, 4), np.bool_)
    held["model.position_ids"] = np.arange(4)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (None, {}),
        (without_head, {"tie_word_embeddings": True}),
        (without_head, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}),
        (with_buffers, {"torch_dtype": "float32"}),
        (with_values("model.norm.weight", "float16", 65504.0), {"dtype": "bfloat16"}),
        (None, {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}),
    ],
)
def test_a_model_that_can_be_loaded_has_no_fault(
    folder: Callable[..., Path], change: Callable[[Tensors], object] | None, config: dict[str, Any]
) -> None:
    assert faults_of(folder(*([change] if change else []), **config)) == ""


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (None, {"architectures": ["FooForCausalLM"], "model_type": "foo"}, "transformers has no causal language model"),
        (None, {"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "generates nothing"),
        (None, {"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "generates nothing"),
        (None, {"architectures": ["RobertaModel"], "model_type": "roberta"}, "generates nothing"),
        (None, {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "no causal language model"),
        (None, {"architectures": ["LlamaForSequenceClassification"]}, "generates no text"),
        (None, {"architectures": ["LlamaModel"]}, "generates no text"),
        (None, {"model_type": None}, "names no model_type"),
        (without_head, {}, "no output layer"),
        (without_head, {"tie_word_embeddings": False}, "no output layer"),
        (
            with_values("model.norm.weight", "float32", np.nan),
            {},
            "model.norm.weight in model.safetensors holds values",
        ),
        (with_values("lm_head.weight", "float16", np.inf), {}, "lm_head.weight in model.safetensors holds values"),
        (with_values("lm_head.weight", "float64", -np.inf), {}, "not finite"),
        (with_values("lm_head.weight", "int8", 3), {}, "lm_head.weight as I8"),
        (with_values("lm_head.weight", "complex64", 3), {}, "lm_head.weight as C64"),
        (None, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (None, {"dtype": "nonsense"}, "nonsense"),
        (None, {"torch_dtype": 16}, "'16'"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    folder: Callable[..., Path], change: Callable[[Tensors], object] | None, config: dict[str, Any], said: str
) -> None:
    assert said in faults_of(folder(*([change] if change else []), **config))


def test_a_file_whose_dtype_nobody_knows_is_refused(folder: Callable[..., Path]) -> None:
    file = folder() / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"F32"', b'"F4X"', 1))

    assert "F4X" in faults_of(file.parent)
