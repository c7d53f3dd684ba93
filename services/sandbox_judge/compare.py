"""Does an output answer a test? Bytes in, the first difference out; no locale, no unicode digits, no surprises.

tokens            the same sequence of words between ASCII whitespace
exact             the same bytes; a newline at the very end may be missing
float             tokens, except that two decimal numbers may differ by absolute + relative * |expected|; nan equals
                  only nan, an infinity only itself
unordered lines   the same lines (as tokens, blank ones dropped) in any order
case insensitive  tokens, ASCII letters alike
"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal

from spo.tasks.scoring.numbers import Number, is_close
from spo.v1.verdict_pb2 import Checker, TestSet

DEFAULT_TOLERANCE = 1e-6
_SHOWN_BYTES = 80
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?|[+-]?inf(inity)?|[+-]?nan", re.IGNORECASE | re.ASCII)


def first_difference(test_set: TestSet, expected: bytes, actual: bytes) -> str | None:
    """None when actual is right under the test set's checker, otherwise where it first goes wrong.

    Raises ValueError for CHECKER_SPECIAL, which is a program and not a comparison.
    """
    match test_set.checker:
        case Checker.CHECKER_EXACT:
            same = expected.removesuffix(b"\n") == actual.removesuffix(b"\n")
            return None if same else _lines_differ(expected.split(b"\n"), actual.split(b"\n"))
        case Checker.CHECKER_FLOAT:
            return _floats_differ(test_set, expected.split(), actual.split())
        case Checker.CHECKER_UNORDERED_LINES:
            return _multisets_differ(_normalised_lines(expected), _normalised_lines(actual))
        case Checker.CHECKER_CASE_INSENSITIVE:
            return _tokens_differ(expected.lower().split(), actual.lower().split())
        case Checker.CHECKER_TOKENS | Checker.CHECKER_UNSPECIFIED:
            return _tokens_differ(expected.split(), actual.split())
        case other:
            raise ValueError(f"checker {Checker.Name(other)} is not a comparison")


def _tokens_differ(expected: list[bytes], actual: list[bytes]) -> str | None:
    if expected == actual:
        return None
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found:
            return f"token {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    return _counts_differ("tokens", len(expected), len(actual))


def _floats_differ(test_set: TestSet, expected: list[bytes], actual: list[bytes]) -> str | None:
    absolute, relative = test_set.absolute_tolerance, test_set.relative_tolerance
    if absolute == 0 and relative == 0:
        absolute = relative = DEFAULT_TOLERANCE
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found and not _close(right, found, absolute, relative):
            return f"token {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    if len(expected) != len(actual):
        return _counts_differ("tokens", len(expected), len(actual))
    return None


def _close(right: bytes, found: bytes, absolute: float, relative: float) -> bool:
    if not (_NUMBER.fullmatch(right) and _NUMBER.fullmatch(found)):
        return False
    wanted, got = Decimal(right.decode()), Decimal(found.decode())
    if wanted.is_nan() or got.is_nan():
        return wanted.is_nan() and got.is_nan()
    if wanted.is_infinite() or got.is_infinite():
        return wanted == got
    return is_close(Number(wanted), Number(got), absolute, relative)


def _normalised_lines(text: bytes) -> list[bytes]:
    return [b" ".join(tokens) for line in text.split(b"\n") if (tokens := line.split())]


def _multisets_differ(expected: list[bytes], actual: list[bytes]) -> str | None:
    missing = Counter(expected)
    missing.subtract(Counter(actual))
    for line, count in missing.items():
        if count:
            return f"line {_shown(line)} {'is missing' if count > 0 else 'should not be there'}"
    return None


def _lines_differ(expected: list[bytes], actual: list[bytes]) -> str:
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found:
            return f"line {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    return _counts_differ("lines", len(expected), len(actual))


def _counts_differ(what: str, expected: int, actual: int) -> str:
    return f"expected {expected} {what}, found {actual}"


def _shown(text: bytes) -> str:
    shown = ascii(text[:_SHOWN_BYTES].decode(errors="replace"))
    return shown if len(text) <= _SHOWN_BYTES else f"{shown}... ({len(text)} bytes)"
