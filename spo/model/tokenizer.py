"""A model's tokenizer and chat template: from the text of a problem to tokens, and no torch.

A template is a program of whoever made the model. It runs in the processes that serve everybody, so each rendering has
a limit of time: one that loops ends with InvalidInput in place of holding the process. What a single step may compute
is bounded as well, since no line ends within it.

Bounds on what one step of a chat template may make: a power, a repetition, a width, a joined text.

A limit of time between lines does not reach into a single operation, which may take for ever, or all memory. So those
that can make much of little are refused where their result would be large; real templates come nowhere near.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer
from typing_extensions import override

from spo.errors import InvalidInput
from spo.model.chat import USUAL, ChatFormat
from spo.model.folder import inspect_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_CHARACTERS = 8 << 20
MOST_ELEMENTS = 1 << 20
MOST_BITS = 1 << 12
MOST_WIDTH = 10_000
# A width or precision of more than three digits, or one that is an argument.
_WIDE = re.compile(r"\d{4,}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_PADDING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round")


def bound_templates() -> None:
    """Have transformers compile chat templates under these bounds; for the time before the first is compiled."""
    _replace_environment()


@cache
def _replace_environment() -> None:
    from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", BoundedEnvironment)  # noqa: B010 - not exported


def _require(size: int, most: int, what: str) -> None:
    if size > most:
        raise OverflowError(f"the template makes too much at once: {what}")


def _widest(values: Iterable[object]) -> int:
    return max((abs(each) for each in values if isinstance(each, int)), default=0)


def joined(parts: Iterable[object]) -> str:
    """Texts one after the other. Raises OverflowError where together they are too long."""
    texts, characters = [], 0
    for part in parts:
        texts.append(str(part))
        characters += len(texts[-1])
        _require(characters, MOST_CHARACTERS, "a text")
    return "".join(texts)


class _Joining(CodeGenerator):
    """Joins texts by `joined` where a template has `~`."""

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, in which no single step makes much of little."""

    intercepted_binops = frozenset({"**", "*", "+", "%"})
    code_generator_class = _Joining
    concat = staticmethod(joined)
    joined = staticmethod(joined)

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)
        for name in _PADDING_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["replace"] = lambda text, old, new, count=None: _replaced(str(text), str(old), str(new), count)
        self.filters["format"] = lambda text, *values, **named: self._formatted(str(text), values or named)
        self.filters["join"] = self._join_filter

    @override
    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The result of an operator. Raises OverflowError where it would be too large."""
        if operator == "%" and isinstance(left, str | bytes):
            return self._formatted(left, right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _require(bits, MOST_BITS, f"a number by {operator}")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, Sized) and isinstance(times, int):
                    _require(len(sized) * times, MOST_ELEMENTS, "a repetition")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _require(len(left) + len(right), MOST_CHARACTERS, "a sum")
        return super().call_binop(context, operator, left, right)

    @override
    def call(self, context: Context, function: object, *arguments: object, **named: object) -> object:
        """The result of a call. Raises OverflowError where a text's method would make too much."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int):
            given = [*arguments, *named.values()]
            if name in _PADDING:
                _require(_widest(given), MOST_WIDTH, "a width")
            elif name == "replace" and isinstance(owner, str) and len(arguments) >= 2:
                return _replaced(owner, *arguments)  # type: ignore[arg-type]
            elif name == "join" and isinstance(owner, str) and len(arguments) == 1:
                return _join(arguments[0], owner)  # type: ignore[arg-type]
            _require(name == "translate", 0, "a translation")
        return super().call(context, function, *arguments, **named)

    @override
    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Raises OverflowError where a text that formats others has a large width."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _require(bool(_WIDE.search(owner)), 0, "a width")
        return super().wrap_str_format(value)

    def _join_filter(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        return _join(values, d) if attribute is None else _join(values, d, make_attrgetter(self, attribute))

    def _formatted(self, text: str | bytes, values: object) -> object:
        _require(len(text), MOST_ELEMENTS, "a format")
        _require(bool(_WIDE.search(text if isinstance(text, str) else text.decode("latin-1"))), 0, "a width")
        return text % values


def _narrow(padded: Callable[..., object]) -> Callable[..., object]:
    """A filter whose widths are bounded; what jinja notes on filters stays."""

    def narrow(*arguments: object, **named: object) -> object:
        _require(_widest([*arguments[1:], *named.values()]), MOST_WIDTH, "a width")
        return padded(*arguments, **named)

    narrow.__dict__.update(getattr(padded, "__dict__", {}))
    return narrow


def _replaced(text: str, old: str, new: str, count: int | None = -1) -> str:
    times = text.count(old)
    _require(len(text) + times * max(0, len(new) - len(old)), MOST_CHARACTERS, "a replacement")
    return text.replace(old, new, -1 if count is None else count)


def _join(values: Iterable[Any], between: str = "", part_of: Callable[[Any], object] = lambda value: value) -> str:
    texts: list[object] = []
    for value in values:
        texts += [between, part_of(value)] if texts else [part_of(value)]
        _require(len(texts), MOST_ELEMENTS, "a join")
    return joined(texts)


# A real template takes less than a thousandth of it.
RENDER_SECONDS = 2.0
# What a template is told of today: what is kept of a prompt (values, samples, log-probs) holds for its very tokens,
# which would be others tomorrow. A job that wants a day names it among its template's arguments.
DAY = datetime(2024, 7, 26, tzinfo=UTC)
# Eight times the longest statement that a task file may have.
MAX_RENDERED_CHARACTERS = 8 << 20


_MARKER_TOKENS = 300
# A turn whose end is looked for; no template has it in its own text.
_SAID = "said-8c1f"
# What a template's own program can end with.
_FAULTS = (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an inspected folder; InvalidInput when the folder may not be loaded."""
    folder = inspect_model_folder(path).path
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat = USUAL) -> list[int]:
    """Return the prompt's tokens: one user turn of the chat template, or plain text where none is there or wanted.

    Raises InvalidInput (code "template_refused") when the template refuses the turn, leaves out the system prompt, or
    takes longer than RENDER_SECONDS.
    """
    if not _has_turns(tokenizer, chat):
        if chat.system is not None:
            raise InvalidInput("the model has no chat template that takes a system prompt", code="template_refused")
        return encode_text(tokenizer, text)
    rendered = render_turns(tokenizer, _turns(text, chat), chat, asks=True)
    if chat.system is not None and chat.system.strip() not in rendered:
        raise InvalidInput("the chat template leaves the system prompt out", code="template_refused")
    # Templates write the special tokens themselves.
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a plain prompt with what the tokenizer begins a text with, without what it ends one with."""
    tokens = list(tokenizer.encode(text))
    bare = list(tokenizer.encode(text, add_special_tokens=False))
    for start in range(len(tokens) - len(bare) + 1):
        if bare and tokens[start : start + len(bare)] == bare:
            # The model is to go on with the text: nothing has ended.
            return tokens[: start + len(bare)]
    return tokens


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, object]],
    chat: ChatFormat = USUAL,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the prompt's tokens of a conversation so far, up to the model's next turn, in which it may call tools.

    turns: role and content of each, with tool_calls, tool_call_id and name as chat templates take them; tools: OpenAI's
    function tools. A single turn of the user's without tools gives what `encode_prompt` gives: the job's system prompt
    goes before it. Raises InvalidInput (code "template_refused") as it does, and where a model without turns is sent
    more than one; code "tools_not_taken" where the template leaves out a tool.
    """
    if not tools and [turn["role"] for turn in turns] == ["user"]:
        return encode_prompt(tokenizer, str(turns[0]["content"]), chat)
    if not _has_turns(tokenizer, chat):
        message = "the model has no chat template: send one message of the user's, or a prompt to /v1/completions"
        raise InvalidInput(message, code="template_refused")
    begins = [] if turns[0]["role"] == "system" or chat.system is None else _turns("", chat)[:1]
    rendered = render_turns(tokenizer, [*begins, *map(dict, turns)], chat, asks=True, tools=tools)
    for name in (str(tool["function"]["name"]) for tool in tools):
        if name not in rendered:
            raise InvalidInput(f"the model's chat template leaves out the tool {name}", code="tools_not_taken")
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def encode_response(
    tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat = USUAL, *, ended: bool = True
) -> list[int]:
    """Return the tokens of a response written by someone else, with what ends it where it has ended.

    That is the token with which the chat template ends a turn of the model's, or else the tokenizer's end-of-sequence
    token; where responses are no turns of a chat, it is the first stop string. An end that the text itself names at its
    end is not written twice; other names of special tokens are text, but for the marks of reasoning.
    """
    text = without_end(tokenizer, text, chat)
    if ended and chat.stop and not _has_turns(tokenizer, chat):
        return _encode_plain(tokenizer, text + chat.stop[0], chat)
    tokens = _encode_plain(tokenizer, text, chat)
    if not ended:
        return tokens
    end = _end_of_turn(tokenizer, chat)
    return [*tokens, int(tokenizer.eos_token_id) if end is None else end]


def without_end(tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat = USUAL) -> str:
    """The text of a response without the names of tokens that end one at its end, and white space around them."""
    names = [str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer, (), chat)]
    special = [name for name in names if name in _special_names(tokenizer)]
    while (bare := text.rstrip()).endswith(tuple(special)):
        text = bare[: -max(len(name) for name in special if bare.endswith(name))]
    return text


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat) -> list[int]:
    """The tokens of a text in which names of special tokens are text; those of reasoning marks stay what they are."""
    marks = chat.reasoning or ()
    names = [name for name in _special_names(tokenizer) if name in text and not any(name in mark for mark in marks)]
    if not names:
        return list(tokenizer.encode(text, add_special_tokens=False))
    tokens: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})", text):
        # Half a name is no token of that name.
        halves = (piece[: len(piece) // 2], piece[len(piece) // 2 :]) if piece in names else (piece,)
        tokens += (token for half in halves for token in tokenizer.encode(half, add_special_tokens=False))
    return tokens


def _special_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def encode_observation(
    tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat = USUAL, *, said: Sequence[int] = ()
) -> list[int]:
    """Return the tokens that stand between what the model has written and its next turn, in which `text` is said to it.

    They are what the chat template writes from the end of the model's turn on, without its first token where the
    sampled tokens `said` end with it already; plain text where responses are no turns of a chat. Names of special
    tokens are left out of the text, so that no observation ends its own turn.

    Raises InvalidInput (code "template_refused") when the template refuses a second turn or leaves the text out.
    """
    shown = _without_special(tokenizer, text)
    if not _has_turns(tokenizer, chat):
        return list(tokenizer.encode(shown, add_special_tokens=False))
    turns = [*_turns("x", chat), {"role": "assistant", "content": _SAID}, {"role": "user", "content": shown}]
    between = render_turns(tokenizer, turns, chat, asks=True).partition(_SAID)[2]
    if shown.strip() not in between:
        raise InvalidInput("the chat template leaves out what an environment says", code="template_refused")
    # Some templates write white space before the end, which the model has not sampled.
    tokens = list(tokenizer.encode(between.lstrip(), add_special_tokens=False))
    if said and tokens[:1] == list(said[-1:]):
        return tokens[1:]
    return list(tokenizer.encode(between, add_special_tokens=False))


def encode_following(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, object]],
    known: int,
    chat: ChatFormat = USUAL,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    said: Sequence[int],
) -> list[int] | None:
    """Return the tokens between what the model has sampled and its next turn, in which turns[known:] are said to it.

    turns[known - 1] is what the model said, whose own tokens `said` ends with; it is not written again. The rest is
    what the template writes for it after a history of one question, as in `encode_observation`. None where the template
    writes earlier turns anew once more follow, or leaves some out: then all of it has to be rendered.
    """
    following = [_shown_turn(tokenizer, turn) for turn in turns[known:]]
    if not _has_turns(tokenizer, chat) or not following or not 0 < known <= len(turns):
        return None
    answered = {**turns[known - 1], "content": _SAID}
    asked, plain = [*_turns("x", chat)], {"role": "assistant", "content": _SAID}
    try:
        end = render_turns(tokenizer, [*asked, plain], chat, asks=False, tools=tools).rpartition(_SAID)[2]
        before = _from_answer(render_turns(tokenizer, [*asked, answered], chat, asks=False, tools=tools))
        after = _from_answer(render_turns(tokenizer, [*asked, answered, *following], chat, asks=True, tools=tools))
    except InvalidInput:
        # Whether it takes these turns at all shows when all of them are rendered.
        return None
    between = end + after[len(before) :]
    texts = (str(turn["content"]).strip() for turn in following)
    if not (after.startswith(before) and before.endswith(end)) or any(text not in between for text in texts):
        return None
    # Some templates write white space before the end, which the model has not sampled.
    tokens = list(tokenizer.encode(between.lstrip(), add_special_tokens=False))
    # An end that is a stop string has several.
    ends = len(tokenizer.encode(end.strip(), add_special_tokens=False))
    for count in (ends, 1):
        if count > 0 and tokens[:count] == list(said[-count:]):
            return tokens[count:]
    return list(tokenizer.encode(between, add_special_tokens=False))


def _from_answer(rendered: str) -> str:
    """What follows the text of the answer; some templates leave it out where there are calls."""
    return rendered.rpartition(_SAID)[2] if _SAID in rendered else rendered


def _shown_turn(tokenizer: PreTrainedTokenizerBase, turn: Mapping[str, object]) -> dict[str, object]:
    """A turn without names of special tokens, so that what is observed ends no turn."""
    return {**turn, "content": _without_special(tokenizer, str(turn.get("content") or ""))}


def _without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    names = _special_names(tokenizer)
    while any(name in text for name in names):
        for name in names:
            text = text.replace(name, "")
    return text


def end_tokens(tokenizer: PreTrainedTokenizerBase, model_ends: Sequence[int], chat: ChatFormat) -> tuple[int, ...]:
    """Return the ids of all tokens that end a response.

    They are those of the model's files (`ModelFolder.end_token_ids`), the tokenizer's own, the one with which the chat
    template ends a turn, and stop strings that are a special token's name.
    """
    added = tokenizer.get_added_vocab()
    named = [added[stop] for stop in chat.stop if stop in added]
    found = (*model_ends, tokenizer.eos_token_id, _end_of_turn(tokenizer, chat), *named)
    return tuple(dict.fromkeys(int(each) for each in found if each is not None))


def _has_turns(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> bool:
    return chat.template == "auto" and tokenizer.chat_template is not None


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> int | None:
    """The special token that the template writes after what the model has said; None where it writes none."""
    if not _has_turns(tokenizer, chat):
        return None
    turns = [*_turns("x", chat), {"role": "assistant", "content": _SAID}]
    try:
        after = render_turns(tokenizer, turns, chat, asks=False).rpartition(_SAID)[2].lstrip()
    except InvalidInput:
        # Some templates refuse what they are not asked for here: a last turn of the model's.
        return None
    first = tokenizer.encode(after, add_special_tokens=False)[:1]
    return int(first[0]) if first and first[0] in tokenizer.get_added_vocab().values() else None


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat = USUAL) -> str:
    """Return the text that is judged, before the stop string that ended it: without special tokens, but for those that
    mark reasoning, which is cut off by them."""
    return chat.cut(decode_text(tokenizer, token_ids, chat))


def opens_reasoning(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], chat: ChatFormat) -> bool:
    """Return whether the prompt's tokens end with the beginning of reasoning."""
    # A token has a byte at least; the marker may be followed by white space.
    return chat.opens_reasoning(str(tokenizer.decode(list(prompt_ids[-_MARKER_TOKENS:]))))


def tokens_to_stop(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat) -> int | None:
    """Return how many tokens it takes until a stop string is complete; None: there is none in them."""

    def holds_stop(length: int) -> bool:
        text = decode_text(tokenizer, token_ids[:length], chat)
        return chat.cut(text) != text

    low, high = 1, len(token_ids)
    if not chat.stop or not holds_stop(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_stop(middle) else (middle + 1, high)
    return low


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat = USUAL) -> str:
    """Return the text of tokens without special ones, but for those that mark reasoning."""
    ids = list(token_ids)
    if kept := _marks_at(tokenizer, ids, chat):
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids = [number for place, number in enumerate(ids) if place in kept or number not in special]
    # Cleaning up would change the spaces of programs.
    return str(tokenizer.decode(ids, skip_special_tokens=not kept, clean_up_tokenization_spaces=False))


def _marks_at(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat) -> set[int]:
    """The places of the tokens of reasoning marks that hold a special token."""
    special = set(_special_names(tokenizer))
    found: set[int] = set()
    for mark in chat.reasoning or ():
        if not any(name in mark for name in special):
            continue
        wanted = list(tokenizer.encode(mark, add_special_tokens=False))
        starts = (start for start, number in enumerate(token_ids) if number == wanted[0])
        for start in starts:
            if list(token_ids[start : start + len(wanted)]) == wanted:
                found.update(range(start, start + len(wanted)))
    return found


def reasoning_fault(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> str | None:
    """Why a mark of reasoning would never be found in a response: its tokens read as something else; else None."""
    for mark in chat.reasoning or ():
        read = decode_text(tokenizer, tokenizer.encode(mark, add_special_tokens=False), chat)
        if mark.strip() not in read:
            return f"the tokens of {mark!r} read as {read!r}: no response would hold this mark"
    return None


def _turns(text: str, chat: ChatFormat) -> list[dict[str, str]]:
    system = [{"role": "system", "content": chat.system}] if chat.system is not None else []
    return [*system, {"role": "user", "content": text}]


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    chat: ChatFormat,
    *,
    asks: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the template's text of these turns; asks: and the beginning of the model's next.

    Raises InvalidInput (code "template_refused") where the template fails, or makes or works too much.
    """
    # Here, because the base install has no jinja.
    import jinja2

    from spo.model.tokenizer import bound_templates

    bound_templates()
    arguments: dict[str, Any] = {"strftime_now": DAY.strftime, **chat.template_arguments}
    arguments.update(add_generation_prompt=asks, tokenize=False)
    if tools:
        arguments["tools"] = [dict(tool) for tool in tools]
    try:
        with time_limit(RENDER_SECONDS, "the chat template"):
            rendered = str(tokenizer.apply_chat_template(list(turns), **arguments))
    except (*_FAULTS, jinja2.TemplateError) as error:
        message = f"the chat template cannot render the prompt: {type(error).__name__}: {error}"
        raise InvalidInput(message[:500], code="template_refused") from error
    if len(rendered) > MAX_RENDERED_CHARACTERS:
        message = f"the chat template makes {len(rendered)} characters of a prompt; at most {MAX_RENDERED_CHARACTERS}"
        raise InvalidInput(message, code="template_refused")
    return rendered


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise InvalidInput in this thread once Python code inside has worked for so long.

    A trace function sees every line that a compiled template executes; signals would reach the main thread only.
    """
    # Time that this thread worked: a process that was paused, or a loaded machine, makes no template bad.
    deadline = time.thread_time() + seconds

    def on_line(frame: FrameType, event: str, argument: object) -> object:
        if time.thread_time() > deadline:
            message = f"{what} takes longer than {seconds:g} s for one prompt"
            raise InvalidInput(message, code="template_refused")
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(before)
