"""Loads a tokenizer and renders prompts that nobody vouches for: `python -m spo.model.check_tokenizer < request`.

A process of its own, confined in memory and time: what a hostile tokenizer or chat template does to its reader ends
here. The request is one JSON object: folder, max_prompt_tokens, vocabulary (of the model; null: unknown), chat (fields
of a ChatFormat), prompts (pairs of an id and a text). Prints a JSON object per line: stages as they begin, at last what
`check` returns.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spo.errors import InvalidInput, SpoError
from spo.model.loadable import weight_faults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spo.model.chat import ChatFormat

MEMORY_BYTES = 4 << 30
LONGEST_ID = 24
ANSWER_BYTES = 256 << 20
MODEL = "/model/path"


def check(request: dict[str, Any]) -> dict[str, Any]:
    """What is wrong: `faults`, and `too_long`: pairs of the id of a prompt that is over the limit and its tokens."""
    from spo.model.chat import USUAL, ChatFormat
    from spo.model.tokenizer import encode_prompt, reasoning_fault

    tell("the weights are looked at")
    found = weight_faults(Path(request["folder"]))
    if found:
        return {"faults": [[MODEL, fault] for fault in found], "too_long": []}
    tell("the tokenizer is loaded")
    tokenizer, faults = _load(request["folder"])
    if tokenizer is None:
        return {"faults": faults, "too_long": []}
    faults += _tokenizer_faults(tokenizer, request["vocabulary"])
    chat = ChatFormat(**request["chat"])
    if tuple(chat.reasoning or ()) != USUAL.reasoning and (reason := reasoning_fault(tokenizer, chat)):
        faults.append(["/model/chat/reasoning", reason])
    if chat.tool_parser != USUAL.tool_parser and (reason := _parser_fault(tokenizer, chat, request["folder"])):
        faults.append(["/model/chat/tool_parser", reason])
    too_long: list[tuple[str, int]] = []
    for prompt_id, text in request["prompts"]:
        tell(f"prompt {prompt_id[:LONGEST_ID]} is rendered")
        reason = ""
        tokens = 0
        try:
            tokens = len(encode_prompt(tokenizer, text, chat))
        except InvalidInput as error:
            reason = error.message
        except Exception as error:
            # A tokenizer fails in whatever way its library does.
            reason = f"it cannot be tokenized: {type(error).__name__}: {error}"[:300]
        if not tokens:
            faults.append(
                [_blame(tokenizer, text, chat), f"prompt {prompt_id[:LONGEST_ID]}: {reason or 'it has no tokens'}"]
            )
            return {"faults": faults, "too_long": []}
        if tokens > request["max_prompt_tokens"]:
            too_long.append((prompt_id, tokens))
    return {"faults": faults, "too_long": too_long}


def _blame(tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFormat) -> str:
    """Where the fault of a prompt lies: in what the job gives the template, if it can do without."""
    from spo.model.tokenizer import encode_prompt

    for pointer, without in (
        ("/model/chat/system", replace(chat, system=None)),
        ("/model/chat/template_arguments", replace(chat, template_arguments={})),
    ):
        # Tokenizers fail in whatever way their library does.
        with suppress(Exception):
            if without != chat and encode_prompt(tokenizer, text, without):
                return pointer
    return MODEL


def _parser_fault(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, folder: str) -> str:
    """Why a tool parser would read no call; "" where it does, or where only replicas have vLLM to try it."""
    if find_spec("vllm") is None:
        return ""
    from spo.model.folder import inspect_model_folder
    from spo.model.tokenizer import end_tokens
    from spo.model.tool_calls import probe_tools

    tell("the tool parser is tried")
    try:
        return probe_tools(
            tokenizer, chat, end_tokens(tokenizer, inspect_model_folder(folder).end_token_ids, chat)
        ).fault
    except Exception as error:
        return f"it cannot be tried: {type(error).__name__}: {error}"[:300]


def _load(folder: str) -> tuple[PreTrainedTokenizerBase | None, list[list[str]]]:
    from spo.model.tokenizer import load_tokenizer

    try:
        return load_tokenizer(folder), []
    except SpoError as error:
        return None, [[fault.pointer, fault.message] for fault in error.violations] or [[MODEL, error.message]]
    except Exception as error:
        # Malformed files fail in whatever way the library does.
        return None, [[MODEL, f"its tokenizer cannot be loaded: {type(error).__name__}: {error}"[:300]]]


def _tokenizer_faults(tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> list[list[str]]:
    known = tokenizer.get_vocab()
    if not known:
        return [[MODEL, "its tokenizer knows no tokens"]]
    faults = []
    if tokenizer.eos_token_id is None:
        faults.append([MODEL, "its tokenizer has no end-of-sequence token, which every response needs"])
    if vocabulary is not None and max(known.values()) >= vocabulary:
        message = f"its tokenizer has token {max(known.values())}, and the model a vocabulary of {vocabulary}"
        faults.append([MODEL, message])
    return faults


def tell(stage: str) -> None:
    """What begins now; the last such line tells what a process was at that had to be ended."""
    print(json.dumps({"stage": stage}), flush=True)


def answer(work: Callable[[dict[str, Any]], dict[str, Any]], cpu_seconds: str, memory_bytes: int) -> int:
    """Confine this process and do the work of the request on standard input; returns the exit status."""
    # It has nothing to write but its answer.
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: ANSWER_BYTES}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    # Its end says which limit it was: SIGXCPU, as long as the harder limit is above.
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds), int(cpu_seconds) + 5))
    print(json.dumps(work(json.load(sys.stdin))), flush=True)
    return 0


def main(cpu_seconds: str) -> int:
    """Answer the request on standard input; returns the exit status."""
    return answer(_checked, cpu_seconds, MEMORY_BYTES)


def _checked(request: dict[str, Any]) -> dict[str, Any]:
    if request["chat"]["tool_parser"] == "auto":
        # Tokenizers do without, and it would cost most of the time and the memory; vLLM's parsers do not.
        sys.modules["torch"] = None  # type: ignore[assignment]
    return check(request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
