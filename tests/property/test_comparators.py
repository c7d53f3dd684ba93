"""The judge's comparisons against slow references that say the same in other words."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

from services.sandbox_judge.program_judge import first_difference
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Checker

WORDS = st.sampled_from([b"a", b"A", b"1", b"01", b"1.0", b"-0", b"nan", b"inf", b"\xef\xbc\x91", b"\xff", b"x\0"])
SPACES = st.sampled_from([b" ", b"\n", b"\t", b"  ", b"\r\n", b" \n", b"\n\n"])
TEXTS = st.lists(st.one_of(WORDS, SPACES), max_size=8).map(b"".join)
PAIRS = st.one_of(st.tuples(TEXTS, TEXTS), TEXTS.map(lambda text: (text, text)))
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**30), max_value=10**30)


def accepts(checker: int, expected: bytes, actual: bytes, absolute: float = 0, relative: float = 0) -> bool:
    test_set = verdict_pb2.TestSet(checker=checker, absolute_tolerance=absolute, relative_tolerance=relative)
    return first_difference(test_set, expected, actual) is None


def slow_words(text: bytes) -> list[bytes]:
    """Words by hand, one byte after the other."""
    words, word = [], b""
    for position in range(len(text)):
        byte = text[position : position + 1]
        if byte in (b" ", b"\t", b"\n", b"\r", b"\x0b", b"\x0c"):
            if word:
                words.append(word)
            word = b""
        else:
            word += byte
    return [*words, word] if word else words


@given(PAIRS)
def test_tokens_are_equal_exactly_when_the_words_are(pair: tuple[bytes, bytes]) -> None:
    expected, actual = pair

    assert accepts(Checker.CHECKER_TOKENS, expected, actual) == (slow_words(expected) == slow_words(actual))
    assert accepts(Checker.CHECKER_UNSPECIFIED, expected, actual) == accepts(Checker.CHECKER_TOKENS, expected, actual)


@given(PAIRS)
def test_exact_forgives_one_missing_newline_at_the_end_and_nothing_else(pair: tuple[bytes, bytes]) -> None:
    expected, actual = pair
    endings = [b"", b"\n"]

    same = any(
        expected == core + first and actual == core + second
        for core in (expected, expected[:-1], actual)
        for first in endings
        for second in endings
    )

    assert accepts(Checker.CHECKER_EXACT, expected, actual) == same


@given(PAIRS)
def test_case_insensitive_means_ascii_letters_only(pair: tuple[bytes, bytes]) -> None:
    def fold(word: bytes) -> bytes:
        return bytes(byte + 32 if ord("A") <= byte <= ord("Z") else byte for byte in word)

    expected, actual = pair
    same = [fold(word) for word in slow_words(expected)] == [fold(word) for word in slow_words(actual)]

    assert accepts(Checker.CHECKER_CASE_INSENSITIVE, expected, actual) == same


@given(st.lists(st.sampled_from([b"a b", b"a  b", b"b", b"", b"c"]), max_size=4), st.data())
@settings(deadline=None)
def test_unordered_lines_accepts_exactly_the_permutations(lines: list[bytes], data: st.DataObject) -> None:
    other = data.draw(st.one_of(st.permutations(lines), st.lists(st.sampled_from([b"a b", b"b", b"c"]), max_size=4)))

    def normal(each: list[bytes]) -> tuple[bytes, ...]:
        return tuple(b" ".join(slow_words(line)) for line in each if slow_words(line))

    same = normal(list(other)) in set(permutations(normal(lines)))

    assert accepts(Checker.CHECKER_UNORDERED_LINES, b"\n".join(lines), b"\n".join(other)) == same


@given(DECIMALS, DECIMALS, st.sampled_from([0.0, 1e-9, 1e-6, 0.5, 3.0]), st.sampled_from([0.0, 1e-9, 1e-3, 1.0]))
def test_floats_agree_with_exact_rationals(expected: object, actual: object, absolute: float, relative: float) -> None:
    if absolute == relative == 0:
        absolute = relative = 1e-6
    wanted, got = Fraction(str(expected)), Fraction(str(actual))
    close = abs(wanted - got) <= Fraction(str(absolute)) + Fraction(str(relative)) * abs(wanted)

    assert accepts(Checker.CHECKER_FLOAT, str(expected).encode(), str(actual).encode(), absolute, relative) == close


@given(DECIMALS, st.sampled_from([1e-9, 1e-6, 0.25]), st.booleans())
def test_the_tolerance_itself_is_still_inside(expected: object, absolute: float, above: bool) -> None:
    edge = Fraction(str(expected)) + (1 if above else -1) * Fraction(str(absolute))
    scale = 10**40
    digits = math.floor(edge * scale) if above else math.ceil(edge * scale)  # rounded towards expected
    sign, digits = ("-", -digits) if digits < 0 else ("", digits)
    actual = f"{sign}{digits // scale}.{digits % scale:040d}"

    assert accepts(Checker.CHECKER_FLOAT, str(expected).encode(), actual.encode(), absolute, 0)


@pytest.mark.parametrize(
    ("expected", "actual", "accepted"),
    [
        (b"nan", b"NaN", True),
        (b"nan", b"1", False),
        (b"1", b"nan", False),
        (b"inf", b"Infinity", True),
        (b"inf", b"-inf", False),
        (b"inf", b"1e999", False),
        (b"1e300", b"inf", False),
        (b"1", b"+1.0e0", True),
        (b"1", b".999999999", True),
        (b"1", b"1.", True),
        (b"-0", b"0", True),
        (b"1", b"\xef\xbc\x91", False),
        (b"1", b"0x1", False),
        (b"1", b"1_0", False),
        (b"1", b"1e", False),
        (b"yes 1", b"yes 1.0000001", True),
        (b"yes 1", b"no 1", False),
        (b"1 2", b"1", False),
        (b"1", b"1 2", False),
        (b"1e999999999", b"1e999999999", True),
        (b"1e999999999", b"2e999999999", False),
        (b"1" + b"0" * 5000, b"1" + b"0" * 4999 + b"1", True),
        (b"1" + b"0" * 5000, b"2" + b"0" * 5000, False),
    ],
)
def test_special_numbers_have_precise_rules(expected: bytes, actual: bytes, accepted: bool) -> None:
    assert accepts(Checker.CHECKER_FLOAT, expected, actual) is accepted


def test_the_first_difference_is_named_and_short() -> None:
    test_set = verdict_pb2.TestSet(checker=Checker.CHECKER_TOKENS)

    difference = first_difference(test_set, b"1 2 3", b"1 " + b"9" * 10_000 + b" 3")

    assert difference is not None
    assert difference.startswith("token 2: expected '2', found '9999")
    assert len(difference) < 200
