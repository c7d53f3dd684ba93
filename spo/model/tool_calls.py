"""Tools in a chat: whether a model's template writes them, which of vLLM's parsers reads the calls that it writes, and
what of a sampled answer is text and what calls.

A parser fits a model where it reads what the template writes: parse(render(call)) == call. It shapes the answer and
nothing else: the sampled tokens stay as they are. No parser of our own; vLLM is imported where one is asked for.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spo.errors import InvalidInput
from spo.model.chat import ChatFormat
from spo.model.tokenizer import render_turns, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a model writes takes less than a hundredth of it.
PARSE_SECONDS = 2.0
PROBED = "probe_8c1f"
RESULT = "result-8c1f"
ARGUMENTS: Mapping[str, object] = {"place": "Malmö", "days": 3}
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": PROBED, "description": "Looks it up.", "parameters": _PARAMETERS}}
_ASKS = {"role": "user", "content": "x"}
# Nine letters or digits: Mistral's templates refuse other ids.
_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcde8c1f", "type": "function", "function": {"name": PROBED, "arguments": ARGUMENTS}}],
}
_ANSWERS = {"role": "tool", "content": RESULT, "tool_call_id": "abcde8c1f", "name": PROBED}
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")

# What a template's text has in it, and the parsers of such models; each is tried, and the first that fits is taken.
_FEATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<function=", ("qwen3_coder", "qwen3_xml", "seed_oss")),
    ("<arg_key>", ("glm47", "glm45")),
    ("<longcat_tool_call>", ("longcat",)),
    ("<minimax:tool_call>", ("minimax_m2",)),
    ("<tool_call>", ("hermes",)),
    ("[TOOL_CALLS]", ("mistral",)),
    ("<|tool_calls_section_begin|>", ("kimi_k2",)),
    ("<｜tool▁calls▁begin｜>", ("deepseek_v31", "deepseek_v3")),  # noqa: RUF001 - the tokens' own characters
    ("<|tool_call_start|>", ("lfm2",)),
    ("<start_function_call>", ("functiongemma",)),
    ("<|tool_call>", ("gemma4",)),
    ("<|channel|>", ("openai",)),
    ("functools", ("phi4_mini_json",)),
    ("<tool_calls>", ("jamba", "hunyuan_a13b")),
    ("<|action_start|>", ("internlm",)),
    ("<|tool_call|>", ("granite",)),
    ("", ("hermes", "llama3_json", "pythonic", "olmo3", "xlam")),
)


@dataclass(frozen=True)
class SampledCall:
    """A call that the model has written; arguments: an object as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model's tools are written and read: what its template shows, and the parser that reads its calls.

    opening: what a call begins with. closing: what ends one whose arguments are no JSON, so that one that was cut is
    told from a whole one; else "". fault: why there is no parser; else "".
    """

    shows_tools: bool = False
    shows_calls: bool = False
    shows_results: bool = False
    parser: str = ""
    opening: str = ""
    closing: str = ""
    fault: str = ""

    def require(self, turns: Sequence[Mapping[str, object]], *, tools: bool) -> None:
        """Raises InvalidInput (code "tools_not_taken") where the template leaves out what a chat holds."""
        calls = any(turn.get("tool_calls") for turn in turns)
        results = any(turn["role"] == "tool" for turn in turns)
        reason = ""
        if tools and not self.shows_tools:
            reason = "leaves out tools: the model would never see them"
        elif calls and not self.shows_calls:
            reason = "leaves out the calls of earlier turns"
        elif results and not self.shows_results:
            reason = "leaves out what tools answer"
        if reason:
            raise InvalidInput(f"the model's chat template {reason}", code="tools_not_taken")
        if tools and self.fault:
            raise InvalidInput(self.fault, code="tools_not_taken")


def probe_tools(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, ends: Sequence[int]) -> ToolFormat:
    """Return how the model's tools are written and read, by writing some; ends: the tokens that end a response."""
    if chat.template == "none" or tokenizer.chat_template is None:
        return ToolFormat(fault="the model has no chat template that takes tools")

    def written(*turns: dict[str, Any], asks: bool, tools: Sequence[Mapping[str, Any]] = (_TOOL,)) -> str:
        try:
            return render_turns(tokenizer, turns, chat, asks=asks, tools=tools)
        except InvalidInput:
            return ""

    asked = written(_ASKS, asks=True)
    begun, called = written(_ASKS, asks=False), written(_ASKS, _CALLS, asks=False)
    if PROBED not in asked:
        return ToolFormat(
            shows_calls=called.count(PROBED) > begun.count(PROBED),
            shows_results=RESULT in written(_ASKS, _CALLS, _ANSWERS, asks=True),
            fault="the model's chat template leaves out tools",
        )
    shows_results = RESULT in written(_ASKS, _CALLS, _ANSWERS, asks=True)
    if called.count(PROBED) <= begun.count(PROBED):
        fault = "the model's chat template leaves out calls of tools, so that none can be read"
        return ToolFormat(shows_tools=True, shows_results=shows_results, fault=fault)
    sampled = _as_sampled(tokenizer, called, (asked, begun), ends)
    # Some templates write reasoning before the call, though there is none: it is no call's beginning.
    before = sampled.partition(PROBED)[0]
    opening = _opening(before[chat.reasoning_length(before) :], written(_ASKS, asks=True, tools=()))
    names = _candidates(tokenizer) if chat.tool_parser == "auto" else (chat.tool_parser,)
    parser = next((name for name in names if _fits(tokenizer, name, sampled)), "")
    fault = (
        "" if parser else f"{' and '.join(names)}: no such parser of vLLM's reads the calls that the template writes"
    )
    # Where the arguments are JSON, a part of them is none.
    tags = [] if '"place"' in sampled else _TAG.findall(sampled.rpartition(opening)[2])
    return ToolFormat(
        shows_tools=True,
        shows_calls=True,
        shows_results=shows_results,
        parser=parser,
        opening=opening,
        closing=tags[-1] if tags else "",
        fault=fault,
    )


def read_calls(
    tokenizer: PreTrainedTokenizerBase, parser: str, text: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, tuple[SampledCall, ...]]:
    """Return what of an answer is text, and its calls; all is text where it does not parse."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # They log what does not parse, with its text.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        request = ChatCompletionRequest.model_validate(
            {"model": "policy", "messages": [_ASKS], "tools": list(tools), "tool_choice": "auto"}
        )
        # Importing it is no work on the text.
        kind = ToolParserManager.get_tool_parser(parser)
        with time_limit(PARSE_SECONDS, "the parser of tool calls"):
            # vLLM types a protocol that transformers' tokenizers do not declare.
            reader = kind(tokenizer, request.tools)  # type: ignore[arg-type]
            found = reader.extract_tool_calls(text, request)
        calls = tuple(SampledCall(each.id, each.function.name, each.function.arguments) for each in found.tool_calls)
        if not found.tools_called or not calls or not all(map(_is_whole, calls)):
            return text, ()
    # A parser fails in whatever way the sampled text makes it.
    except Exception:
        return text, ()
    return found.content or "", calls


@dataclass(frozen=True)
class Constraint:
    """What an answer is held to: OpenAI's tool_choice, strict tools, or a JSON schema.

    thought_end: what ends reasoning that the prompt has begun, before which nothing is held; "" where it has not.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: object = "auto"
    schema: Mapping[str, Any] | None = None
    thought_end: str = ""
    one_call: bool = False

    def structural_tag(self, tokenizer: PreTrainedTokenizerBase, parser: str) -> str:
        """Return the grammar as vLLM takes it, JSON; "" where nothing is held.

        Raises InvalidInput (code "tools_not_taken") where a call is asked for and vLLM has no grammar of the parser's.
        """
        form = self._calls(tokenizer, parser) if self.tools and self.choice != "none" else None
        if self.schema is not None and self.choice in ("auto", "none"):
            answer = {"type": "json_schema", "json_schema": dict(self.schema)}
            form = answer if form is None else {"type": "or", "elements": [form, answer]}
        if form is None:
            return ""
        if self.thought_end:
            thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": self.thought_end}
            form = {"type": "sequence", "elements": [thought, form]}
        return json.dumps({"type": "structural_tag", "format": form})

    def _calls(self, tokenizer: PreTrainedTokenizerBase, parser: str) -> object:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
        from vllm.tool_parsers.structural_tag_registry import limit_to_single_tool_call

        # A call or an answer by the schema: text would be neither.
        choice = "required" if self.choice == "auto" and self.schema is not None else self.choice
        asked = {"model": "policy", "messages": [_ASKS], "tools": list(self.tools), "tool_choice": choice}
        try:
            request = ChatCompletionRequest.model_validate(asked)
            # vLLM types a protocol that transformers' tokenizers do not declare.
            reader = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)  # type: ignore[arg-type]
            tag = reader.get_structural_tag(request)
        except (ValueError, TypeError, RecursionError) as error:
            message = f"no grammar can be made of these tools: {error}"
            raise InvalidInput(message[:500], code="tools_not_taken") from error
        if tag is None and self.choice != "auto":
            message = f"vLLM has no grammar of the calls that its parser {parser} reads: leave tool_choice at auto"
            raise InvalidInput(message, code="tools_not_taken")
        if tag is not None and self.one_call:
            limit_to_single_tool_call(tag)
        return None if tag is None else tag.model_dump()["format"]


class AnswerReader:
    """One sample as it comes: its text until calls may begin, at its end the rest and the calls.

    reasoning_length: how many characters of the text so far are reasoning, in which nothing is called.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        reasoning_length: Callable[[str], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._tools = tools
        self._reasoning_length = reasoning_length
        self._text = ""
        self._sent = 0
        self.malformed = False

    def take(self, text: str, *, ended: bool) -> tuple[str, tuple[SampledCall, ...]]:
        """Return the text that can be shown now, and once the sample has ended its calls."""
        self._text += text
        thought = self._reasoning_length(self._text)
        answer = self._text[thought:]
        if not ended:
            shown = self._text[: thought + before_call(answer, self._form.opening)]
            new, self._sent = shown[self._sent :], max(self._sent, len(shown))
            return new, ()
        rest = answer
        calls: tuple[SampledCall, ...] = ()
        # Some parsers take what there is of a call that was cut for all of it.
        if answer.rfind(self._form.opening) <= answer.rfind(self._form.closing):
            rest, calls = read_calls(self._tokenizer, self._form.parser, answer, self._tools)
        self.malformed = not calls and _seems_a_call(answer, self._form.opening)
        shown = self._text[:thought] + rest
        # What a parser makes of white space before a call cannot be taken back.
        return shown[self._sent :] if shown.startswith(self._text[: self._sent]) else "", calls


def before_call(text: str, opening: str) -> int:
    """How many characters of a text surely stand before any call; white space waits for what follows it."""
    begins = text.find(opening) if opening else 0
    if begins < 0:
        begins = next(
            (len(text) - size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size])), len(text)
        )
    return len(text[:begins].rstrip())


def _seems_a_call(text: str, opening: str) -> bool:
    return opening in text if len(opening) > 1 else text.lstrip().startswith(opening or "{")


def _is_whole(call: SampledCall) -> bool:
    """Whether it can be shown to the template again."""
    return bool(call.name) and isinstance(json.loads(call.arguments), dict)


def _candidates(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    template = str(tokenizer.chat_template)
    return tuple(dict.fromkeys(name for feature, names in _FEATURES if feature in template for name in names))


def _fits(tokenizer: PreTrainedTokenizerBase, parser: str, sampled: str) -> bool:
    _, calls = read_calls(tokenizer, parser, sampled, [_TOOL])
    return [(call.name, json.loads(call.arguments)) for call in calls] == [(PROBED, ARGUMENTS)]


def _as_sampled(tokenizer: PreTrainedTokenizerBase, whole: str, before: Sequence[str], ends: Sequence[int]) -> str:
    """What the model would have sampled of a rendered turn: what follows the prompt, up to a token that ends it."""
    begins = next((len(prompt) for prompt in before if prompt and whole.startswith(prompt)), 0)
    token_ids = list(tokenizer.encode(whole[begins:], add_special_tokens=False))
    length = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
    return str(tokenizer.decode(token_ids[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _opening(before_name: str, without_tools: str) -> str:
    """What a call begins with: the first tag that no turn begins with, or the first character."""
    tags = (tag for tag in _TAG.findall(before_name) if tag not in without_tools)
    return next(tags, before_name.strip()[:1])
