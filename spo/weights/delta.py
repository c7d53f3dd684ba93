"""What changed between two safetensors files of one layout, as a third: positions and steps, lossless.

Values are taken as integers: neighbouring floats of one sign differ by 1. A small learning rate changes few bfloat16
values per update: their positions (as gaps) and steps are stored. In float32 nearly every value changes: then the steps
of all of them are, whose high bytes compress.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from spo.errors import IntegrityError
from spo.model.folder import open_tensors

# Words of one piece: what is worked on at once, which bounds the memory.
PIECE_WORDS = 1 << 24
# From this share of changed words on, positions cost more than the unchanged words between them.
DENSE_SHARE = 0.2
LEVEL = 1
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_TWO_BYTES = frozenset({"BF16", "F16"})
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Layout:
    """A safetensors file as words behind a header."""

    header: bytes
    word_bytes: int

    def starts(self, path: Path) -> range:
        """The first word of each piece of the file."""
        return range(0, (path.stat().st_size - len(self.header)) // self.word_bytes, PIECE_WORDS)

    def piece(self, path: Path, start: int) -> NDArray[Any]:
        """The words of a piece, read and not mapped. Raises OSError; ValueError where the file is cut."""
        offset, count = self.offset(start), min(PIECE_WORDS, self.starts(path).stop - start)
        words = np.fromfile(path, _WORDS[self.word_bytes], count, offset=offset)
        if words.size != count:
            raise ValueError(f"{path} is cut")
        return words

    def offset(self, start: int) -> int:
        """Where a word is in the file, bytes."""
        return len(self.header) + start * self.word_bytes


@dataclass(frozen=True)
class _Piece:
    """One piece's changes; gaps is None when every word's step is there. Sizes in bytes before compression."""

    number: int
    count: int
    gap_bytes: int
    gaps: bytes | None
    steps: bytes


def write_delta(base: Path, new: Path, destination: Path) -> bool:
    """Write what turns `base` into `new`; False, with nothing written, when their headers differ."""
    from safetensors.numpy import save_file

    layout = _layout(new)
    if layout != _layout(base) or base.stat().st_size != new.stat().st_size:
        return False
    with ThreadPoolExecutor(_THREADS) as threads:
        pieces = list(
            threads.map(
                lambda start: _piece(start // PIECE_WORDS, layout.piece(base, start), layout.piece(new, start)),
                layout.starts(new),
            )
        )
    tensors, facts = {}, {}
    for piece in pieces:
        facts[str(piece.number)] = [piece.count, piece.gap_bytes]
        tensors[f"{piece.number}.steps"] = np.frombuffer(piece.steps, np.uint8)
        if piece.gaps is not None:
            tensors[f"{piece.number}.gaps"] = np.frombuffer(piece.gaps, np.uint8)
    save_file(tensors, destination, metadata={"pieces": json.dumps(facts)})
    return True


def apply_delta(path: Path, delta: Path) -> None:
    """Turn the file at `path`, a copy of the delta's base, into the new one. Raises IntegrityError on a wrong delta."""
    layout = _layout(path)
    starts = layout.starts(path)
    try:
        with path.open("r+b") as file:
            for number, positions, steps in _changes(delta, starts.stop, layout.word_bytes):
                piece = layout.piece(path, starts[number])
                piece[slice(None) if positions is None else positions] += steps
                file.seek(layout.offset(starts[number]))
                file.write(piece.tobytes())
    except (ValueError, IndexError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise IntegrityError(f"{delta} is no delta of {path}: {error}") from None


def _piece(number: int, old: NDArray[Any], new: NDArray[Any]) -> _Piece:
    steps = new - old
    positions = np.flatnonzero(steps)
    if positions.size > DENSE_SHARE * steps.size:
        return _Piece(number, steps.size, 0, None, _pack(_folded(steps)))
    gaps = np.diff(positions, prepend=-1) - 1
    narrow = gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))
    return _Piece(number, positions.size, narrow.itemsize, _pack(narrow), _pack(_folded(steps[positions])))


def _changes(delta: Path, size: int, word_bytes: int) -> Iterator[tuple[int, NDArray[Any] | None, NDArray[Any]]]:
    with open_tensors(delta, "numpy") as stored:
        facts = json.loads(stored.metadata()["pieces"])
        if len(facts) != -(-size // PIECE_WORDS):
            raise ValueError("it is of another size")
        names = set(stored.keys())
        for key, (count, gap_bytes) in facts.items():
            number = int(key)
            # A count from elsewhere must not decide how much memory is taken.
            if not 0 <= count <= min(PIECE_WORDS, size - number * PIECE_WORDS):
                raise ValueError("a piece is longer than the file")
            steps = _unfolded(_unpack(stored.get_tensor(f"{key}.steps"), count, word_bytes))
            positions = None
            if f"{key}.gaps" in names:
                gaps = _unpack(stored.get_tensor(f"{key}.gaps"), count, gap_bytes)
                positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
            yield number, positions, steps


def _folded(steps: NDArray[Any]) -> NDArray[Any]:
    """Steps up and down (modulo the word) as small numbers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    signed = steps.view(f"i{steps.itemsize}")
    small: NDArray[Any] = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    return small


def _unfolded(folded: NDArray[Any]) -> NDArray[Any]:
    steps: NDArray[Any] = (folded >> 1) ^ (-(folded & 1).view(f"i{folded.itemsize}")).view(folded.dtype)
    return steps


def _pack(words: NDArray[Any]) -> bytes:
    """Compressed, byte by byte of all words: the high bytes of a delta are nearly all alike."""
    planes = np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T)
    packed: bytes = pyarrow.Codec("zstd", compression_level=LEVEL).compress(planes, asbytes=True)
    return packed


def _unpack(packed: NDArray[Any], count: int, word_bytes: int) -> NDArray[Any]:
    raw = pyarrow.Codec("zstd").decompress(packed, count * word_bytes)
    planes = np.frombuffer(raw, np.uint8).reshape(word_bytes, count)
    words: NDArray[Any] = np.ascontiguousarray(planes.T).view(_WORDS[word_bytes]).reshape(-1)
    return words


def _layout(path: Path) -> _Layout:
    with path.open("rb") as file:
        prefix = file.read(8)
        header = prefix + file.read(int.from_bytes(prefix, "little"))
    kinds = {tensor["dtype"] for name, tensor in json.loads(header[8:]).items() if name != "__metadata__"}
    body_bytes = path.stat().st_size - len(header)
    for wanted, word_bytes in ((_TWO_BYTES, 2), (frozenset({"F32"}), 4)):
        if kinds and kinds <= wanted and body_bytes % word_bytes == 0:
            return _Layout(header, word_bytes)
    return _Layout(header, 1)
