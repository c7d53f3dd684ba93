"""One base model in memory, frozen, and any number of named LoRA adapters on it, of which at most one is in use.

Axes: B sequence, L position, V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from spo.errors import IntegrityError, InvalidInput
from spo.model.adapter_folder import PREFIX
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import DTYPES
from spo.model.tokenizer import load_tokenizer

# Tinker scales every adapter by 32 / rank.
ALPHA = 32
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value"})
HEADS = frozenset({"lm_head", "embed_out"})


@dataclass(frozen=True)
class LoraShape:
    """What of the model an adapter changes, and by how many directions."""

    rank: int
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def document(self) -> dict[str, int | bool]:
        """As it is stored."""
        return dict(vars(self))


class SharedModel:
    """Not safe from several threads: one thread computes."""

    def __init__(self, path: Path, dtype: str) -> None:
        """Raises InvalidInput where the folder may not or cannot be loaded."""
        folder = inspect_model_folder(path)
        transformers.utils.logging.disable_progress_bar()
        self.path, self.hash = folder.path, folder.model_hash
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=DTYPES[dtype], trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
        self.model = nn.Module.to(model, self.device).eval().requires_grad_(requires_grad=False)
        self.tokenizer = load_tokenizer(folder.path)
        self.vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.max_tokens = int(getattr(model.config, "max_position_embeddings", 1 << 17))
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = self.tokenizer.eos_token_id if ends is None else ends
        self.end_tokens = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._linear = [
            name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
        ]

    def add(self, name: str, shape: LoraShape, seed: int | None = None) -> None:
        """Give the model an adapter that changes nothing yet. Raises InvalidInput where no layer is to be changed."""
        config = self._config(shape)
        # What peft remembers of the one before; it would warn of every further one.
        vars(self.model).pop("peft_config", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            inject_adapter_in_model(config, self.model, adapter_name=name)
        for layer in self._layers():
            if name in layer.lora_A:
                for part in (layer.lora_A, layer.lora_B):
                    part[name].float().to(self.device)
        self.use(None)

    def remove(self, name: str) -> None:
        """Take an adapter away; nothing where there is none."""
        for layer in self._layers():
            if name in layer.lora_A:
                layer.set_adapter([])
                layer.delete_adapter(name)
        self.use(None)

    def use(self, name: str | None) -> None:
        """From now on the model computes with this adapter, or as it was."""
        for layer in self._layers():
            layer.enable_adapters(enabled=name is not None)
            if name is not None:
                layer.set_adapter(name)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """An adapter's tensors by the names that peft gives them in a file."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer) and name in layer.lora_A:
                for part, half in (("lora_A", layer.lora_A[name]), ("lora_B", layer.lora_B[name])):
                    found[f"{PREFIX}{path}.{part}.weight"] = cast(nn.Parameter, cast(nn.Linear, half).weight)
        return found

    @torch.no_grad()
    def fill(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Put stored tensors in an adapter. Raises IntegrityError when they are another adapter's."""
        own = self.parameters(name)
        if own.keys() != tensors.keys() or any(own[each].shape != tensors[each].shape for each in own):
            raise IntegrityError("the stored adapter is of other layers or another rank")
        for each, parameter in own.items():
            parameter.copy_(tensors[each])

    def peft_config(self, shape: LoraShape) -> dict[str, Any]:
        """What peft writes beside the tensors of such an adapter."""
        document = self._config(shape).to_dict() | {"inference_mode": True}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in document.items()}

    def logits(self, input_ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Of the token after each position, float32 (B, L, V), with the adapter in use. Padding on either side."""
        found = self.model(
            input_ids=input_ids_BL, attention_mask=mask_BL, position_ids=_positions(mask_BL), use_cache=False
        )
        logits_BLV: Tensor = found.logits.float()
        return logits_BLV

    def next_logits(self, input_ids_BL: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Of the token after the last, float32 (B, V); mask_BL covers what the cache holds too. Padding on the left."""
        found = self.model(
            input_ids=input_ids_BL,
            attention_mask=mask_BL,
            position_ids=_positions(mask_BL)[:, -input_ids_BL.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = found.logits[:, -1].float()
        return logits_BV

    def _layers(self) -> list[LoraLayer]:
        return [module for module in self.model.modules() if isinstance(module, LoraLayer)]

    def _config(self, shape: LoraShape) -> LoraConfig:
        targets = sorted({name for name in self._linear if self._is_wanted(name, shape)})
        if not targets:
            raise InvalidInput("the adapter would change no layer of this model", code="tinker_model")
        return LoraConfig(
            r=shape.rank,
            lora_alpha=ALPHA,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.path),
        )

    @staticmethod
    def _is_wanted(name: str, shape: LoraShape) -> bool:
        if name in HEADS:
            return shape.head
        return shape.attention if name in ATTENTION else shape.mlp


def _positions(mask_BL: Tensor) -> Tensor:
    """Counted from the first token of each sequence."""
    return (mask_BL.cumsum(-1) - 1).clamp(min=0)
