"""A language model with a LoRA adapter (peft): only the adapter learns, and the model without it is still pi0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from spo.errors import IntegrityError, InvalidInput
from spo.model.adapter_folder import PREFIX

NAME = "default"


def add_adapter(model: PreTrainedModel, lora: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Freeze the model and give it an adapter that changes nothing yet, in the model's dtype; returns peft's config.

    lora: r, lora_alpha, target_modules. The draw of A follows `seed` alone, so every rank draws the same. Raises
    InvalidInput (code "lora_targets") when a target is no linear layer of the model.
    """
    config = LoraConfig(**lora, task_type="CAUSAL_LM", base_model_name_or_path=model.config.name_or_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise InvalidInput(f"the adapter does not fit the model: {error}", code="lora_targets") from error
    document = config.to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in document.items()}


def adapter_name(parameter: str) -> str:
    """The name that peft gives a parameter of an adapter when it saves it."""
    return PREFIX + parameter.replace(f".{NAME}.", ".")


@torch.no_grad()
def take_adapter(model: nn.Module, files: Sequence[Path]) -> None:
    """Put published tensors in place of an adapter's own. Raises IntegrityError when they are another adapter's."""
    found = {
        name: tensor for file in files if file.suffix == ".safetensors" for name, tensor in load_file(file).items()
    }
    own = {adapter_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if own.keys() != found.keys() or any(found[name].shape != own[name].shape for name in own):
        raise IntegrityError(f"{files[0].parent} holds an adapter of other layers or another rank than the job's")
    for name, parameter in own.items():
        parameter.copy_(found[name])


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """While the body runs, the model computes what it computes without its adapter."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
