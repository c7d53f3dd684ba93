"""What may be loaded as a model: a local folder of safetensors weights and JSON, with nothing in it that runs.

Pickled weights and custom code execute whatever their author wrote, so a folder that holds any is refused as a whole.
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput

PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
CODE_SUFFIXES = frozenset({".py", ".pyc", ".so"})
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
INDEX_FILE = "model.safetensors.index.json"
JSON_BYTES_MAXIMUM = 64 << 20
HEADER_BYTES_MAXIMUM = 100 << 20


@dataclass(frozen=True)
class ModelFolder:
    """An inspected folder; `model_hash` covers weights, config and tokenizer: it names pi0 in every stored value."""

    path: Path
    model_hash: str
    architecture: str
    safetensors_files: tuple[Path, ...]
    weight_bytes: int
    has_tokenizer: bool


def inspect_model_folder(path: str | Path) -> ModelFolder:
    """Return what the folder holds; InvalidInput with pointer /model/path says why it may not be loaded."""
    folder = Path(path)
    if not folder.is_dir():
        raise _refused(f"{folder} is not a folder")
    files = _files_inside(folder.resolve())
    _refuse_what_runs(files)
    weights = sorted(file for file in files if file.suffix == ".safetensors")
    config_file = folder.resolve() / "config.json"
    if config_file not in files:
        raise _refused(f"{folder} holds no config.json")
    if not weights:
        raise _refused(f"{folder} holds no *.safetensors weights")
    config = _read_json(config_file)
    _refuse_auto_map(config, config_file)
    tokenizer_files = [folder.resolve() / name for name in TOKENIZER_FILES if folder.resolve() / name in files]
    for file in tokenizer_files:
        if file.suffix == ".json":
            _refuse_auto_map(_read_json(file), file)
    for file in weights:
        _check_safetensors(file)
    _check_shards_are_there(folder.resolve() / INDEX_FILE, files)
    return ModelFolder(
        path=folder,
        model_hash=_digest(tuple((file, _stamp(file)) for file in (config_file, *tokenizer_files, *weights))),
        architecture=_architecture(config, config_file),
        safetensors_files=tuple(weights),
        weight_bytes=sum(file.stat().st_size for file in weights),
        has_tokenizer=bool(tokenizer_files),
    )


def _refused(reason: str) -> InvalidInput:
    return InvalidInput(
        "the model folder cannot be used",
        code="model_refused",
        violations=(FieldViolation(pointer="/model/path", message=reason),),
    )


def _files_inside(folder: Path) -> frozenset[Path]:
    files = [entry for entry in folder.rglob("*") if not entry.is_dir()]
    for entry in folder.rglob("*"):
        if not entry.exists():
            raise _refused(f"{entry.name} is a link to nothing")
        if not entry.resolve().is_relative_to(folder):
            raise _refused(f"{entry.name} is a link that leaves the folder")
    return frozenset(files)


def _refuse_what_runs(files: frozenset[Path]) -> None:
    for file in sorted(files):
        if file.suffix.lower() in PICKLED_SUFFIXES:
            raise _refused(f"{file.name} may hold pickled objects; only safetensors weights are loaded")
        if file.suffix.lower() in CODE_SUFFIXES:
            raise _refused(f"{file.name} is code; models with custom code are not loaded")


def _read_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > JSON_BYTES_MAXIMUM:
        raise _refused(f"{file.name} is larger than {JSON_BYTES_MAXIMUM} bytes")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _refused(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refused(f"{file.name} does not hold a JSON object")
    return content


def _refuse_auto_map(content: dict[str, Any], file: Path) -> None:
    if "auto_map" in content:
        raise _refused(f"{file.name} asks for custom code (auto_map)")


def _architecture(config: dict[str, Any], config_file: Path) -> str:
    match config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
    raise _refused(f"{config_file.name} names no architecture")


def _check_safetensors(file: Path) -> None:
    """Read the header as the format defines it: 8 bytes of length, JSON, then exactly the bytes it promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > min(size - 8, HEADER_BYTES_MAXIMUM):
            raise _refused(f"{file.name} is truncated or is no safetensors file")
        try:
            header = json.loads(stream.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            promised = max(ends, default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise _refused(f"{file.name} has an unreadable safetensors header") from error
    if promised != size - 8 - header_bytes:
        raise _refused(f"{file.name} holds {size - 8 - header_bytes} bytes of weights but its header says {promised}")


def _check_shards_are_there(index_file: Path, files: frozenset[Path]) -> None:
    if index_file not in files:
        return
    shards = _read_json(index_file).get("weight_map")
    if not isinstance(shards, dict):
        raise _refused(f"{index_file.name} holds no weight_map")
    for shard in sorted({str(shard) for shard in shards.values()}):
        if index_file.parent / shard not in files:
            raise _refused(f"{index_file.name} names {shard}, which is not there")


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return what changes when a file's content does: replaced files have another inode or time."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def _digest(stamped_files: tuple[tuple[Path, tuple[int, int, int]], ...]) -> str:
    """Return one digest over names and contents; the stamps are only there to make the cache miss after a change."""
    total = blake3()
    for file, _ in stamped_files:
        content = blake3(max_threads=blake3.AUTO)
        content.update_mmap(file)
        total.update(file.name.encode() + b"\0" + content.digest())
    return total.hexdigest()
