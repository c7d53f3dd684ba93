"""The sizes of a language model, read from its config.json or from a table of published ones; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spo.errors import InvalidInput


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers, as Llama, Qwen and Mistral have it; all counts of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    head_size: int

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each linear layer of one block."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = ((self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden))
        return (*attention, *((self.hidden, self.intermediate),) * 2, (self.intermediate, self.hidden))

    @property
    def parameters(self) -> int:
        """Of the whole model, biases left out."""
        block = sum(width * height for width, height in self.linears) + 2 * self.hidden
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * block + tables + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer of the blocks."""
        return self.layers * rank * sum(width + height for width, height in self.linears)


NAMED = {
    "smollm2-135m": ModelShape(576, 30, 9, 3, 1536, 49152, tied=True, head_size=64),
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 4864, 151936, tied=True, head_size=64),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 8960, 151936, tied=True, head_size=128),
    "llama-3-8b": ModelShape(4096, 32, 32, 8, 14336, 128256, tied=False, head_size=128),
    "llama-3-70b": ModelShape(8192, 80, 64, 8, 28672, 128256, tied=False, head_size=128),
}


def named_shape(name: str) -> ModelShape:
    """A published model's. Raises InvalidInput naming those there are."""
    if name not in NAMED:
        raise InvalidInput(f"there is no shape {name}; there are {', '.join(NAMED)}")
    return NAMED[name]


def shape_of_folder(folder: Path) -> ModelShape:
    """From the config.json of a model folder. Raises InvalidInput when it is absent, or of another architecture."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return shape_of_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder} has no config.json that tells the model's sizes: {error!r}") from None


def shape_of_config(config: Mapping[str, object]) -> ModelShape:
    """Raises KeyError, TypeError for a configuration without the sizes of a decoder."""

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name) if default is not None else config[name]
        found = default if value is None else value
        if not isinstance(found, int):
            raise TypeError(f"{name} is no number")
        return found

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return ModelShape(
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        intermediate=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_size=number("head_dim", hidden // heads),
    )
