"""Looks at what nobody vouches for of a model: `python -m spo.model.check_model tokenizer|names CPU_SECONDS < request`.

A process of its own, confined in memory and time: what a hostile tokenizer, chat template or config.json does to its
reader ends here. Prints a JSON object per line: stages as they begin, at last what was found.

    tokenizer   loads it and renders prompts. The request is one JSON object: folder, max_prompt_tokens, vocabulary (of
                the model; null: unknown), chat (fields of a ChatFormat), prompts (pairs of an id and a text)
    names       whether engines would take what is published of the model, which is built without memory for its
                weights. The request: folder, adapter (whether that alone is published)

Whether a model folder holds a causal language model that can be loaded, as far as its files tell without torch.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spo.errors import InvalidInput, SpoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spo.model.chat import ChatFormat


# So much is read in search of values that are not finite; of a larger model the first so many bytes of its files.
LOOKED_AT_BYTES = 2 << 30
CHUNK_BYTES = 16 << 20
# A float's exponent, all ones in what is not finite, by dtype: the type of its bits, the mask.
EXPONENTS: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
# What the output layer is called where it is not the input embedding once more, and the input embedding.
HEADS = ("lm_head", "embed_out", "output", "head")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


def weight_faults(folder: Path) -> list[str]:
    """What is wrong with a folder that `inspect_model_folder` takes, in words; empty when nothing is."""
    config = json.loads((folder / "config.json").read_bytes())
    faults = architecture_faults(config)
    headers = {file: _header(file) for file in sorted(folder.glob("*.safetensors"))}
    names = [name for header, _ in headers.values() for name in header]
    return faults or [*_head_faults(config, names), *_values_not_finite(headers)]


def architecture_faults(config: dict[str, Any]) -> list[str]:
    """Whether transformers has the architecture as a causal language model, and it is no encoder."""
    kind, architecture = config.get("model_type"), str((config.get("architectures") or [""])[0])
    if not isinstance(kind, str):
        return ["config.json names no model_type"]
    known, encoders = _mapping("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"), _mapping("MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    if not known:
        return []
    if kind in encoders:
        return [f"{architecture} is of the kind {kind!r}, which fills in masks and generates nothing"]
    if kind not in known:
        return [f"transformers has no causal language model of the kind {kind!r} ({architecture})"]
    if architecture not in known[kind]:
        return [f"{architecture} generates no text; of the kind {kind!r} {', '.join(known[kind])} does"]
    return []


def _mapping(name: str) -> dict[str, tuple[str, ...]]:
    """Classes by kind of model, as transformers' source lists them: importing that would need torch."""
    found = importlib.util.find_spec("transformers.models.auto.modeling_auto")
    if found is None or found.origin is None:
        return {}
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            pairs = [each for each in ast.walk(node.value) if isinstance(each, ast.Tuple) and len(each.elts) == 2]
            return {kind: names for kind, names in map(_pair, pairs) if kind}
    return {}


def _pair(node: ast.Tuple) -> tuple[str, tuple[str, ...]]:
    try:
        kind, names = ast.literal_eval(node)
    except ValueError:
        return "", ()
    return str(kind), (names,) if isinstance(names, str) else tuple(names)


def _head_faults(config: dict[str, Any], names: list[str]) -> Iterator[str]:
    if not any(part in name for name in names for part in EMBEDDINGS) or _is_tied(config):
        return
    if not any(name.split(".")[-2:-1] and name.split(".")[-2] in HEADS for name in names):
        yield "it has no output layer (lm_head.weight), and config.json does not tie that to the input embedding"


def _is_tied(config: dict[str, Any]) -> bool:
    from transformers import AutoConfig

    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if "tie_word_embeddings" in part:
            return bool(part["tie_word_embeddings"])
    return bool(getattr(AutoConfig.for_model(str(config["model_type"])), "tie_word_embeddings", True))


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a file by name, and where their bytes begin."""
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        header = json.loads(stream.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}, 8 + length


def _values_not_finite(headers: dict[Path, tuple[dict[str, Any], int]]) -> Iterator[str]:
    left = LOOKED_AT_BYTES
    for file, (tensors, start) in headers.items():
        with file.open("rb") as stream:
            for name, tensor in tensors.items():
                begin, end = tensor["data_offsets"]
                if tensor["dtype"] not in EXPONENTS or left <= 0:
                    continue
                bits, mask = EXPONENTS[tensor["dtype"]]
                stream.seek(start + begin)
                for at in range(begin, min(end, begin + left), CHUNK_BYTES):
                    values = np.frombuffer(stream.read(min(CHUNK_BYTES, end - at)), bits)
                    if bool(((values & mask) == mask).any()):
                        yield f"{name} in {file.name} holds values that are not finite"
                        return
                left -= end - begin


MEMORY_BYTES = 4 << 30
# With a GPU's libraries torch maps several times what it uses.
NAMES_MEMORY_BYTES = 24 << 30
LONGEST_ID = 24
ANSWER_BYTES = 256 << 20
MODEL = "/model/path"


def check_tokenizer(request: dict[str, Any]) -> dict[str, Any]:
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


def check_names(request: dict[str, Any]) -> dict[str, Any]:
    """What is wrong: `faults`, as `check_tokenizer` finds them."""
    tell("transformers is loaded")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from spo.model.folder import inspect_model_folder, tensor_shapes
    from spo.model.folder_names import FolderNames, read_as
    from spo.model.logprobs import attention_for

    try:
        folder = inspect_model_folder(request["folder"])
        tell("the model is built from its config.json")
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            kernel = attention_for(folder.config, packing=True)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
        tell("its names are compared with those of its folder")
        if not request["adapter"]:
            shapes = tensor_shapes(folder.safetensors_files)
            FolderNames(read_as(model, shapes)).check(shapes)
    except SpoError as error:
        return {"faults": [[MODEL, error.message]], "too_long": []}
    except Exception as error:
        # A config.json is wrong in whatever way the library finds.
        kind = f"{type(error).__name__}: {error}"
        return {
            "faults": [[MODEL, f"the trainer cannot build it as a causal language model: {kind}"[:300]]],
            "too_long": [],
        }
    return {"faults": [], "too_long": []}


def tell(stage: str) -> None:
    """What begins now; the last such line tells what a process was at that had to be ended."""
    print(json.dumps({"stage": stage}), flush=True)


def _checked(request: dict[str, Any]) -> dict[str, Any]:
    if request["chat"]["tool_parser"] == "auto":
        # Tokenizers do without, and it would cost most of the time and the memory; vLLM's parsers do not.
        sys.modules["torch"] = None  # type: ignore[assignment]
    return check_tokenizer(request)


_WORK: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], int]] = {
    "tokenizer": (_checked, MEMORY_BYTES),
    "names": (check_names, NAMES_MEMORY_BYTES),
}


def main(work: str, cpu_seconds: str) -> int:
    """Confine this process and do the work of the request on standard input; returns the exit status."""
    call, memory_bytes = _WORK[work]
    # It has nothing to write but its answer.
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: ANSWER_BYTES}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    # Its end says which limit it was: SIGXCPU, as long as the harder limit is above.
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds), int(cpu_seconds) + 5))
    print(json.dumps(call(json.load(sys.stdin))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
