"""Numbers as models write them: what is the same number, what is none, and where the last one of a response stands."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from spo.tasks.answer import answer_in, fault_of, last_number, number_of
from spo.tasks.records import AnswerRow
from spo.v1.verdict_pb2 import AnswerRule

# A number, and ways in which models write it.
SAME: dict[str, list[str]] = {
    "57": [
        *("57", "$57", r"\$57", r"\text{57}", r"\mathbf{57}", "**57**", "__57__", "`57`", "57.", "+57", "57.00"),
        *("57%", r"57\%", r"57 \%", "57 percent", "57 pct", "57 dollars", "57 USD", "USD 57", "USD57", "€57", "57€"),
        *("57 apples", "57cm", "57 cm", r"57\text{ cm}^2", r"57\,\text{kg}", "57 km/h", "57 miles per hour"),
        *("57 square meters", r"57 \mathrm{m}^{2}", "57 m²", "57°", r"57^\circ", r"57^{\circ}", "57 °C", "57 degrees"),
        *(r"\boxed{57}", r"$\boxed{57}$", r"\(57\)", r"\[57\]", "$$57$$", "x = 57", "$x=57$", r"57\ \text{ways}"),
        *("(57)", "{57}", '"57"', "\u201c57\u201d", r"\left(57\right)", "\u2248 57", r"\approx 57"),
        *(r"$\approx 57$", "~57", r"\color{red}{57}", r"\textcolor{blue}{57}", r"\boxed{(57)}"),
        *("$57$ apples", "57 units of mass", r"\text{\$}57", r"57\$", r"\$57.00 per day", r"\boxed{\text{57 dollars}}"),
        *("[57]", "($57)", "<57>", "((57))", "[(57)]", r"\{57\}", r"\left[57\right]", "\u00ab57\u00bb"),
        *("\u201857\u2019", "[$57.00]"),
        *("Answer: 57", "The answer is 57.", "**Final Answer:** $57", "the final answer is: **57**."),
        "Answer: 57 apples.",
        *(r"Therefore, the final answer is $\boxed{57}$.", "Result: 57", "My answer is 57 cm"),
        *("answer = 57", "#### 57"),
        *("f(3) = 57", "x_1 = 57", r"\theta = 57^\circ", r"m\angle ABC = 57", "AB = 57 cm"),
        r"\text{Total cost} = \$57",
        *("\uff15\uff17", "\uff04\uff15\uff17", "\uff15\uff17\uff05", "\u0665\u0667", "\u096b\u096d"),
        "\U0001d7d3\U0001d7d5",
        *("57 sq. ft.", "57 feet squared", "57\u00a2", "\u202d57\u202c", "57\u200e", r"{\bf 57}", r"57 \\"),
        r"\nicefrac{114}{2}",
        *(r"y \approx 57", "\u2022 57", "5.7e1", "5.7E+1", "57 %", "(\uff15\uff17)"),
    ],
    "-5": ["-5", "$-5", "-$5", r"-\$5", r"\$-5", "\u22125", "\u20135", "-5.0", "- 5", r"\text{-5}", "**-5**", "-10/2"],
    "1234567.5": [
        *("1,234,567.5", "1{,}234{,}567.5", r"1\,234\,567.5", r"1,\!234,\!567.5", "1 234 567.5", r"\$1{,}234{,}567.5"),
        *("1\u2009234\u2009567.5", "1\u00a0234\u00a0567.5", "1\u202f234\u202f567.5", "1 {, }234 {, }567.5"),
        *("1'234'567.5", "1\u2019234\u2019567.5", "1_234_567.5", "12,34,567.5", "\u20b912,34,567.5", "(1'234'567.5)"),
    ],
    "5000000": [
        *("5 million", "$5 million", "5,000,000", "5e6", "5000 thousand"),
        *("$5M", r"\$5.0 M", "\u20ac5000k", "$.005bn", "$5mn"),
        *(r"5 \times 10^6", r"5\cdot10^{6}", "5\u00d710⁶"),
    ],
    "24": ["2 dozen", "24", "72/3", r"\frac{72}{3}"],
    "0.001": ["10^{-3}", "10⁻³", "1e-3", ".001", "1/1000", r"\frac{1}{1000}", r"1 \times 10^{-3}"],
    "3/4": ["3/4", "3 / 4", ".75", r"\frac{3}{4}", r"\dfrac{3}{4}", r"\tfrac34", r"\frac{3}{4}\text{ cup}", "¾"],
    "-3/4": [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", "-0.75"],
    "5/2": ["2 \u00bd", "[2 1/2]", "2 1/2", r"2\frac{1}{2}", "2½", "2 1/2 hours", "5/2", "2.5"],
}  # fmt: skip
NONE = [
    *(
        "57 or 58",
        "57, 58",
        "57 and 58",
        "57 or sixty",
        "either 57",
        "not 57",
        "57?8",
        "around 57",
        "57 more",
        "3 out of 4",
    ),
    *("4 2", "1 2345", "1.234,5", "0,5", "10,00", "1,234,56", "1 234,5", "57.5.2", "1:30", "2024-11-25", "12-5", "5-"),
    *("57x", "3i", r"2\pi", r"\sqrt{4}", r"3\sqrt{2}", "5^2", "5**2", "5*2", "5!", "3 + 4", r"\pm 5", "57 squared"),
    *(
        "57 halves",
        "57 thousandths",
        "1/0",
        r"\frac{1}{0}",
        "1/2/3",
        "--5",
        "-(-5)",
        "+-5",
        "0x2a",
        "nan",
        "inf",
        "57th",
    ),
    *(
        "5M",
        "5k",
        "$5Mb",
        "(3,234)",
        "{1,2}",
        "(1, 2)",
        "[57, 58]",
        "((57)",
        "1'23",
        "1_23",
        "1,23,45",
    ),
    *("1e5e", r"\frac{x}{2}", r"\binom{5}{2}", "57 to 58", "57; 58", "five", "", "$", r"\boxed{}", "57\n58"),
    *(
        "[57)",
        "(57]",
        "[5,7]",
        "[1,234]",
        "{57; 58}",
        "<57",
        "> 57",
        "57\uff0c58",
        "1.234.567",
        "57,00 \u20ac",
        "57\u2030",
    ),
    *(
        "The answer is not 57",
        "The answer isn't 57",
        "The answer is 57 or 58",
        "Answer: about 57",
        "The wrong answer is 57",
    ),
    *("The answer is 57. No, 58", "The answer to 12 is 57", "The answer is", "Answer: 57, not 58", "The answer is 57?"),
    *(
        "x^2 = 57",
        "2x = 57",
        "-x = 57",
        "1/x = 57",
        "sin x = 57",
        r"\sin(x) = 57",
        "sqrt(x) = 57",
        "log(x) = 57",
        "xy = 57",
    ),
    *(
        "not = 57",
        "half = 57",
        r"x \ne 57",
        "x \u2260 57",
        "57 = 58",
        "\u2075\u2077",
        "0x39",
        "57\u2026",
        "12 + 45 = 57",
    ),
]
LAST = {
    "it is 3/4": ("3/4", "4"),
    "it is 3 / 4": ("3/4", "4"),
    "it is 1 234": ("1234", "234"),
    "it is 1\u202f234": ("1234", "234"),
    "it is 1.234,5": (None, "5"),
    "it is 0,5": (None, "5"),
    "it is 1,5 or so": (None, "5"),
    "it is 12-5": (None, "5"),
    "it is 12 - 5": (None, "5"),
    "it is 2^5": (None, "5"),
    "it is 2*5": (None, "5"),
    r"it is 2 \times 5": (None, "5"),
    "at 1:30": (None, "30"),
    "version 3.4.5": (None, "5"),
    r"it is $\frac{3}{4}$": ("3/4", "4"),
    r"it is $\frac{x}{4}$": (None, "4"),
    r"it is 2\frac{1}{2}": ("5/2", "2"),
    "it is 2 1/2 hours": ("5/2", "2"),
    r"it is \sqrt{16}": (None, "16"),
    r"it is 3\sqrt{2}": (None, "2"),
    r"it is 2\pi": (None, "2"),
    "it is 3x": (None, "3"),
    "it is x^2": (None, "2"),
    "it is 5 million": ("5000000", "5"),
    r"it is 2.5 \times 10^{4}.": ("25000", "4"),
    "it loses -$5": ("-5", "5"),
    r"it loses -\$5": ("-5", "5"),
    r"it is \$1{,}234 in all": ("1234", "234"),
    "it is **57**.": ("57", "7"),
    "the area is 10 cm^2": ("10", "2"),
    "the area is 10 m²": ("10", "2"),
    r"the area is $10 \text{ cm}^2$": ("10", "2"),
    "H2O": (None, "2"),
    "12 - 5 = 7": ("7", "5"),
    "so 3+4=7": ("7", "4"),
    "- 5 apples\n- 7 pears": ("7", "-7"),
    "it is 50%": ("50", "0"),
    "it costs $1.5M.": ("1500000", "5"),
    "it costs $1.5 mm": ("1.5", "1500000"),
    "it is 6.02x10^23": ("6.02e23", "23"),
    "it is 1'234": ("1234", "234"),
    "it is \u20b912,34,567": ("1234567", "567"),
    "use v2 100": ("100", "2100"),
    "In all 1,234,567 of them.": ("1234567", "567"),
}


def numeric(expected: str, **fields: Any) -> AnswerRule:
    return AnswerRow(expected=(expected,), comparison="numeric", **fields).rule()


def value(text: str) -> Fraction | None:
    found = number_of(text)
    return None if found is None else Fraction(found.numerator) / Fraction(found.denominator)


@pytest.mark.parametrize("written", SAME)
def test_a_number_is_the_same_however_a_model_writes_it(written: str) -> None:
    assert {text: value(text) for text in SAME[written]} == dict.fromkeys(SAME[written], Fraction(written))


def test_what_is_several_numbers_or_a_piece_of_something_else_is_none() -> None:
    assert {text: value(text) for text in NONE} == dict.fromkeys(NONE)


@pytest.mark.parametrize("response", LAST)
def test_the_last_number_is_given_with_all_that_belongs_to_it(response: str) -> None:
    right, wrong = LAST[response]
    assert value(last_number(response)) == (None if right is None else Fraction(right))
    assert fault_of(numeric(wrong, extraction="last_number"), response) is not None


@pytest.mark.parametrize(
    ("expected", "absolute", "relative", "inside", "outside"),
    [
        ("0.3", 0.1, 0, ["0.2", "0.4", "2/5"], ["0.19999999999999999999", "0.40000000000000000001", "0.41"]),
        ("1", 0.3, 0, ["0.7", "1.3"], ["0.69", "1.31"]),
        ("100", 0, 0.07, ["93", "107"], ["92.99999999999", "107.00000000001"]),
        ("-3", 0.1, 0.1, ["-2.6", "-3.4"], ["-2.59", "-3.41", "3"]),
        ("1/3", 0.01, 0, ["0.33", "1/3", "0.3433333333"], ["0.32", "0.34333333334"]),
        ("1/3", 0, 0, ["1/3", "2/6", r"\frac{10}{30}"], ["0.333333333333333333333333"]),
    ],
)
def test_what_lies_exactly_at_a_tolerance_is_right(
    expected: str, absolute: float, relative: float, inside: list[str], outside: list[str]
) -> None:
    rule = numeric(expected, absolute_tolerance=absolute, relative_tolerance=relative)
    assert [fault_of(rule, text) for text in inside] == [None] * len(inside)
    assert None not in [fault_of(rule, text) for text in outside]


def test_numbers_of_more_digits_than_python_converts_are_compared_exactly() -> None:
    long = "1" + "0" * 5000
    assert fault_of(numeric(long), f"{long}.0") is None
    assert fault_of(numeric(long), long[:-1] + "1") is not None
    assert fault_of(numeric(long), f"{long}1") is not None


BOXED = [
    r"\boxed{57}", r"\boxed {57}", r"\boxed{\boxed{57}}", r"\fbox{57}", r"$\boxed{57}$.", r"\boxed 57", r"\boxed{$57$}",
    r"\boxed{\text{57}}", r"\boxed{x = 57}", r"\boxed{57\text{ m}}", r"\boxed{56}, no: \boxed{57}",
]  # fmt: skip


def test_what_is_boxed_is_found_in_all_its_forms() -> None:
    rule = numeric("57", extraction="boxed")
    assert {text: fault_of(rule, text) for text in BOXED} == dict.fromkeys(BOXED)


MARKED = [
    "#### 57",
    "####57",
    "#### **57**",
    "**#### 57**",
    r"#### \$57",
    "#### $57",
    "#### 57 dollars",
    "#### 57.",
    "#### 57%",
]


def test_what_stands_after_a_marker_is_found_in_all_its_forms() -> None:
    rule = numeric("57", extraction="after_marker", marker="####")
    assert {text: fault_of(rule, text) for text in MARKED} == dict.fromkeys(MARKED)


# Two harnesses' cases for GSM8K, by the patterns that they publish: what they take from a response, and what we take.
# lm-evaluation-harness: strict is the first `#### (-?[0-9.,]+)`, flexible the last run of digits, "$", "." and ",";
# commas, dollar signs and a full stop at the end are dropped. verl: strict the last `#### (-?[0-9.,]+)`, flexible the
# last run of digits, "." and ",". Where `differs` gives a rule, docs/verifiers.md states it.
GSM8K = [
    ("The answer is #### 42", "after_marker", "42", ""),
    ("After calculation #### 123", "after_marker", "123", ""),
    ("First #### 10\nand #### 20", "after_marker", "20", ""),
    ("Price is #### 1,234", "after_marker", "1234", ""),
    ("Cost #### -15", "after_marker", "-15", ""),
    ("#### 3.5", "after_marker", "3.5", ""),
    ("no marker, 42", "after_marker", None, ""),
    ("#### $18", "after_marker", "18", "a currency belongs to the number"),
    ("#### 18 dollars", "after_marker", "18", ""),
    ("#### eighteen", "after_marker", None, ""),
    ("#### 18 or 19", "after_marker", None, "two numbers are none"),
    ("#### 3/4", "after_marker", "3/4", "a fraction is one number"),
    ("We got 10. Then 42.", "last_number", "42", ""),
    ("First 5, then 7, so $12.", "last_number", "12", ""),
    ("It costs $1,250.00 in all", "last_number", "1250", ""),
    ("so -7 remains", "last_number", "-7", ""),
    ("words alone", "last_number", None, ""),
    ("It is 3/4", "last_number", "3/4", "a fraction is one number"),
    ("It is 12-5", "last_number", None, "a calculation is no number"),
    ("It is 1 250", "last_number", "1250", "spaces part thousands"),
    ("the area is 10 m^2", "last_number", "10", "an exponent of a unit is no number"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "extraction", "right", "differs"), GSM8K)
def test_gsm8k_answers_are_found_as_other_harnesses_find_them_or_by_a_stated_rule(
    response: str, extraction: str, right: str | None, differs: str
) -> None:
    marker = {"marker": "####"} if extraction == "after_marker" else {}
    found = answer_in(numeric("0", extraction=extraction, **marker), response)
    assert value(found) == (None if right is None else Fraction(right)), differs
