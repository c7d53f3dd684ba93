"""Whether a model folder holds a causal language model that can be loaded, as far as its files tell without torch."""

from __future__ import annotations

import ast
import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
