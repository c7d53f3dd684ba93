"""Tools as templates write them and vLLM's parsers read them, and what of an answer is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.model.chat import USUAL, ChatFormat
from spo.model.tokenizer import encode_chat, encode_following
from spo.model.tool_calls import AnswerReader, Constraint, ToolFormat, before_call, probe_tools, read_calls
from tests.support.scripted_model import TEMPLATE, TOOLS, hermes_tokenizer

HERMES = ToolFormat(shows_tools=True, shows_calls=True, shows_results=True, parser="hermes", opening="<tool_call>")
LOOSE: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURNS = (
    "{% for m in messages %}{{ '<ask>' if m.role == 'assistant' else '<turn>' }}{{ m.content }}CALLS<end>{% endfor %}"
    "{% if add_generation_prompt %}<ask>{% endif %}"
)
CODER = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for a, v in "
    "c.function.arguments.items() %}<parameter={{ a }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
PYTHONIC = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({% for a, v in c.function.arguments.items() %}{{ a }}="
    "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})]{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


def probed(template: str | None, parser: str = "auto") -> ToolFormat:
    tokenizer = hermes_tokenizer()
    tokenizer.chat_template = template  # type: ignore[assignment]
    return probe_tools(tokenizer, ChatFormat(tool_parser=parser), [tokenizer.eos_token_id])


@pytest.mark.parametrize(
    ("template", "parser", "opening"),
    [
        (TEMPLATE, "hermes", "<tool_call>"),
        (LISTED + TURNS.replace("CALLS", CODER), "qwen3_coder", "<tool_call>"),
        (LISTED + TURNS.replace("CALLS", PYTHONIC), "pythonic", "["),
    ],
)
def test_a_parser_is_found_that_reads_what_the_template_writes(template: str, parser: str, opening: str) -> None:
    found = probed(template)
    assert (found.parser, found.opening, found.fault) == (parser, opening, "")
    assert found.shows_results
    assert probed(template, parser) == found


@pytest.mark.parametrize(
    ("template", "parser", "fault"),
    [
        (None, "auto", "no chat template"),
        (TURNS.replace("CALLS", ""), "auto", "leaves out tools"),
        (LISTED + TURNS.replace("CALLS", ""), "auto", "leaves out calls"),
        (TEMPLATE, "pythonic", "no such parser"),
        (TEMPLATE, "nobodys", "no such parser"),
        ("{{ raise_exception('no') }}", "auto", "leaves out tools"),
    ],
)
def test_what_no_parser_reads_is_a_fault(template: str | None, parser: str, fault: str) -> None:
    found = probed(template, parser)
    assert not found.parser
    assert fault in found.fault
    with pytest.raises(InvalidInput) as caught:
        found.require([{"role": "user"}], tools=True)
    assert caught.value.code == "tools_not_taken"


def test_turns_that_a_template_leaves_out_are_refused_also_without_tools() -> None:
    shows_results = ToolFormat(shows_results=True)
    shows_results.require([{"role": "user"}, {"role": "tool"}], tools=False)
    with pytest.raises(InvalidInput, match="calls of earlier turns"):
        shows_results.require([{"role": "assistant", "tool_calls": [{}]}], tools=False)
    with pytest.raises(InvalidInput, match="what tools answer"):
        ToolFormat().require([{"role": "tool"}], tools=False)


def test_a_tool_that_the_template_leaves_out_of_this_chat_is_refused() -> None:
    tokenizer = hermes_tokenizer("{% if messages | length > 1 %}{{ tools }}{% endif %}{{ messages[0].content }}")
    with pytest.raises(InvalidInput) as caught:
        encode_chat(tokenizer, [{"role": "user", "content": "x"}], USUAL, TOOLS)
    assert caught.value.code == "tools_not_taken"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", 0),
        (CALL, "", 1),
        (f"Let me look.\n{CALL}\n{CALL}", "Let me look.\n", 2),
        ('<tool_call>{"name": "weather", "arguments": {"place": "\\u00d8"}}</tool_call>', "", 1),
        (f"{CALL}<tool_call>broken", f"{CALL}<tool_call>broken", 0),
        (CALL[:-30], CALL[:-30], 0),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', None, 0),
        ('<tool_call>{"name": "weather", "arguments": "x"}</tool_call>', None, 0),
        ('<tool_call>{"arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, 0),
    ],
)
def test_a_call_that_does_not_parse_is_text(text: str, content: str | None, calls: int) -> None:
    found, read = read_calls(hermes_tokenizer(), "hermes", text, TOOLS)
    assert (found, len(read)) == (text if content is None else content, calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in read)
    assert len({call.id for call in read}) == calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls", "malformed"),
    [
        (f"Let me look.\n{CALL}", "Let me look.\n", 1, False),
        ("a < b, <tool", "a < b, <tool", 0, False),
        (f"<think>{CALL}</think>No.", f"<think>{CALL}</think>No.", 0, False),
        (f"<think>x</think>{CALL}", "<think>x</think>", 1, False),
        ("so <tool_call>nothing", "so <tool_call>nothing", 0, True),
        (f"<think>{CALL}", f"<think>{CALL}", 0, False),
    ],
)
def test_parts_of_an_answer_make_what_the_whole_makes(
    text: str, shown: str, calls: int, *, malformed: bool, size: int
) -> None:
    reader = AnswerReader(hermes_tokenizer(), HERMES, TOOLS, USUAL.reasoning_length)
    parts: list[tuple[str, Any]] = [
        reader.take(text[start : start + size], ended=start + size >= len(text)) for start in range(0, len(text), size)
    ]
    assert "".join(part for part, _ in parts) == shown
    assert [len(found) for _, found in parts] == [0] * (len(parts) - 1) + [calls]
    assert reader.malformed == malformed


@pytest.mark.parametrize(
    ("text", "sure"),
    [("abc", 3), ("abc ", 3), ("abc <", 3), ("abc <tool_cal", 3), ("a <b", 4), ("x\n<tool_call>y", 1), ("", 0)],
)
def test_text_is_shown_until_a_call_may_begin(text: str, sure: int) -> None:
    assert before_call(text, "<tool_call>") == sure


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (Constraint(TOOLS, "required"), "tags_with_separator"),
        (Constraint(TOOLS, {"type": "function", "function": {"name": "weather"}}), "tags_with_separator"),
        (Constraint(TOOLS), "triggered_tags"),
        (Constraint(LOOSE), None),
        (Constraint(LOOSE, "none"), None),
        (Constraint(LOOSE, schema={"type": "object"}), "or"),
        (Constraint(schema={"type": "object"}), "json_schema"),
        (Constraint(schema={"type": "object"}, thought_end="</think>"), "sequence"),
        (Constraint(), None),
    ],
)
def test_an_answer_is_held_to_what_the_caller_chose(held: Constraint, kind: str | None) -> None:
    tag = held.structural_tag(hermes_tokenizer(), "hermes")
    assert (json.loads(tag)["format"]["type"] if tag else None) == kind


def test_a_call_that_no_grammar_describes_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidInput) as refused:
        Constraint(TOOLS, "required").structural_tag(hermes_tokenizer(), "pythonic")
    assert refused.value.code == "tools_not_taken"
    assert Constraint(TOOLS).structural_tag(hermes_tokenizer(), "pythonic") == ""


FOLLOWING: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "go on"}],
    [{"role": "tool", "content": "rain", "tool_call_id": "c", "name": "weather"}],
    [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}, {"role": "user", "content": "and?"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": ""}],
]


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("following", FOLLOWING)
def test_what_follows_an_answer_is_what_the_template_writes_after_the_sampled_tokens(
    following: list[dict[str, Any]], *, calls: bool
) -> None:
    tokenizer = hermes_tokenizer()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
    answer = {"role": "assistant", "content": "Let me look.", **({"tool_calls": [call]} if calls else {})}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    prompt = encode_chat(tokenizer, asked, USUAL, TOOLS)
    whole = encode_chat(tokenizer, [*asked, answer, *following], USUAL, TOOLS)
    # As it was sampled: white space that no template writes.
    sampled = [*tokenizer.encode("Let  me  look .", add_special_tokens=False), tokenizer.eos_token_id]
    after = encode_following(tokenizer, [*asked, answer, *following], 2, USUAL, TOOLS, said=[*prompt, *sampled])
    assert after is not None
    text = tokenizer.decode([*prompt, *sampled, *after])
    assert text.startswith(tokenizer.decode([*prompt, *sampled]))
    assert tokenizer.decode(whole).endswith(tokenizer.decode(after))
    assert tokenizer.decode(after).count("<turn>") == len(following)
    cut = encode_following(tokenizer, [*asked, answer, *following], 2, USUAL, TOOLS, said=[*prompt, *sampled[:-1]])
    assert cut == [tokenizer.eos_token_id, *after]


def test_a_template_that_writes_earlier_turns_otherwise_later_or_drops_one_gives_nothing_that_follows() -> None:
    tokenizer = hermes_tokenizer()
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "go on"},
    ]
    for template in (
        "{% for m in messages %}<turn>{{ messages | length }}{{ m.content }}<end>{% endfor %}<ask>",
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ '!' if loop.last }}<end>{% else %}"
        "<turn>{{ m.content }}<end>{% endif %}{% endfor %}<ask>",
        "{% for m in messages[:2] %}<turn>{{ m.content }}<end>{% endfor %}<ask>",
    ):
        tokenizer.chat_template = template
        assert encode_following(tokenizer, turns, 2, USUAL, said=[1]) is None, template


def test_a_result_that_names_a_special_token_ends_no_turn() -> None:
    tokenizer = hermes_tokenizer()
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "a<end><ask>b"},
    ]
    after = encode_following(tokenizer, turns, 2, USUAL, said=[tokenizer.eos_token_id])
    assert after is not None
    assert tokenizer.decode(after) == "<turn>user: ab<end><ask>"


def test_an_end_that_is_a_stop_string_is_not_written_twice() -> None:
    tokenizer = hermes_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}"
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "go on"},
    ]
    said = tokenizer.encode("y###", add_special_tokens=False)
    assert len(tokenizer.encode("###", add_special_tokens=False)) > 1
    whole = encode_following(tokenizer, turns, 2, USUAL, said=said)
    assert tokenizer.decode(whole or []) == "\nuser: go on###\n"
