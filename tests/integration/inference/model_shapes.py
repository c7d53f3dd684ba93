"""Small random models in the shapes of known families: their architectures, special tokens and chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

POSITIONS = 256
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # vLLM's CPU attention has no head narrower than 32.
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
}
CORPUS = ["the sum of two numbers is printed", "def main(): print(sum(map(int, input().split())))", "system user model"]
TURNS = "{% for each in messages %}"


@dataclass(frozen=True)
class ModelShape:
    """A family: what its config.json, its tokenizer and its template have of their own.

    turn_end: the token that ends a turn; file_ends: those that generation_config.json names. config: None leaves a
    field of SIZES out.
    """

    kind: str
    special: tuple[str, ...]
    eos: str
    turn_end: str
    template: str
    file_ends: tuple[str, ...] = ()
    tied: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CHATML = (
    TURNS + "<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA = (
    "{{ bos_token }}" + TURNS + "<start_of_turn>{{ 'model' if each.role == 'assistant' else each.role }}\n"
    "{{ each.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

SHAPES = {
    "llama3": ModelShape(
        "llama",
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        eos="<|end_of_text|>",
        turn_end="<|eot_id|>",
        template="{{ bos_token }}" + TURNS + "<|start_header_id|>{{ each.role }}<|end_header_id|>\n\n"
        "{{ each.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        file_ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        config={"rope_theta": 500000.0},
    ),
    "qwen3": ModelShape(
        "qwen3",
        (*CHATML_TOKENS, "<think>", "</think>"),
        eos="<|im_end|>",
        turn_end="<|im_end|>",
        template=CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        file_ends=("<|im_end|>", "<|endoftext|>"),
        tied=True,
    ),
    "qwen2": ModelShape(
        "qwen2",
        CHATML_TOKENS,
        eos="<|im_end|>",
        turn_end="<|im_end|>",
        template=CHATML + "{% endif %}",
        file_ends=("<|im_end|>", "<|endoftext|>"),
        tied=True,
        # Every projection of its attention has a bias, and no head a width of its own.
        config={"head_dim": None},
    ),
    "mistral": ModelShape(
        "mistral",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        turn_end="</s>",
        template="{{ bos_token }}" + TURNS + "{% if each.role == 'user' %}[INST] {{ each.content }}[/INST]"
        "{% else %}{{ each.content }}{{ eos_token }}{% endif %}{% endfor %}",
        config={"sliding_window": 16},
    ),
    "gemma2": ModelShape(
        "gemma2",
        GEMMA_TOKENS,
        eos="<eos>",
        turn_end="<end_of_turn>",
        template=GEMMA,
        file_ends=("<eos>", "<end_of_turn>"),
        tied=True,
        config={
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
        },
    ),
    "gemma3": ModelShape(
        "gemma3_text",
        GEMMA_TOKENS,
        eos="<eos>",
        turn_end="<end_of_turn>",
        template=GEMMA,
        file_ends=("<eos>", "<end_of_turn>"),
        tied=True,
        config={"query_pre_attn_scalar": 32, "sliding_window": 16},
    ),
    # Experts are one matrix each in the folder, and stacked in memory.
    "qwen3_moe": ModelShape(
        "qwen3_moe",
        CHATML_TOKENS,
        eos="<|im_end|>",
        turn_end="<|im_end|>",
        template=CHATML + "{% endif %}",
        file_ends=("<|im_end|>", "<|endoftext|>"),
        config={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mixtral": ModelShape(
        "mixtral",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        turn_end="</s>",
        template="{{ bos_token }}" + TURNS + "{% if each.role == 'user' %}[INST] {{ each.content }}[/INST]"
        "{% else %}{{ each.content }}{{ eos_token }}{% endif %}{% endfor %}",
        config={"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def write_shape(folder: Path, shape: ModelShape) -> None:
    """Write a random model of the family as its makers publish one, pickled weights beside the safetensors included."""
    tokenizer = _tokenizer(shape)
    ids = tokenizer.convert_tokens_to_ids
    config = AutoConfig.for_model(
        shape.kind,
        **{name: value for name, value in {**SIZES, **shape.config}.items() if value is not None},
        vocab_size=len(tokenizer),
        tie_word_embeddings=shape.tied,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            # Norms and biases too: at their initial values they could be left out unseen.
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if shape.file_ends:
        ends = {"eos_token_id": ids(list(shape.file_ends)), "temperature": 0.6, "repetition_penalty": 1.3, "top_k": 3}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "original/consolidated.00.pth"):
        (folder / name).write_bytes(b"not even pickled")


def _tokenizer(shape: ModelShape) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as all of these have or come close to."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=list(shape.special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bos = next((token for token in shape.special if token in ("<|begin_of_text|>", "<s>", "<bos>")), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=shape.eos,
        bos_token=bos,
        chat_template=shape.template,
        clean_up_tokenization_spaces=False,
    )
