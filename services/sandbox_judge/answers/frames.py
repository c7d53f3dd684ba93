"""Frames between the judge and the process that compares: four bytes of length, then as many bytes.

Down: a frame with an AnswerRule, then one with the response. Up: a frame with one letter of a Finding, then the reason.
"""

from __future__ import annotations

import enum
import struct
from typing import BinaryIO

_LENGTH = struct.Struct(">I")


class Finding(enum.Enum):
    """What a comparison came to."""

    RIGHT = b"r"
    WRONG = b"w"
    TIME = b"t"
    MEMORY = b"m"
    # The rule itself cannot decide.
    BROKEN = b"b"


def write_frame(stream: BinaryIO, content: bytes) -> None:
    """Write and flush one frame."""
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None
