"""A model folder that can be submitted and not loaded: configuration, tokenizer, no weights to speak of; no torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from spo.tasks.toy.tokenizer import build_tokenizer, save_tokenizer

HEADER = b"{}"


def write_model_without_weights(folder: Path, **config: object) -> None:
    """Write the folder; `config` are fields of its config.json in place of those of a small Llama."""
    folder.mkdir(parents=True)
    chosen = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(build_tokenizer()),
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(chosen | config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER)
    save_tokenizer(folder)
