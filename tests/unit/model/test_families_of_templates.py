"""Templates of the structure that six families of models have: what probes find in each, how the next turns are
written behind sampled tokens, and that calls are the same after they were written by the template and read by vLLM's
parser.

The texts are written for this test; what of each family's template matters here is kept: where its tools stand, what it
does to reasoning of earlier turns, how it writes calls and results, which turns it refuses, what ends a turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spo.errors import InvalidInput
from spo.model.chat import USUAL
from spo.model.tokenizer import encode_chat, encode_following, end_tokens, render_turns
from spo.model.tool_calls import AnswerReader, ToolFormat, probe_tools, read_calls

_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": _PARAMETERS}}
]
ASKED: dict[str, Any] = {"role": "user", "content": "How is it?"}

# ChatML. Reasoning is written of turns after the last question alone; results of tools are a user's turn together.
_CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
FORM<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set text = (m.content or '') %}{% set thought = '' %}
{%- if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ text }}{% for c in m.tool_calls or [] %}{% if not loop.first or text %}
{% endif %}CALL{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
OPENED{% endif %}"""
QWEN3 = (
    _CHATML.replace("FORM", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    .replace(
        "CALL",
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "</tool_call>",
    )
    .replace("OPENED", "")
)
# Arguments as text between tags; the prompt begins the reasoning.
QWEN35 = (
    _CHATML.replace(
        "FORM", "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>"
    )
    .replace(
        "CALL",
        "<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for a, v in c.function.arguments.items() %}<parameter={{ a }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    )
    .replace("OPENED", "<think>\n")
)
# Tools stand in the first question; one call a turn, without a tag; results are a turn of the role ipython, as JSON.
LLAMA3 = """\
<|begin_of_text|>{% set ns = namespace(shown=not tools) %}
{%- for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('one call at once') }}{% endif %}{% set c = m.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.role == 'user' and not ns.shown %}{% set ns.shown = true %}Functions: {{ tools | tojson }}
Answer as {"name": function, "parameters": arguments}.

{% endif %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
# Tools stand before the last question; turns have to alternate; calls have ids of nine letters, which results repeat.
MISTRAL = """\
<s>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0) %}
{%- set begins = 1 if messages[0].role == 'system' else 0 %}
{%- for m in messages[begins:] %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('turns have to alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- elif m.role == 'system' %}{{ raise_exception('only at first') }}{% endif %}{% endfor %}
{%- for m in messages[begins:] %}
{%- if m.role == 'user' %}{% if tools and m == users[-1] -%}
[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {% if begins and m == users[-1] %}{{ messages[0].content }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' and m.tool_calls %} {{ m.content }}[TOOL_CALLS] [{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{{- ', ' if not loop.last }}{% endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""
# No token ends a turn: the next role's does. Arguments are text between tags, a pair each.
GLM = """\
[gMASK]<sop>{% if tools %}<|system|>
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
<tool_call>{function-name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'system' %}<|system|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{%- set text = (m.content or '') %}{% set thought = '' %}
{%- if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set text = text.split('</think>')[-1] %}{% endif %}
<think>{{ thought if loop.index0 > ns.last else '' }}</think>{% if text.strip() %}
{{ text.strip() }}{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for a, v in c.function.arguments.items() %}<arg_key>{{ a }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Channels; a call is a message to a function, and the last answer ends otherwise than earlier ones.
GPT_OSS = """\
<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>{% if tools -%}
<|start|>developer<|message|># Tools
namespace functions {
{% for tool in tools %}type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor %}}<|end|>{% endif %}
{%- set ns = namespace(called='') %}
{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}
{%- set ns.called = c.name %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>
{{- c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template and its tokens. ends: what its models end a turn with. parser: what is found for it; "": none fits."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    ends: tuple[str, ...]
    parser: str
    opening: str


FAMILIES = {
    "Qwen3": Family(
        QWEN3,
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ("<|im_end|>",),
        "hermes",
        "<tool_call>",
    ),
    "Qwen3.5": Family(
        QWEN35,
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ("<|im_end|>",),
        "qwen3_coder",
        "<tool_call>",
    ),
    "Llama 3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        (),
        ("<|eot_id|>",),
        "llama3_json",
        "{",
    ),
    "Mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        (),
        ("</s>",),
        "mistral",
        "[TOOL_CALLS]",
    ),
    "GLM": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ),
        ("<|user|>", "<|observation|>"),
        "glm47",
        "<tool_call>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        (),
        ("<|return|>", "<|call|>"),
        "",
        "",
    ),
}
READ = [name for name, family in FAMILIES.items() if family.parser]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's own tokens."""
    family = FAMILIES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, normalized=False) for text in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=family.ends[0],
        additional_special_tokens=list(family.special),
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


@cache
def probed(name: str) -> ToolFormat:
    tokenizer = tokenizer_of(name)
    ends = [int(each) for each in tokenizer.convert_tokens_to_ids(list(FAMILIES[name].ends))]
    return probe_tools(tokenizer, USUAL, end_tokens(tokenizer, ends, USUAL))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_tools_are_shown_and_its_parser_is_found(name: str) -> None:
    found, family = probed(name), FAMILIES[name]
    assert (found.shows_tools, found.shows_calls, found.shows_results) == (True, True, True)
    assert found.parser == family.parser
    if family.parser:
        assert (found.opening, found.fault) == (family.opening, "")
    else:
        with pytest.raises(InvalidInput, match="no such parser") as refused:
            found.require([ASKED], tools=True)
        assert refused.value.code == "tools_not_taken"


def call_of(number: int, **arguments: object) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def result_of(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "weather"}


# What follows a turn of the model's, and whether that called tools.
FOLLOWING: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "user": (0, [{"role": "user", "content": "And then?"}]),
    "tool": (1, [result_of(0, "rain")]),
    "two tools": (2, [result_of(0, "rain"), result_of(1, "sun")]),
    "system in the middle": (0, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And?"}]),
    "empty content": (0, [{"role": "user", "content": ""}]),
}
# Where nothing can be written behind what was sampled, so that all is rendered anew, or the template refuses the turns.
ANEW = {
    ("Llama 3", "two tools"): "one call at once",
    ("Mistral", "system in the middle"): "only at first",
    # Its last answer ends otherwise than the same answer does once more follows.
    **{("gpt-oss", case): "" for case in FOLLOWING},
}


@pytest.mark.parametrize("case", FOLLOWING)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_is_written_behind_the_sampled_tokens_or_all_is_rendered_anew(name: str, case: str) -> None:
    tokenizer, (calls, following) = tokenizer_of(name), FOLLOWING[case]
    made = [call_of(number, place=f"place {number}") for number in range(calls)]
    answer: dict[str, Any] = {"role": "assistant", "content": "" if made else "Fine."}
    answer |= {"tool_calls": made} if made else {}
    turns = [ASKED, answer, *following]
    prompt = encode_chat(tokenizer, [ASKED], USUAL, TOOLS)
    # As a model may sample it, which is not as any template writes it: white space, and the reasoning before it.
    end = FAMILIES[name].ends[-1 if made else 0]
    sampled = list(tokenizer.encode(f"<think>\nhm\n</think>  as sampled {end}", add_special_tokens=False))
    after = encode_following(tokenizer, turns, 2, USUAL, TOOLS, said=[*prompt, *sampled])
    if (name, case) in ANEW:
        assert after is None
        if refusal := ANEW[name, case]:
            with pytest.raises(InvalidInput, match=refusal):
                encode_chat(tokenizer, turns, USUAL, TOOLS)
        return
    assert after is not None
    text = tokenizer.decode(after)
    # It is what the template writes after the end of that turn, and begins the model's next one.
    whole = render_turns(tokenizer, turns, USUAL, asks=True, tools=TOOLS)
    assert whole.endswith(text)
    assert all(each["content"] in text for each in following)
    unasked = render_turns(tokenizer, turns, USUAL, asks=False, tools=TOOLS)
    assert text.endswith(whole[len(unasked) :])
    assert "How is it?" not in text, "nothing before it is said twice"
    # What was sampled stays as it is, with its reasoning, whatever the template does to that of earlier turns.
    fed = [*prompt, *sampled, *after]
    assert tokenizer.decode(fed).count("hm") == 1
    cut = encode_following(tokenizer, turns, 2, USUAL, TOOLS, said=[*prompt, *sampled[:-1]])
    # Of GLM's turns it is whatever comes next that ends them.
    ended = (name, case) == ("GLM", "system in the middle")
    assert cut == (after if ended else [sampled[-1], *after]), "a turn that was cut is ended first"


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5", "GLM"])
def test_reasoning_that_a_template_leaves_out_later_is_still_read_by_the_model_that_thought_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    thought: dict[str, Any] = {"role": "assistant", "content": "<think>\nsecret reasons\n</think>\n\nFine."}
    turns = [ASKED, thought, {"role": "user", "content": "And then?"}]
    rendered = tokenizer.decode(encode_chat(tokenizer, turns, USUAL, TOOLS))
    assert "secret reasons" not in rendered, "the template writes no reasoning of earlier questions"
    prompt = encode_chat(tokenizer, [ASKED], USUAL, TOOLS)
    end = FAMILIES[name].ends[0]
    sampled = tokenizer.encode(f"<think>\nsecret reasons\n</think>\n\nFine.{end}", add_special_tokens=False)
    after = encode_following(tokenizer, turns, 2, USUAL, TOOLS, said=[*prompt, *sampled])
    assert after is not None
    kept = tokenizer.decode([*prompt, *sampled, *after])
    assert "secret reasons" in kept
    assert rendered.endswith(tokenizer.decode(after))


def written_by(name: str, content: str, *calls: dict[str, Any]) -> str:
    """The calls as the family's template writes them after a text, up to the end of the turn."""
    tokenizer = tokenizer_of(name)
    answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    whole = render_turns(tokenizer, [ASKED, answer], USUAL, asks=False, tools=TOOLS)
    begun = render_turns(tokenizer, [ASKED], USUAL, asks=False, tools=TOOLS)
    assert whole.startswith(begun)
    text = whole[len(begun) :]
    for tag in ("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>"):
        text = text.removeprefix(tag)
    for end in (*FAMILIES[name].ends, "\n"):
        text = text.removesuffix("\n").removesuffix(end)
    # Reasoning is taken off before a parser sees an answer.
    return text.rpartition("</think>")[2].lstrip("\n")


ODD = {"place": 'Malmö "zentrum" \\ 東京', "days": 3}


@pytest.mark.parametrize("name", READ)
def test_a_call_is_the_same_after_it_was_written_and_read(name: str) -> None:
    tokenizer, parser = tokenizer_of(name), probed(name).parser
    text = written_by(name, "", call_of(0, **ODD))
    content, (call,) = read_calls(tokenizer, parser, text, TOOLS)
    assert (content.strip(), call.name, json.loads(call.arguments)) == ("", "weather", ODD)


@pytest.mark.parametrize("name", [each for each in READ if each != "Llama 3"])
def test_two_calls_and_the_text_before_them_are_the_same_after_they_were_written_and_read(name: str) -> None:
    tokenizer, parser = tokenizer_of(name), probed(name).parser
    text = written_by(name, "Let me look.", call_of(0, **ODD), call_of(1, place="Oslo", days=1))
    content, calls = read_calls(tokenizer, parser, text, TOOLS)
    assert content.strip() == "Let me look."
    assert [json.loads(each.arguments) for each in calls] == [ODD, {"place": "Oslo", "days": 1}]
    assert len({each.id for each in calls}) == 2


@pytest.mark.parametrize("name", ["Qwen3", "Llama 3", "Mistral"])
def test_unicode_escapes_are_read_as_what_they_stand_for(name: str) -> None:
    text = written_by(name, "", call_of(0, place="Malmö", days=3)).replace("ö", "\\u00f6")
    assert "\\u00f6" in text
    _, (call,) = read_calls(tokenizer_of(name), probed(name).parser, text, TOOLS)
    assert json.loads(call.arguments) == {"place": "Malmö", "days": 3}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", READ)
def test_a_broken_call_and_one_that_was_cut_are_text_in_whatever_parts_they_come(name: str, size: int) -> None:
    whole = written_by(name, "", call_of(0, place="Malmö", days=3))
    broken = whole.replace('"name": "weather",', '"name" "weather" {', 1) if '"name"' in whole else whole[:12] + ">"
    for text in (broken, whole[: len(whole) * 2 // 3]):
        reader = AnswerReader(tokenizer_of(name), probed(name), TOOLS, USUAL.reasoning_length)
        parts = [
            reader.take(text[start : start + size], ended=start + size >= len(text))
            for start in range(0, len(text), size)
        ]
        assert "".join(shown for shown, _ in parts) == text
        assert not any(calls for _, calls in parts)
        assert reader.malformed, "it is counted"
