"""Compares answers by a person's expressions and schemas, in a process of its own: `python -m
services.sandbox_judge.comparison_child`.

Frames between the judge and the process that compares: four bytes of length, then as many bytes.
Down: a frame with an AnswerRule, then one with the response. Up: a frame with one letter of a Finding, then the reason.

Compares answers by a person's expressions and schemas: `python -m services.sandbox_judge.comparison_child`.
A process of its own, confined in memory and time: an answer on which an expression runs for ever ends here. It runs no
code of anybody's and fetches nothing. Frames on standard input and output are described by `answers.frames`.
"""

from __future__ import annotations

import enum
import resource
import signal
import struct
import sys
from types import FrameType
from typing import BinaryIO

# Loaded before the first clock runs.
import jsonschema  # noqa: F401

from spo.tasks.answer import BrokenSchema, fault_of
from spo.v1.verdict_pb2 import AnswerRule

_LENGTH = struct.Struct(">I")

MEMORY_BYTES = 1 << 30
# Processor time of one answer.
ANSWER_SECONDS = 1.0
READY = b"ready"


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


class TooLong(BaseException):
    """The processor time of an answer is spent; no library catches it on its way."""


def main() -> int:
    for limit, most in {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}.items():
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGPROF, _end)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    write_frame(stdout, READY)
    while (frame := read_frame(stdin)) is not None:
        rule = AnswerRule.FromString(frame)
        response = read_frame(stdin)
        if response is None:
            return 1
        finding, reason = _found(rule, response.decode("utf-8", "surrogatepass"))
        write_frame(stdout, finding.value + reason.encode("utf-8", "replace"))
    return 0


def _found(rule: AnswerRule, response: str) -> tuple[Finding, str]:
    try:
        signal.setitimer(signal.ITIMER_PROF, ANSWER_SECONDS)
        try:
            fault = fault_of(rule, response)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TooLong:
        return Finding.TIME, f"the comparison took more than {ANSWER_SECONDS:g} s of processor time"
    except MemoryError:
        return Finding.MEMORY, "the comparison took more memory than it may"
    except BrokenSchema as error:
        return Finding.BROKEN, str(error)
    return (Finding.RIGHT, "") if fault is None else (Finding.WRONG, fault)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise TooLong


if __name__ == "__main__":
    sys.exit(main())
