"""Tiny random models for tests and benchmarks: real folders that transformers and vLLM load, made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spo.tasks.toy.tokenizer import MAXIMUM_TOKENS, build_tokenizer, save_tokenizer

# Wide enough that greedy choices differ from token to token instead of repeating one.
WEIGHT_SCALE = 0.25


def write_random_llama(folder: Path, seed: int, *, width: int = 96, layers: int = 2) -> None:
    """Write a Llama with the toy contest's tokenizer and weights drawn from `seed`."""
    random_llama(seed, width=width, layers=layers).save_pretrained(folder, safe_serialization=True)
    save_tokenizer(folder)


def random_llama(seed: int, *, width: int = 96, layers: int = 2) -> LlamaForCausalLM:
    """The model of `write_random_llama`, float32, in evaluation mode; leaves the global random state alone."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        # vLLM's CPU attention has no head narrower than 32.
        head_dim=32,
        max_position_embeddings=MAXIMUM_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, WEIGHT_SCALE, generator=generator)
    model.eval()
    return model
