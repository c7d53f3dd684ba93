"""Special tokens in responses: what ends them, what marks reasoning, and names of them in texts by others."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spo.model.chat import ChatFormat
from spo.model.tokenizer import (
    decode_response,
    encode_observation,
    encode_prompt,
    encode_response,
    opens_reasoning,
    reasoning_fault,
    without_end,
)
from spo.tasks.problem import extract_program

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK = ChatFormat(reasoning=("[THINK]", "[/THINK]"))
CHANNEL = ChatFormat(reasoning=("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"))


def tokenizer_of(template: str | None = TEMPLATE, *, special: bool = False, ends: bool = False) -> Any:
    """Of bytes. special: whether the marks of reasoning are special tokens; ends: whether it ends what it encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>"]
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    marks = [AddedToken(name, special=special, normalized=False) for name in ("[THINK]", "[/THINK]")]
    (made.add_special_tokens if special else made.add_tokens)(marks)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A",
        special_tokens=[(name, made.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    end = "<|im_end|>" if template else "</s>"
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=end)
    found.chat_template = template
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer(tokenizer: Any, sampled: str, chat: ChatFormat, *, opened: bool = False) -> str:
    text = decode_response(tokenizer, ids(tokenizer, sampled), chat)
    return text[chat.reasoning_length(text, opened=opened) :]


ANSWERS = [
    ("[THINK]6*7 is 42[/THINK]42<|im_end|>", "42"),
    ("[THINK]it may be 41[/THINK] so 42", " so 42"),
    ("[THINK]a[/THINK]b[THINK]c[/THINK]d", "d"),
    ("no reasoning: 42<|im_end|>", "no reasoning: 42"),
    ("[THINK]cut off while it reasons: 41", ""),
    ("[THINK]a[/THINK]b[THINK]41", ""),
    ("[THINK]a<|im_start|>b[/THINK]c<|im_start|>d", "cd"),
    ("[THINK]\u00e9\u4e16[/THINK]\u4e16\u00e9", "\u4e16\u00e9"),
    ("[/THINK]42", "42"),
    ("", ""),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("sampled", "judged"), ANSWERS)
def test_reasoning_is_cut_off_by_its_marks_be_they_special_tokens_or_not(
    sampled: str, judged: str, special: bool
) -> None:
    assert answer(tokenizer_of(special=special), sampled, THINK) == judged


@pytest.mark.parametrize("special", [False, True])
def test_of_reasoning_that_the_prompt_begins_only_what_follows_its_end_is_answer(special: bool) -> None:
    tokenizer = tokenizer_of(f"{TEMPLATE}[THINK]", special=special)
    assert opens_reasoning(tokenizer, encode_prompt(tokenizer, "6*7?", THINK), THINK)
    assert answer(tokenizer, "it may be 41[/THINK]42", THINK, opened=True) == "42"
    assert answer(tokenizer, "it may be 41", THINK, opened=True) == ""


def test_a_draft_within_special_marks_is_no_program() -> None:
    sampled = "[THINK]a draft:\n```python\nprint(1)\n```\nno[/THINK]```python\nprint(2)\n```"
    assert extract_program(answer(tokenizer_of(special=True), sampled, THINK), "fenced", "python") == "print(2)\n"


def test_marks_of_several_tokens_are_found_by_all_of_them() -> None:
    sampled = "<|channel|>analysis<|message|>it may be 41<|channel|>final<|message|>42<|im_end|>"
    assert answer(tokenizer_of(), sampled, CHANNEL) == "42"
    assert answer(tokenizer_of(), "<|channel|>analysis<|message|>41", CHANNEL) == ""


def test_what_a_policy_reasoned_is_tokenised_again_as_it_was() -> None:
    tokenizer = tokenizer_of(special=True)
    sampled = ids(tokenizer, "[THINK]it may be 41[/THINK]42<|im_end|>")
    assert encode_response(tokenizer, decode_response(tokenizer, sampled, THINK), THINK) == sampled


def test_a_mark_that_no_response_could_hold_is_found_out() -> None:
    tokenizer = tokenizer_of(special=True)
    assert reasoning_fault(tokenizer, THINK) is None
    assert reasoning_fault(tokenizer, CHANNEL) is None
    assert reasoning_fault(tokenizer, ChatFormat(reasoning=None)) is None
    tokenizer.backend_tokenizer.decoder = decoders.Replace("[", "")
    assert "read as" in (reasoning_fault(tokenizer, THINK) or "")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("hello", "hello<|im_end|>"),
        ("hello<|im_end|>", "hello<|im_end|>"),
        ("hello<|im_end|>\n", "hello<|im_end|>"),
        ("hello\n<|im_end|>", "hello\n<|im_end|>"),
        ("hello<|im_end|><|im_end|>", "hello<|im_end|>"),
        ("hello<|im_end|> \n<|im_end|>\n", "hello<|im_end|>"),
        ("", "<|im_end|>"),
    ],
)
def test_a_response_by_others_ends_once(text: str, read: str) -> None:
    tokenizer = tokenizer_of()
    assert encode_response(tokenizer, text) == ids(tokenizer, read)


@pytest.mark.parametrize("text", ["a<|im_end|>\n<|im_start|>user\nb", "<s>x</s>y", "the token <|im_end|> ends a turn"])
def test_names_of_special_tokens_within_a_response_are_text(text: str) -> None:
    tokenizer = tokenizer_of()
    tokens = encode_response(tokenizer, text)
    assert [token for token in tokens if token in tokenizer.all_special_ids] == [tokens[-1]]
    assert decode_response(tokenizer, tokens) == text


def test_a_response_that_was_cut_off_gets_no_end_whatever_it_names() -> None:
    tokenizer = tokenizer_of()
    assert encode_response(tokenizer, "hello<|im_end|>", ended=False) == ids(tokenizer, "hello")
    assert without_end(tokenizer, "print(1)<|im_end|>\n") == "print(1)"


@pytest.mark.parametrize("gap", ["", " ", "\n", "  \n"])
def test_the_end_stands_once_between_two_turns_whatever_white_space_a_template_writes_before_it(gap: str) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}" + gap + "</s>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    said = ids(tokenizer, "ok</s>")
    assert tokenizer.decode([*said, *encode_observation(tokenizer, "3", said=said)]) == "ok</s>[INST] 3 [/INST]"
    cut = ids(tokenizer, "ok")
    assert tokenizer.decode([*cut, *encode_observation(tokenizer, "3", said=cut)]) == f"ok{gap}</s>[INST] 3 [/INST]"


@pytest.mark.parametrize("text", ["hello", "", "a</s>", " x "])
def test_a_plain_prompt_is_not_ended_by_a_tokenizer_that_ends_texts(text: str) -> None:
    ended, usual = tokenizer_of(None, ends=True), tokenizer_of(None)
    assert encode_prompt(ended, text)[: len(encode_prompt(usual, text))] == encode_prompt(usual, text)
    if text:
        assert encode_prompt(ended, text) == encode_prompt(usual, text)
