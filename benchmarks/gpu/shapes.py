"""Random models of real shapes, with the toy contest's tokenizer: speed and memory do not ask what they know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from spo.tasks.toy_tokenizer import build_tokenizer, save_tokenizer

# Hidden width, width between, layers, attention heads, key-value heads, vocabulary: as Qwen2.5 has them.
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    # One layer of it, and few words: what a layer costs is not to be hidden by the last one.
    "7B's layer": (3584, 18_944, 1, 28, 4, 1024),
    "tiny": (64, 128, 2, 2, 1, 512),
}


def write_shape(folder: Path, shape: str) -> None:
    """A bfloat16 model of one of SHAPES."""
    width, between, layers, heads, key_value_heads, vocabulary = SHAPES[shape]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
