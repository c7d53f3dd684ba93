"""Model folders: a job's pi0 again, a version exported or merged with its adapter, one as a tar stream, and those
that forks made.

Models that forks made, for services that share no folder: stored in a bucket, fetched to the path that jobs name.
The path is models/<job> in the state path, which is the same on all machines. Files are safetensors, JSON or a
tokenizer's, compared by digest; a folder is whole or absent.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spo.errors import IntegrityError, InvalidInput, NotFound, NotReady, storage_faults_named
from spo.manifest_folder import link_files, remove_tree, staging_folder
from spo.model.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    PARTS,
    PREFIX,
    TENSORS_FILE,
    TOKENIZER_FILES,
    adapter_of,
    inspect_model_folder,
    read_header,
)
from spo.observability import get_logger
from spo.weights.store import StoredVersion, WeightBackend, backend_at, locked

_KINDS = {"float32": "F32", "bfloat16": "BF16"}
_WORDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Floats = NDArray[np.float32]

BYTES_PER_READ = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)

SINGLE_FILE = "model.safetensors"
# What may lie beside weights and tokenizer.
FURTHER_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

log = get_logger("models")

FOLDER = "models"
# Each has one: what a fork starts from never changes.
ONLY = 1
LOCK = ".lock-"
FETCH_SECONDS = 1800.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(safetensors|json|model|jinja|txt)")


@dataclass(frozen=True)
class _Tensors:
    """A safetensors file, its tensors read one at a time."""

    file: Path
    header: dict[str, Any]
    begin: int

    def read(self, name: str) -> Floats:
        """A tensor of floats of any width. Raises InvalidInput on another kind."""
        described = self.header[name]
        words = _WORDS.get(described["dtype"])
        if words is None:
            raise InvalidInput(f"{name} is {described['dtype']}: only unquantised weights can be merged")
        first, end = described["data_offsets"]
        raw = np.fromfile(self.file, words, (end - first) // words.itemsize, offset=self.begin + first)
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if described["dtype"] == "BF16" else raw
        found: Floats = wide.astype(np.float32, copy=False).reshape(described["shape"])
        return found


def merge_adapter(base: Path, adapter: Path, dtype: str, destination: Path) -> None:
    """Write a safetensors file of a model with the adapter in it, every tensor in `dtype`, rounded to the nearest.

    base: one file of the model, which may hold a part of it. adapter: a folder in peft's layout. Raises IntegrityError
    when the adapter is of other shapes.
    """
    model, changes = _opened(base), _opened(adapter / TENSORS_FILE)
    config = json.loads((adapter / CONFIG_FILE).read_bytes())
    scale = np.float32(config["lora_alpha"] / config["r"])
    kind = _KINDS[dtype]
    with destination.open("wb") as stream:
        stream.write(_header(model.header, kind))
        for name in model.header:
            weights = model.read(name)
            delta = _delta(name, changes)
            if delta is not None and delta.shape != weights.shape:
                raise IntegrityError(f"{adapter} adapts {name} as {delta.shape}, and the model has {weights.shape}")
            merged = weights if delta is None else weights + scale * delta
            stream.write((_rounded(merged) if kind == "BF16" else merged).tobytes())


def _opened(file: Path) -> _Tensors:
    return _Tensors(file, *read_header(file))


def _delta(name: str, changes: _Tensors) -> Floats | None:
    down, up = (f"{PREFIX}{name.removesuffix('.weight')}{part}" for part in PARTS)
    return changes.read(up) @ changes.read(down) if down in changes.header else None


def _rounded(values: Floats) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _header(tensors: dict[str, Any], kind: str) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = _WORDS[kind].itemsize * int(np.prod(tensor["shape"], dtype=np.int64))
        described[name] = {"dtype": kind, "shape": tensor["shape"], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class TarMember:
    """An open file under the name that it has in the archive; it may have been removed from its folder since."""

    name: str
    size_bytes: int
    stream: BinaryIO


def open_members(folder: Path) -> list[TarMember]:
    """The folder's files, opened, in order of their names; folders in it are none."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return [TarMember(path.name, path.stat().st_size, path.open("rb")) for path in paths]


def tar_bytes(members: Sequence[TarMember]) -> int:
    """How long the archive is."""
    return sum(tarfile.BLOCKSIZE + member.size_bytes + _padding(member.size_bytes) for member in members) + len(_END)


def tar_pieces(members: Sequence[TarMember]) -> Iterator[bytes]:
    """The archive; its files are closed when it ends. Raises EOFError for a file that became shorter."""
    for member in members:
        head = tarfile.TarInfo(member.name)
        head.size, head.mode = member.size_bytes, 0o644
        yield head.tobuf(tarfile.GNU_FORMAT)
        left = member.size_bytes
        with member.stream:
            while left:
                piece = member.stream.read(min(BYTES_PER_READ, left))
                if not piece:
                    raise EOFError(f"{member.name} became shorter while it was read")
                left -= len(piece)
                yield piece
        yield bytes(_padding(member.size_bytes))
    yield _END


def _padding(size_bytes: int) -> int:
    return -size_bytes % tarfile.BLOCKSIZE


def link_model(source: Path, destination: Path) -> Path:
    """The same model in another folder. Raises InvalidInput when the source is no model folder."""
    found = inspect_model_folder(source)
    destination.mkdir(parents=True)
    index = [source / INDEX_FILE] if (source / INDEX_FILE).is_file() else []
    link_files([*_further(source), *found.safetensors_files, *index], destination)
    return destination


def model_of_version(model: Path, version: StoredVersion, destination: Path) -> Path:
    """The model with a version's weights, those of an adapter merged: configuration, tokenizer and their files.

    Raises InvalidInput, and IntegrityError when the version is an adapter of another model.
    """
    inspect_model_folder(model)
    destination.mkdir(parents=True)
    # Copied: people may edit their model's folder, and links would change along.
    for file in _further(model):
        shutil.copy2(file, destination / file.name)
    adapter = adapter_of(version.files)
    if adapter:
        _write_merged(model, version, adapter, destination)
        return destination
    link_files(version.files, destination)
    if len(version.files) == 1:
        (destination / version.files[0].name).rename(destination / SINGLE_FILE)
    else:
        _write_index(destination, version.files)
    return destination


def write_export(model: Path, version: StoredVersion, out: Path, *, merge: bool) -> None:
    """A version as a folder, there at once and whole: a model's, or an adapter's in peft's layout.

    Raises IntegrityError; InvalidInput, with code "unwritable_file" where the folder is there by then, or cannot be.
    """
    try:
        with staging_folder(out) as writing:
            _export_into(model, version, writing / out.name, merge=merge)
            # Of two that make it the second is refused, and harms nothing of the first's.
            (writing / out.name).rename(out)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror}", code="unwritable_file") from error


def _export_into(model: Path, version: StoredVersion, out: Path, *, merge: bool) -> None:
    adapter = adapter_of(version.files)
    if adapter is None or merge:
        model_of_version(model, version, out)
        return
    out.mkdir(parents=True)
    link_files([file for file in version.files if file.name != CONFIG_FILE], out)
    # The path of the model that this machine knows, for `PeftModel.from_pretrained` and its kin.
    config = json.loads((adapter / CONFIG_FILE).read_bytes()) | {"base_model_name_or_path": str(model)}
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))


def _write_merged(model: Path, version: StoredVersion, adapter: Path, destination: Path) -> None:
    """Raises IntegrityError when the adapter is another model's."""
    found = inspect_model_folder(model)
    if found.model_hash != version.base_model:
        raise IntegrityError(f"{version.uri} is an adapter of another model than the one at {model}")
    dtype = str(version.manifest["dtype"])
    for file in found.safetensors_files:
        merge_adapter(file, adapter, dtype, destination / file.name)
    if len(found.safetensors_files) > 1:
        _write_index(destination, [destination / file.name for file in found.safetensors_files])
    config = {name: value for name, value in found.config.items() if name != "torch_dtype"}
    (destination / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))


def _write_index(destination: Path, files: Sequence[Path]) -> None:
    names = {name: file.name for file in files for name in read_header(file)[0]}
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": names}
    (destination / INDEX_FILE).write_text(json.dumps(index))


def _further(model: Path) -> list[Path]:
    return [model / name for name in FURTHER_FILES if (model / name).is_file()]


class MadeModels:
    """`state_place` is a folder, which other services see or not, or the URL of a bucket."""

    def __init__(self, state_place: str, state_path: Path) -> None:
        self.root = state_path.absolute() / FOLDER
        in_bucket = "://" in state_place
        self._bucket: WeightBackend | None = backend_at(f"{state_place}/{FOLDER}") if in_bucket else None
        self._lock = threading.Lock()
        self._coming: dict[Path, Future[Path]] = {}

    @property
    def in_bucket(self) -> bool:
        return self._bucket is not None

    def store(self, job_id: str) -> None:
        """Keep the folder that was made of a job for good. Raises Unreachable."""
        if self._bucket:
            self._bucket.seal(job_id, ONLY, self.root / job_id, {"version": ONLY, "epoch": 0})
            self._lock_of(job_id).touch()

    def here(self, path: str | Path) -> Path:
        """A model's folder, which is fetched where it is one of these and not on this machine.

        One that is nowhere stays absent: whoever reads it says so. Raises Unreachable, IntegrityError, NotReady.
        """
        folder = Path(path)
        if self._bucket and folder.parent == self.root and not folder.exists():
            self._fetch(self._bucket, folder)
        return folder

    def expected(self, path: str | Path) -> Path:
        """As `here` for who must not wait: raises NotReady while the folder is fetched in a thread."""
        folder = Path(path)
        if self._bucket is None or folder.parent != self.root or folder.exists():
            return folder
        with self._lock:
            coming = self._coming.get(folder)
            if coming is None:
                threads = ThreadPoolExecutor(1, thread_name_prefix="model fetch")
                coming = self._coming[folder] = threads.submit(self.here, folder)
                threads.shutdown(wait=False)
            if not coming.done():
                raise NotReady(f"the model at {folder} is being fetched from the bucket")
            del self._coming[folder]
        return coming.result()

    def _fetch(self, bucket: WeightBackend, folder: Path) -> None:
        try:
            manifest = bucket.manifest(folder.name, ONLY)
        except NotFound:
            return
        entries = manifest["files"]
        if wrong := [entry["name"] for entry in entries if not _NAME.fullmatch(str(entry["name"]))]:
            raise IntegrityError(f"the model of {folder.name} in the bucket has {wrong[0]!r}, which nothing here loads")
        self.root.mkdir(parents=True, exist_ok=True)
        size_bytes = sum(int(entry["size_bytes"]) for entry in entries)
        with storage_faults_named(self.root, size_bytes), locked(self._lock_of(folder.name), FETCH_SECONDS):
            if folder.exists():
                return
            self._forget(bucket)
            staging = Path(tempfile.mkdtemp(prefix=f".fetched-{folder.name}-", dir=self.root))
            try:
                for entry in entries:
                    bucket.fetch(folder.name, ONLY, entry, staging / entry["name"])
                staging.chmod(0o755)
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        log.info("a model is fetched", model=str(folder), size_bytes=size_bytes)

    def _forget(self, bucket: WeightBackend) -> None:
        """Those of deleted jobs take no room here.

        Only what has been in the bucket: a model that a fork is making, or made before there was a bucket, has not.
        """
        for lock in self.root.glob(f"{LOCK}*"):
            folder = self.root / lock.name.removeprefix(LOCK)
            if folder.is_dir() and not bucket.versions(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def _lock_of(self, job_id: str) -> Path:
        """A file that is here once the model was in the bucket; who fetches it holds its lock."""
        return self.root / f"{LOCK}{job_id}"

    def remove(self, job_id: str) -> None:
        """Here and in the bucket. Raises OSError, Unreachable."""
        remove_tree(self.root / job_id)
        if self._bucket:
            self._bucket.remove_run(job_id)
