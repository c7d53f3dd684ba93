"""What may be loaded as a model: a local folder of safetensors weights and JSON, or an adapter in peft's layout;
nothing in it runs.

Pickled weights and custom code execute whatever their author wrote: a folder with code is refused as a whole, and
pickled weights may only lie beside safetensors that every loader here prefers, as files that nobody opens.
A path comes from whoever submits a job: nothing is opened but regular files, of limited size, and no tree is walked
beyond the few entries that a model has.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput, raise_if_storage_is_away

if TYPE_CHECKING:
    from safetensors import safe_open

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
# What peft puts before the names of a model's layers, and the ends of an adapter's tensors.
PREFIX = "base_model.model."
PARTS = (".lora_A.weight", ".lora_B.weight")

ALL_LINEAR: Literal["all-linear"] = "all-linear"
# The embedding, and the layer that makes logits: log-probs are computed without calling it.
NEVER_ADAPTED = frozenset({"lm_head", "embed_tokens", "embed_out", "wte", "wpe"})
# A layer's experts are one stacked tensor in memory, their router a module of its own: peft finds no linear layers.
ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")

Shapes = Mapping[str, tuple[int, ...]]

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
WEIGHTS_FILE = "model.safetensors"
GENERATION_FILE = "generation_config.json"
# With it, libraries load weights from whatever place it names.
ADAPTER_FILE = "adapter_config.json"
# Read by libraries that have a process of their own for it (`check_model`): too large to be parsed here.
LARGE_FILES = frozenset({"tokenizer.json", "vocab.json"})
JSON_BYTES_MAXIMUM = 16 << 20
TOKENIZER_BYTES_MAXIMUM = 64 << 20
HEADER_BYTES_MAXIMUM = 16 << 20
FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
EIGHT_BITS = frozenset({"I8", "U8"})
DTYPES = ("bfloat16", "float16", "float32", "float64", "auto")
ENTRIES_MAXIMUM = 2000
DEPTH_MAXIMUM = 2

# Families whose tensors have one name each, in memory and in the folder, as a test of each of them shows; there is
# nothing to find out by building the model.
ONE_NAME = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3"}
    | {"glm", "glm4", "granite", "smollm3"}
)

# A file and what changes when its content does: replaced files have another inode or time.
StampedFile = tuple[Path, tuple[int, int, int]]


@dataclass(frozen=True)
class Adapter:
    """What a version holds in place of whole weights; base_model: hash of the model folder, config: peft's."""

    base_model: str
    config: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Put peft's configuration beside the tensors."""
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, sort_keys=True, indent=2))


def adapter_of(files: Iterable[Path]) -> Path | None:
    """The adapter's folder where these files of a version are one; None where they are whole weights."""
    return next((file.parent for file in files if file.name == CONFIG_FILE), None)


def is_optional(name: str) -> bool:
    """Whether a folder may have a tensor or lack it: a tied copy of the embedding, angles of config.json."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def open_tensors(path: str | os.PathLike[str], framework: str = "pt", **_: object) -> safe_open:
    """safetensors' `safe_open` on the CPU, by reads: of a mapped file that is cut, or whose storage goes away, the
    first touch ends the process (SIGBUS) with no word of why.
    """
    from safetensors import safe_open

    return safe_open(path, framework=framework, device="cpu", backend="pread")


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All tensors of a safetensors file, read as by `open_tensors`."""
    with open_tensors(path) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in safetensors files; others are passed over."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix == ".safetensors":
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in read_header(file)[0].items()}
    return shapes


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file as its header describes them, and where their bytes begin."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def adapted_layers(shapes: Shapes, targets: str | Sequence[str]) -> list[str]:
    """The layers of a model that an adapter of these targets changes, by peft's rule for names."""
    matrices = [name.removesuffix(".weight") for name, shape in shapes.items() if is_matrix(name, shape)]
    if targets == ALL_LINEAR:
        return matrices
    return [layer for layer in matrices if any(f".{layer}".endswith(f".{target}") for target in targets)]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer that may be adapted; experts and their routers are none."""
    layer = name.removesuffix(".weight")
    if layer == name or len(shape) != 2 or ".experts." in layer or layer.endswith(ROUTERS):
        return False
    return layer.rpartition(".")[2] not in NEVER_ADAPTED


@dataclass(frozen=True)
class ModelFolder:
    """An inspected folder, and the facts of its config.json that decide whether it can be served."""

    path: Path
    architecture: str
    config: dict[str, Any]
    safetensors_files: tuple[Path, ...]
    tokenizer_files: tuple[Path, ...]
    weight_bytes: int
    # Ids of tokens that end a response, as config.json and generation_config.json have them.
    end_token_ids: tuple[int, ...]
    # What makes the model what it is: configuration, tokenizer, weights.
    content: tuple[StampedFile, ...]

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.tokenizer_files)

    @cached_property
    def model_hash(self) -> str:
        """One digest over names and contents: it names pi0 in every stored value. Reads all weights the first time."""
        return _digest(self.content)


def inspect_model_folder(path: str | Path) -> ModelFolder:
    """Return what the folder holds; InvalidInput with pointer /model/path says why it may not be loaded."""
    try:
        return _inspect(Path(path))
    except OSError as error:
        raise_if_storage_is_away(error, path)
        # No right to read it, a name that is too long, a file that went away meanwhile.
        raise _refused(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:
        # A NUL byte, or a circle of links.
        raise _refused(f"{error}") from error


def _inspect(given: Path) -> ModelFolder:
    if not given.is_dir():
        raise _refused(f"{given} is not a folder")
    folder = given.resolve()
    config_file = folder / "config.json"
    if not config_file.exists():
        hint = "; name the snapshot in it" if (folder / "snapshots").is_dir() else ""
        raise _refused(f"{given} holds no config.json{hint}")
    files = _files_inside(folder)
    weights = _weights(folder, files)
    _refuse_what_runs(folder, files)
    config = _read_json(config_file)
    _refuse_auto_map(config, config_file)
    _refuse_dtype(config, config_file)
    tokenizer_files = [folder / name for name in TOKENIZER_FILES if folder / name in files]
    for file in tokenizer_files:
        if file.stat().st_size > TOKENIZER_BYTES_MAXIMUM:
            raise _refused(f"{file.name} is larger than {TOKENIZER_BYTES_MAXIMUM} bytes")
        if file.suffix == ".json" and file.name not in LARGE_FILES:
            _refuse_auto_map(_read_json(file), file)
    for file in weights:
        _check_safetensors(file)
    ends, decisive = _end_tokens(config, folder / GENERATION_FILE)
    return ModelFolder(
        path=given,
        architecture=_architecture(config, config_file),
        config=config,
        safetensors_files=tuple(weights),
        tokenizer_files=tuple(tokenizer_files),
        weight_bytes=sum(file.stat().st_size for file in weights),
        end_token_ids=ends,
        content=tuple((file, _stamp(file)) for file in (config_file, *decisive, *tokenizer_files, *weights)),
    )


def _refused(reason: str) -> InvalidInput:
    return InvalidInput(
        "the model folder cannot be used",
        code="model_refused",
        violations=(FieldViolation(pointer="/model/path", message=reason[:500]),),
    )


def _files_inside(folder: Path) -> frozenset[Path]:
    files = set()
    for count, entry in enumerate(_entries(folder, 0)):
        if count >= ENTRIES_MAXIMUM:
            raise _refused(f"it holds more than {ENTRIES_MAXIMUM} files and folders; a model has few")
        path = Path(entry.path)
        if entry.is_symlink():
            if not path.exists():
                raise _refused(f"{entry.name} is a link to nothing")
            target = path.resolve()
            if not target.is_relative_to(folder) and target.parent != _blobs(folder):
                raise _refused(f"{entry.name} is a link that leaves the folder")
        if entry.is_dir():
            continue
        if not entry.is_file():
            raise _refused(f"{entry.name} is no regular file")
        files.add(path)
    return frozenset(files)


def _blobs(folder: Path) -> Path | None:
    """Where Hugging Face's cache keeps what the links of a snapshot lead to: models--NAME/blobs; None elsewhere."""
    cached = folder.parent.parent
    return cached / "blobs" if folder.parent.name == "snapshots" and cached.name.startswith("models--") else None


def _entries(folder: Path, depth: int) -> Iterator[os.DirEntry[str]]:
    """What the folder holds, and its subfolders; links to folders are named and not followed."""
    with os.scandir(folder) as found:
        for entry in found:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                if depth >= DEPTH_MAXIMUM:
                    raise _refused(f"{entry.name} lies deeper than a model's folders do")
                yield from _entries(Path(entry.path), depth + 1)


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading; never waits for a writer of a FIFO, and rings no device.

    Raises InvalidInput when it is none, or was replaced by a link since it was looked at.
    """
    descriptor = os.open(file.resolve(), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise _refused(f"{file.name} is no regular file")
    return stream


def _weights(folder: Path, files: frozenset[Path]) -> list[Path]:
    """The files that every loader here takes the weights from, whatever else lies beside them."""
    if folder / INDEX_FILE in files:
        shards = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise _refused(f"{INDEX_FILE} holds no weight_map")
        names = sorted({str(shard) for shard in shards.values()})
        for name in names:
            if folder / name not in files:
                raise _refused(f"{INDEX_FILE} names {name}, which is not there")
        return [folder / name for name in names]
    weights = sorted(file for file in files if file.suffix == ".safetensors" and file.parent == folder)
    if not weights:
        raise _refused(f"{folder} holds no *.safetensors weights")
    if folder / WEIGHTS_FILE in files and len(weights) > 1:
        names = [file.name for file in weights]
        raise _refused(f"no {INDEX_FILE} says which of {', '.join(names)} are the weights")
    return weights


def _refuse_what_runs(folder: Path, files: frozenset[Path]) -> None:
    preferred = folder / INDEX_FILE in files or folder / WEIGHTS_FILE in files
    if folder / ADAPTER_FILE in files:
        raise _refused(f"{ADAPTER_FILE} makes it an adapter of another model: merge it into that first")
    for file in sorted(files):
        if file.suffix.lower() in PICKLED_SUFFIXES and not preferred:
            raise _refused(f"{file.name} may hold pickled objects, and there is no {WEIGHTS_FILE} to load in its place")
        if file.suffix.lower() in CODE_SUFFIXES:
            raise _refused(f"{file.name} is code; models with custom code are not loaded")


def _read_json(file: Path) -> dict[str, Any]:
    with open_regular(file) as stream:
        text = stream.read(JSON_BYTES_MAXIMUM + 1)
    if len(text) > JSON_BYTES_MAXIMUM:
        raise _refused(f"{file.name} is larger than {JSON_BYTES_MAXIMUM} bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refused(f"{file.name} does not hold a JSON object")
    return content


def _refuse_auto_map(content: dict[str, Any], file: Path) -> None:
    if "auto_map" in content:
        raise _refused(f"{file.name} asks for custom code (auto_map)")


def _refuse_dtype(config: dict[str, Any], file: Path) -> None:
    for name in ("dtype", "torch_dtype"):
        dtype = config.get(name)
        if dtype is not None and (not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES):
            raise _refused(f"{file.name} has the {name} {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}")


def _architecture(config: dict[str, Any], config_file: Path) -> str:
    match config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
    raise _refused(f"{config_file.name} names no architecture")


def _check_safetensors(file: Path) -> None:
    """Read the header as the format defines it: 8 bytes of length, JSON, then exactly the bytes it promises."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > min(size - 8, HEADER_BYTES_MAXIMUM):
            raise _refused(f"{file.name} is truncated or is no safetensors file")
        try:
            header = json.loads(stream.read(header_bytes))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            promised = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            dtypes = {name: str(tensor["dtype"]) for name, tensor in tensors.items()}
        except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise _refused(f"{file.name} has an unreadable safetensors header") from error
    for name, dtype in sorted(dtypes.items()):
        # Integers are buffers, such as masks and positions; quantised weights say so in config.json.
        if dtype not in FLOATS and (dtype not in INTEGERS or (dtype in EIGHT_BITS and name.endswith(".weight"))):
            raise _refused(f"{file.name} holds {name} as {dtype}, which is not trained; {', '.join(FLOATS)} are")
    if promised != size - 8 - header_bytes:
        raise _refused(f"{file.name} holds {size - 8 - header_bytes} bytes of weights but its header says {promised}")


def _end_tokens(config: dict[str, Any], generation_file: Path) -> tuple[tuple[int, ...], tuple[Path, ...]]:
    """Ids of both files in their order, and the second file where it adds any: then it makes the model what it is."""
    text = config.get("text_config")
    ends = dict.fromkeys(_ids(config) or (_ids(text) if isinstance(text, dict) else ()))
    if not generation_file.exists():
        return tuple(ends), ()
    added = [each for each in _ids(_read_json(generation_file)) if each not in ends]
    return (*ends, *added), (generation_file,) if added else ()


def _ids(config: dict[str, Any]) -> tuple[int, ...]:
    given = config.get("eos_token_id")
    listed = given if isinstance(given, list) else [given]
    return tuple(each for each in listed if type(each) is int and 0 <= each < 1 << 31)


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def _digest(stamped_files: tuple[StampedFile, ...]) -> str:
    """Return one digest over names and contents; the stamps are only there to make the cache miss after a change."""
    total = blake3()
    for file, _ in stamped_files:
        # Read, not mapped, as everywhere.
        with file.open("rb", buffering=0) as stream:
            content = hashlib.file_digest(stream, blake3)  # type: ignore[arg-type]
        total.update(file.name.encode() + b"\0" + content.digest())
    return total.hexdigest()
