"""A part of a dataset as it arrives, in however many pieces."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request

from services.orchestrator.http.experience import _write

PIECES = 300


class Piece(bytes):
    """Counts how often somebody asks for the length of any."""

    asked = 0

    def __len__(self) -> int:
        Piece.asked += 1
        return super().__len__()


class Arriving(Request):
    """A body that comes byte by byte."""

    async def stream(self) -> AsyncIterator[bytes]:
        for _ in range(PIECES):
            yield Piece(b"x")


def test_tiny_pieces_are_each_looked_at_once(tmp_path: Path) -> None:
    """All of them at each piece would hold up the event loop, and so everybody, for minutes."""
    digest = asyncio.run(_write(Arriving({"type": "http"}), tmp_path / "part"))

    assert (tmp_path / "part").read_bytes() == b"x" * PIECES
    assert digest == f"sha-256=:{b64encode(hashlib.sha256(b'x' * PIECES).digest()).decode()}:"
    assert Piece.asked <= 2 * PIECES
