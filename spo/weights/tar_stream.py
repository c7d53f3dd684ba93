"""A folder of files as a tar archive, piece by piece: memory stays bounded whatever their size."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BYTES_PER_READ = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


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
