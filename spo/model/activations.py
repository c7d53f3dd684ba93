"""Activation checkpointing: layers run again in the backward pass instead of keeping what they computed."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

# From here on a layer's activations outweigh the time to compute them again.
LARGE_MODEL_PARAMETERS = 50_000_000


def checkpoint_activations(model: nn.Module, *, reentrant: bool) -> bool:
    """Have the layers of a model keep their inputs only; False, with nothing changed, where it cannot.

    The model is in training mode afterwards, as transformers wants it, with every dropout at 0: it computes what it
    computes in evaluation mode. reentrant: for ZeRO stage 3, whose parameters are gone when a layer runs again.
    """
    language_model = next((found for found in model.modules() if isinstance(found, PreTrainedModel)), None)
    if language_model is None or not language_model.supports_gradient_checkpointing:
        return False
    language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and not all(parameter.requires_grad for parameter in model.parameters()):
        # A layer run again gets gradients only where its input wants one, which frozen embeddings do not.
        language_model.enable_input_require_grads()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(vars(module).get("attention_dropout"), float):
            vars(module)["attention_dropout"] = 0.0
    return True


def is_large(model: nn.Module) -> bool:
    """Whether its activations are worth computing twice; counts parameters that ZeRO stage 3 has cut, too."""
    sizes = (getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    return sum(sizes) >= LARGE_MODEL_PARAMETERS
