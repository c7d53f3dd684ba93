"""A model's tokenizer and chat template: from the text of a problem to tokens, and no torch.

A template is a program of whoever made the model. It runs in the processes that serve everybody, so each rendering has
a limit of time: one that loops ends with InvalidInput in place of holding the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from spo.errors import InvalidInput
from spo.model.chat import USUAL, ChatFormat
from spo.model.folder import inspect_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        return list(tokenizer.encode(text))
    rendered = _rendered(tokenizer, _turns(text, chat), chat, asks=True)
    if chat.system is not None and chat.system.strip() not in rendered:
        raise InvalidInput("the chat template leaves the system prompt out", code="template_refused")
    # Templates write the special tokens themselves.
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]], chat: ChatFormat = USUAL
) -> list[int]:
    """Return the prompt's tokens of a conversation so far (role and content of each turn), up to the model's next turn.

    A single turn of the user's gives what `encode_prompt` gives: the job's system prompt goes before it. Raises
    InvalidInput (code "template_refused") as it does, and where a model without turns is sent more than one.
    """
    if [turn["role"] for turn in turns] == ["user"]:
        return encode_prompt(tokenizer, turns[0]["content"], chat)
    if not _has_turns(tokenizer, chat):
        message = "the model has no chat template: send one message of the user's, or a prompt to /v1/completions"
        raise InvalidInput(message, code="template_refused")
    begins = [] if turns[0]["role"] == "system" or chat.system is None else _turns("", chat)[:1]
    rendered = _rendered(tokenizer, [*begins, *map(dict, turns)], chat, asks=True)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def encode_response(
    tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat = USUAL, *, ended: bool = True
) -> list[int]:
    """Return the tokens of a response written by someone else, with what ends it where it has ended.

    That is the token with which the chat template ends a turn of the model's, or else the tokenizer's end-of-sequence
    token; where responses are no turns of a chat, it is the first stop string.
    """
    if not ended:
        return list(tokenizer.encode(text, add_special_tokens=False))
    if chat.stop and not _has_turns(tokenizer, chat):
        return list(tokenizer.encode(text + chat.stop[0], add_special_tokens=False))
    end = _end_of_turn(tokenizer, chat)
    return [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id) if end is None else end]


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
    between = _rendered(tokenizer, turns, chat, asks=True).partition(_SAID)[2]
    if shown.strip() not in between:
        raise InvalidInput("the chat template leaves out what an environment says", code="template_refused")
    tokens = list(tokenizer.encode(between, add_special_tokens=False))
    return tokens[1:] if said and tokens[:1] == list(said[-1:]) else tokens


def _without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    names = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
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
        after = _rendered(tokenizer, turns, chat, asks=False).rpartition(_SAID)[2].lstrip()
    except InvalidInput:
        # Some templates refuse what they are not asked for here: a last turn of the model's.
        return None
    first = tokenizer.encode(after, add_special_tokens=False)[:1]
    return int(first[0]) if first and first[0] in tokenizer.get_added_vocab().values() else None


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat = USUAL) -> str:
    """Return the text that is judged: without special tokens, and before the stop string that ended it."""
    return chat.cut(_decode(tokenizer, token_ids))


def opens_reasoning(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], chat: ChatFormat) -> bool:
    """Return whether the prompt's tokens end with the beginning of reasoning."""
    # A token has a byte at least; the marker may be followed by white space.
    return chat.opens_reasoning(str(tokenizer.decode(list(prompt_ids[-_MARKER_TOKENS:]))))


def tokens_to_stop(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], chat: ChatFormat) -> int | None:
    """Return how many tokens it takes until a stop string is complete; None: there is none in them."""

    def holds_stop(length: int) -> bool:
        text = _decode(tokenizer, token_ids[:length])
        return chat.cut(text) != text

    low, high = 1, len(token_ids)
    if not chat.stop or not holds_stop(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_stop(middle) else (middle + 1, high)
    return low


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    # Cleaning up would change the spaces of programs.
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _turns(text: str, chat: ChatFormat) -> list[dict[str, str]]:
    system = [{"role": "system", "content": chat.system}] if chat.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], chat: ChatFormat, *, asks: bool) -> str:
    """The template's text of these turns; asks: and the beginning of the model's next."""
    # Here, because the base install has no jinja.
    import jinja2

    arguments: dict[str, Any] = {"strftime_now": DAY.strftime, **chat.template_arguments}
    arguments.update(add_generation_prompt=asks, tokenize=False)
    try:
        with _time_limit(RENDER_SECONDS):
            rendered = str(tokenizer.apply_chat_template(turns, **arguments))
    except (*_FAULTS, jinja2.TemplateError) as error:
        message = f"the chat template cannot render the prompt: {type(error).__name__}: {error}"
        raise InvalidInput(message[:500], code="template_refused") from error
    if len(rendered) > MAX_RENDERED_CHARACTERS:
        message = f"the chat template makes {len(rendered)} characters of a prompt; at most {MAX_RENDERED_CHARACTERS}"
        raise InvalidInput(message, code="template_refused")
    return rendered


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise InvalidInput in this thread once Python code inside has worked for so long.

    A trace function sees every line that a compiled template executes; signals would reach the main thread only.
    """
    # Time that this thread worked: a process that was paused, or a loaded machine, makes no template bad.
    deadline = time.thread_time() + seconds

    def on_line(frame: FrameType, event: str, argument: object) -> object:
        if time.thread_time() > deadline:
            message = f"the chat template takes longer than {seconds:g} s for one prompt"
            raise InvalidInput(message, code="template_refused")
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(before)
