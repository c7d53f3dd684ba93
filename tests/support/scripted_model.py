"""A model that greedily writes one text with two calls of a tool, and a template that shows tools, in Hermes' form."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
            "strict": True,
        },
    }
]
CALLED = [("weather", {"place": "Malmö"}), ("weather", {"place": "Oslo"})]
# Each piece is a token, and what follows it is known by it alone.
SCRIPT = (
    *(
        "<ask>",
        "Let me ",
        "look.",
        '\n<tool_call>\n{"name": "wea',
        'ther", "arguments": {"place": "Malmö"}}\n</tool_call>',
    ),
    *('\n<tool_call>\n{"name": "weath', 'er", "arguments": {"place": "Oslo"}}\n</tool_call>', "<end>"),
)
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}\
{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<ask>{% endif %}"""
WIDTH = 320


def hermes_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes, and the pieces of the script."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in SCRIPT[1:-1]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<turn>",
        eos_token="<end>",
        additional_special_tokens=["<ask>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def write_scripted_model(folder: Path) -> None:
    """Write a Llama whose layers add nothing: the next token is the one after the last in the script."""
    tokenizer = hermes_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=WIDTH // 32,
        num_key_value_heads=WIDTH // 32,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    ids = tokenizer.convert_tokens_to_ids(list(SCRIPT))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), WIDTH))
        model.lm_head.weight.zero_()
        for token, following in pairwise(ids):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
