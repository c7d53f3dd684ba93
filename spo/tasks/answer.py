"""Answers: cut out of a response by a stated rule, and compared with the expected ones; nothing is guessed.

Numbers as models write them: in LaTeX, in bold, with units, currencies and parted thousands; docs/verifiers.md has
the rules.
A text is one number or none: nothing takes the 4 of `3/4` or the 5 of `1.234,5`. All functions take time linear in the
text and raise on none.

Comparisons of answers beyond the same text and the same number: labels of choices, expressions, JSON by schema.
Labels take time linear in the text. Expressions and schemas are a person's and meet text of a model's: what they take
has no bound here, so that the judge compares by them in a process that it can end.

A response comes from a model and may hold anything: no function here raises on one, and all take time linear in it,
comparisons by regular expressions and schemas apart (spo.tasks.answer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


# What is longer is no answer; it also bounds the time that arithmetic takes.
LONGEST_ANSWER = 10_000
# Products of two answers are exact; of numbers far apart, the difference is known by its leading digits.
_ARITHMETIC = Context(prec=2 * LONGEST_ANSWER + 100, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation])

# Spaces and commas count where they part thousands, as in India lakhs as well; "1,2" and "1 2" are two numbers.
_PARTED = (
    r"\d{1,3}(?:,\d{3})+(?!,?\d)|(?<![A-Za-z])\d{1,3}(?: \d{3})+(?! ?\d)"
    r"|\d{1,3}(?:'\d{3})+(?!'?\d)|\d{1,3}(?:_\d{3})+(?!_?\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"
)
_NUMERAL = rf"(?:(?:{_PARTED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,9}}(?!\d))?"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SHORT_SCALES = {"k": "thousand", "m": "million", "b": "billion", "t": "trillion"}
_SCALE = rf" ?(?i:{'|'.join(_SCALES)}|dozen)\b"
_CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK|C|A)?\$|[€£¥₹₩₽₪฿]"
    r"|(?<![A-Za-z])(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|CAD|AUD|Rs\.?)(?![A-Za-z]))"
)
# Behind an amount of money these are no units: "$1.5M".
_SHORT_SCALE = re.compile(r" ?(k|K|[mM]n?|[bB]n?|tn|T)(?![A-Za-z])")
_LEADING_CURRENCY = re.compile(rf"^([+-]?){_CURRENCY} ?", re.ASCII)
# "The answer is 57", "Final answer: B": what says that an answer follows.
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s{1,3})?(?:(?:the|my|our)\s{1,3})?"
    r"(?:(?:final|correct|right|best|only)\s{1,3}){0,2}(?:answer|ans|result|solution|option|choice)\b"
    r"(?:\s{0,3}(?:is\b\s{0,3}:?|[:=.]))?\s{0,3}",
    re.IGNORECASE,
)
# The x of "x = 57", the function of "f(3) = 57" and the words of "Total cost = 57"; not the "x^2" of "x^2 = 57".
_NAME = (
    r"(?:(?:\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|rho|sigma|tau|omega)(?![A-Za-z])|[A-Za-z\u03b1-\u03c9])"
    r"(?:_\{?[A-Za-z0-9]{1,4}\}?)?(?: ?\([A-Za-z0-9, ]{1,9}\))?|(?:m ?)?(?:\\angle|∠) ?[A-Z]{1,3}|[A-Z]{2,4}"
    r"|(?P<words>[A-Za-z]{3,20}(?: [A-Za-z]{2,20}){0,3}))"
)
_HEAD = re.compile(
    rf"(?:{_NAME}? ?= ?|(?:[A-Za-z] ?)?≈ ?)?(?P<sign>[+-] ?)?(?P<money>{_CURRENCY} ?(?P<inner>[+-])?)?", re.ASCII
)
_FRACTION = rf"\\frac ?(?:\{{ ?([+-]?{_NUMERAL}) ?\}}|(\d)) ?(?:\{{ ?([+-]?{_NUMERAL}) ?\}}|(\d))"
_ANY_FRACTION = rf"\\frac ?(?:\{{ ?[+-]?{_NUMERAL} ?\}}|\d) ?(?:\{{ ?[+-]?{_NUMERAL} ?\}}|\d)"
# Tried in this order: what stands at the beginning of a number, its sign apart.
_MIXED = re.compile(rf"(\d+)(?: ?{_FRACTION}| {{1,2}}(\d+) ?/ ?(\d+))", re.ASCII)
_QUOTIENT = re.compile(rf"{_FRACTION}|({_NUMERAL}) ?/ ?({_NUMERAL})", re.ASCII)
_POWER = re.compile(rf"(?:({_NUMERAL}) ?[·*x] ?)?10 ?\^ ?(?:\{{ ?([+-]?\d{{1,9}}) ?\}}|([+-]?\d{{1,9}}))", re.ASCII)
_UNSIGNED = re.compile(_NUMERAL, re.ASCII)
_PLAIN = re.compile(rf"[+-]?{_NUMERAL}", re.ASCII)

# Units: symbols that may follow at once, and words. What changes the number, or names another, is no unit.
_SYMBOL_WORDS = """
    m g s h L l mm cm dm km nm mg kg lb lbs oz ft in yd mi ml mL cl dl ms min mins hr hrs sec secs kph mph J kJ W kW kWh
    V N Pa kPa Hz kHz MHz GHz B kB MB GB TB am pm a.m. p.m. °C °F K sq cu C F
"""
_OTHER_WORDS = """
    about above and another approximately are around below both but choose cubed divided dozens double either factorial
    few fewer greater half halves if incorrect inf infinite infinity is large larger least less maybe minus mod modulo
    more most nan negative nor not nothing or otherwise over perhaps plus possibly power probably raised root squared
    than then through times triple unknown unless versus was wrong
    arccos arcsin arctan cos cosh cot csc exp frac log max sec sin sinh sqrt tan tanh theta
    zero one ones two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    hundred hundreds thousand thousands million millions billion billions trillion trillions
    third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths
    tenth tenths hundredth hundredths thousandth thousandths
"""
_SYMBOLS, _NO_UNITS = frozenset(_SYMBOL_WORDS.split()), frozenset(_OTHER_WORDS.split())
_WORD = re.compile(r"[A-Za-zµΩ°.]+")
_RAISED_WORD = rf"{_WORD.pattern}(?: ?\^ ?\{{? ?-?\d ?\}}?)?"
_WORDS = re.compile(rf"{_RAISED_WORD}(?:(?: ?[/·*-] ?| ){_RAISED_WORD}){{0,4}}")
# These may stand within a unit: "units of mass", "miles in a day", "feet squared".
_WITHIN = frozenset({"of", "a", "squared", "cubed"})

_VULGAR = {
    **{"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"},
    **{"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"},
}
# The digits of other scripts: of full width, Arabic, Persian, Devanagari, Bengali, Thai, and mathematical ones.
_ZEROS = (0xFF10, 0x660, 0x6F0, 0x966, 0x9E6, 0xE50, *range(0x1D7CE, 0x1D800, 10))
_DIGITS = {chr(zero + digit): str(digit) for zero in _ZEROS for digit in range(10)}
# Latin letters and signs of full width.
_WIDE = {chr(0xFEE0 + ord(sign)): sign for sign in map(chr, range(0x21, 0x7F)) if not sign.isdigit()}
_CHARACTERS = str.maketrans(
    {
        **_DIGITS,
        **_WIDE,
        **{"\u066b": ".", "\u066c": ","},
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"),
        **dict.fromkeys("\u00a0\u202f\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u3000\t", " "),
        # What shows nothing: joiners, and marks of the direction of writing.
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062", ""),
        **dict.fromkeys("\u2063\u2064\u2066\u2067\u2068\u2069\ufeff", ""),
        **dict.fromkeys("\u00ba\u02da\u2218", "°"),
        **{"\u2044": "/", "\u2018": "'", "\u2019": "'", "\u00d7": "·", "\u22c5": "·"},
        **{sign: f" {quotient}" for sign, quotient in _VULGAR.items()},
    }
)
_ANY_DIGIT = frozenset("0123456789").union(_VULGAR, _DIGITS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_PARTING = str.maketrans("", "", ", '_")
_RAISED = re.compile(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|normal)|operatorname|mbox|hbox|boxed|fbox|emph|bm"
    r"|boldsymbol|underline|ensuremath) ?\{([^{}]*)\}"
)
# What stands for white space, for nothing, and for another sign.
_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(expression), instead)
    for expression, instead in (
        (r"\\!|\\(?:left|right|displaystyle|textstyle|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\\[,;:> ]|~|\\(?:q?quad|thinspace|enspace|medspace|thickspace)(?![A-Za-z])", " "),
        (r" {0,3}\{ {0,3}, {0,3}\} {0,3}", ","),
        (r"\{ {0,3}\. {0,3}\}", "."),
        (r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])", r"\\frac"),
        (r"(?:\{\})? ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\(?:degrees?|textdegree)(?![A-Za-z])", "°"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "·"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(?:approx|simeq)(?![A-Za-z])", "≈"),
        (r"\\(?:text)?color ?\{[^{}]*\}|\\(?:bf|rm|it|sf|tt|bfseries)(?![A-Za-z])", ""),
        (r"\\(?:math|text)dollar(?![A-Za-z])|\\\$", "$"),
        (r"\\(?:pounds|textsterling)(?![A-Za-z])", "£"),
        (r"\\(?:euro|texteuro)(?![A-Za-z])", "€"),
        (r"\\(?:percent(?![A-Za-z])|%)", "%"),
        (r"\\[()\[\]]", "$"),
        # Emphasis; between two numbers it would be a product or a power.
        (r"`", ""),
        (r"(?<![0-9A-Za-z)}$%°.])[*_]{1,3}|[*_]{1,3}(?![0-9A-Za-z({\\$.+*_-])", ""),
    )
)
# What encloses a number and says nothing about it, accountants' parentheses too; a comma there parts two.
_ENCLOSED = re.compile(
    r"\\?\{([^{},]*)\}|\(([^{},]*)\)|\[([^{},]*)\]|<([^<>,]*)>|\u00ab([^\u00ab\u00bb,]*)\u00bb"
    r"|[\"\u201c]([^\"\u201c\u201d]*)[\"\u201d]|'([^']*)'"
)
_MARKED = re.compile(r"[\\*_`~{]")
_LONGEST_UNIT = 80
_NESTED = 4
# Letters of a word that may follow a number at once, as in "57apples"; shorter ones are symbols or variables.
_SHORT = 4
# Where the last number is looked for: so far before the last digit and behind it. Nothing longer is an answer.
_BEFORE, _BEHIND = 3 * LONGEST_ANSWER, 60
_NEAR = 24
# What makes one expression of two numbers. No line break does.
_JOIN = (
    r"(?: ?[/·÷^+] ?[{(]?[+-]?|\*{1,2}| \* |-| - | x (?=\d)|x(?=10 ?\^)|[.,:_'](?=\d)|(?= ?\\frac) ?| (?=\d+ ?/ ?\d))"
)
_RUN = re.compile(
    rf"[+-]?(?:{_CURRENCY} ?[+-]?)?(?:{_ANY_FRACTION}|{_NUMERAL})"
    rf"(?:{_JOIN}{_CURRENCY}?(?:{_ANY_FRACTION}|{_NUMERAL})\}}?)*(?:{_SCALE})?",
    re.ASCII,
)
_FUNCTIONS = (
    r"(?:sqrt|[dt]?binom|overline|ln|log|lg|exp|a?r?c?sin|a?r?c?cos|a?r?c?tan|cot|sec|csc|[lr]floor|[lr]ceil|pm|mp|pi"
    r"|frac|gcd|max|min)"
)
# The 2 of "10 cm^2" is no number of its own; those of "x^2", "\sqrt{2}", "3\pi" and "H2O" are pieces of something else.
_OF_A_UNIT = re.compile(r"(?:[A-Za-zµ]{2,}|(?<![A-Za-z])[ms]) ?\^ ?\{? ?$")
_PIECE_BEFORE = re.compile(
    rf"(?:\\?{_FUNCTIONS} ?(?:\[[^\]]{{0,9}}\])? ?[{{(]? ?|[√±] ?|[^\s^_] ?[\^_] ?\{{? ?|\}} ?\{{ ?"
    r"|(?<![A-Za-z])[A-Za-z]{1,3})$"
)
_PIECE_AFTER = re.compile(rf" ?\\{_FUNCTIONS}|[π√θ]|[a-fi-kn-rt-z](?![A-Za-z])")

CHOICE = AnswerComparison.ANSWER_COMPARISON_CHOICE
REGULAR_EXPRESSION = AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION
JSON_SCHEMA = AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA
# Their time depends on more than the length of an answer.
UNBOUNDED = frozenset({REGULAR_EXPRESSION, JSON_SCHEMA})
MOST_EXPRESSION = 1000
_SHOWN_EXPECTATION_CHARACTERS = 200
# A document with fewer arrays and objects than this exhausts no stack.
_FLAT = 40

_SPACE = re.compile(r"\\[,;:> ]|~")
# "Option B", and what may stand before it. What follows is a label, or nothing is left out.
_LABEL_AHEAD = r"(?=[(\[<]{0,2}(?:[A-Za-z]|\d{1,2})(?![A-Za-z\d]))"
_BEFORE_LABEL = re.compile(rf"{_LEAD_IN.pattern}(?:(?:option|choice|letter)\s{{1,3}})?{_LABEL_AHEAD}", re.IGNORECASE)
_LABEL = re.compile(
    r"\(([A-Za-z]|\d{1,2})\)(?=$|[\s.:,;!-])|\[([A-Za-z]|\d{1,2})\]|<([A-Za-z]|\d{1,2})>$|([A-Za-z]|\d{1,2})"
    r"(?:$|[).:](?=$|\s)|[,;!]$|[,;!]?\s{0,3}(?=\n)|\s{1,3}[-\u2013\u2014]\s{1,3}(?=[\"'(\\]?[A-Za-z\d]{2})"
    r"|(?=,?\s(?:because|since)\s)|(?=\sis\s(?:the\s)?(?:correct|right|best)(?:\s(?:answer|option|choice))?[.!]?$))"
)
# The options told over again, as in "A. Paris\nB. London": which of them is chosen stands nowhere.
_LISTED = re.compile(
    r"[ \t]*[(\[]?(?:[A-Za-z]|\d{1,2})[)\].:]{1,2}[ \t]+\S[^\n]*?(?:\n\s*|[ \t]{1,3}(?=[A-Za-z]\)))"
    r"[(\[]?(?:[A-Za-z]|\d{1,2})[)\].:](?=\s|$)"
    r"|[(\[]?(?:[A-Za-z]|\d{1,2})[)\].:]{0,2}[ \t]{0,9}\n\s*[(\[]?(?:[A-Za-z]|\d{1,2})[)\].:]{0,2}[ \t]{0,9}(?:\n|$)"
)
_WIDE_SIGNS = str.maketrans({**_WIDE, **_DIGITS, "\u3002": ".", "\u3001": ","})
_EMPHASIS = str.maketrans("", "", "*$`\"'\u201c\u201d\u2018\u2019_")
# "A or B", "(A), (B)": more than one choice is none.
_AND_ANOTHER = re.compile(
    r"\s*[.,;]?\s*(?:(?:or|and)\b|[,/&;+])\s*[(\[]?(?:[A-Za-z]|\d{1,2})(?![A-Za-z0-9'])", re.ASCII
)

# In the place of a programming language, where responses are answers.
ANSWER_LANGUAGE = "text"
# Where a process that can be ended compares.
LONGEST_TEXT = 200_000
MAX_MARKER = 200
XML_TAG = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"
_SHOWN_CHARACTERS = 80
_STOPS = re.compile(r"[.,;:]")
# `\boxed{57}`, or as TeX reads it without braces: `\boxed 5`.
_BOXED = re.compile(r"\\(?:boxed|fbox)[ \t]{0,3}(?:\{|(?<=[ \t])([^\s{}$\\.,;]+))")


class Number(NamedTuple):
    """A decimal number, or a quotient of two; the denominator is not 0."""

    numerator: Decimal
    denominator: Decimal = Decimal(1)


def number_of(text: str) -> Number | None:
    """The one number that a text is, apart from what may stand around it; None where it is none, or several."""
    bare = text.strip()
    if len(bare) > LONGEST_ANSWER:
        return None
    if _PLAIN.fullmatch(bare):
        return Number(_decimal(bare))
    whole = plain(bare)
    marked = whole.lstrip(" \n$*_#•")
    bare = marked.rstrip(" \n$*_.,;:\\")
    if len(_STOPS.findall(marked, len(bare))) > 1:
        # "2..": its digits go on.
        return None
    bare = _without_lead_in(bare)
    for _ in range(_NESTED):
        if (enclosed := _ENCLOSED.fullmatch(bare)) is None:
            break
        bare = next(group for group in enclosed.groups() if group is not None).strip(" \\")
    head = _HEAD.match(bare)
    assert head is not None
    if not _says_nothing(head) or (found := _value(bare, head.end())) is None:
        return None
    number, end = found
    if scale := re.match(_SCALE, bare[end : end + _NEAR]):
        number, end = _scaled(number, scale[0].strip().lower()), end + scale.end()
    elif (head["money"] or _is_money(whole)) and (short := _SHORT_SCALE.match(bare, end)):
        number, end = _scaled(number, _SHORT_SCALES[short[1][0].lower()]), short.end()
    if not _is_unit(bare[end:]):
        return None
    is_negative = "-" in (head["sign"] or head["inner"] or "")
    return Number(number.numerator.copy_negate(), number.denominator) if is_negative else number


def is_close(wanted: Number, found: Number, absolute: float, relative: float) -> bool:
    """Whether two finite numbers differ by at most absolute + relative * |wanted|.

    A tolerance is the decimal number that it is written as: 0.3 and 0.2 are within 0.1 of each other.
    """
    add, multiply = _ARITHMETIC.add, _ARITHMETIC.multiply
    left, right, size = wanted.numerator, found.numerator, Decimal(1)
    if wanted.denominator != 1 or found.denominator != 1:
        # Multiplied by both denominators, everything is exact.
        left, right = multiply(left, found.denominator), multiply(right, wanted.denominator)
        size = multiply(wanted.denominator, found.denominator).copy_abs()
    tolerance = add(multiply(Decimal(repr(absolute)), size), multiply(Decimal(repr(relative)), left.copy_abs()))
    return _ARITHMETIC.subtract(left, right).copy_abs() <= tolerance


def last_number(text: str) -> str:
    r"""The last number of a text with all that belongs to it, such as `3/4`, `-$5` or `1.234,5`; "" where none is.

    It may turn out to be no number: the 2 of `12-2` or of `3\sqrt{2}` is not given without the rest.
    """
    last = next((place for place in range(len(text) - 1, -1, -1) if text[place] in _ANY_DIGIT), None)
    if last is None:
        return ""
    near = plain(text[max(0, last - _BEFORE) : last + _BEHIND])
    found = None
    for run in _RUN.finditer(near):
        if not _OF_A_UNIT.search(near, max(0, run.start() - _NEAR), run.start()):
            found = run
    if found is None:
        return ""
    start, end = found.span()
    if before := _PIECE_BEFORE.search(near, max(0, start - _NEAR), start):
        start = before.start()
    elif start > 0 and near[start - 1].isalnum() and near[start] in "+-":
        # The minus of "Covid-19" is no sign.
        start += 1
    if after := _PIECE_AFTER.match(near, end):
        end = after.end()
    whole = near[start:end].strip()
    if _LEADING_CURRENCY.match(whole) and (short := _SHORT_SCALE.match(near, end)):
        return whole + short[0]
    # A sign may stand before the currency, which is no part of the number.
    return _LEADING_CURRENCY.sub(r"\1", whole)


def plain(text: str) -> str:
    """A text with plain characters in place of LaTeX, emphasis and the many kinds of minus signs and spaces."""
    text = text.translate(_CHARACTERS)
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    if _MARKED.search(text) is None:
        return text
    for _ in range(_NESTED):
        text, changed = _WRAPPER.subn(_unwrapped, text)
        if not changed:
            break
    for expression, instead in _LATEX:
        text = expression.sub(instead, text)
    return text


def _unwrapped(found: re.Match[str]) -> str:
    # In "5\text{m}" the unit is no variable beside its number.
    return f" {found[1]}" if found[1][:1].isalpha() else found[1]


def _says_nothing(head: re.Match[str]) -> bool:
    """Whether what stands before a number has one sign at most and no word that changes the number, as "half =" has."""
    return not (head["sign"] and head["inner"]) and _NO_UNITS.isdisjoint((head["words"] or "").lower().split())


def _without_lead_in(text: str) -> str:
    """A text without "The answer is" before it, and what stands for nothing between the two."""
    found = _LEAD_IN.match(text)
    return text[found.end() :].lstrip(" \n$*_") if found else text


def _is_money(text: str) -> bool:
    """Whether the dollar before a number is no delimiter of mathematics."""
    return text.count("$") == 1 and text.lstrip(" \n*_+-").startswith("$")


def _value(text: str, start: int) -> tuple[Number, int] | None:
    """The number, its sign apart, that begins there, and where it ends."""
    above, below = Decimal(0), Decimal(1)
    if found := _MIXED.match(text, start):
        whole, top, digit, bottom, last_digit, over, under = found.groups()
        below = _decimal(bottom or last_digit or under)
        above = _ARITHMETIC.fma(_decimal(whole), below, _decimal(top or digit or over))
    elif found := _QUOTIENT.match(text, start):
        top, digit, bottom, last_digit, over, under = found.groups()
        above, below = _decimal(top or digit or over), _decimal(bottom or last_digit or under)
    elif found := _POWER.match(text, start):
        above = _raised(_decimal(found[1] or "1"), int(found[2] or found[3]))
    elif found := _UNSIGNED.match(text, start):
        above = _decimal(found[0])
    return (Number(above, below), found.end()) if found and below else None


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.translate(_PARTING))


def _raised(number: Decimal, power: int) -> Decimal:
    """number * 10 ** power, whatever its length."""
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    return Decimal((sign, digits, exponent + power))


def _scaled(number: Number, scale: str) -> Number:
    if scale == "dozen":
        return number._replace(numerator=_ARITHMETIC.multiply(number.numerator, Decimal(12)))
    return number._replace(numerator=_raised(number.numerator, _SCALES[scale]))


def _is_unit(text: str) -> bool:
    """Whether what stands behind a number names its unit and changes nothing about it."""
    follows_at_once = text[:1] not in (" ", "$")
    bare = text.strip(" $")
    if bare[:1] in ("%", "°", "¢"):
        # "57% of them", "20°C".
        return _is_unit(f" {bare[1:]}")
    bare = re.sub(rf"^{_CURRENCY} ?", "", bare)
    if not bare:
        return True
    if len(bare) > _LONGEST_UNIT or not _WORDS.fullmatch(bare):
        return False
    words = _WORD.findall(bare)
    if follows_at_once and len(words[0]) < _SHORT and words[0] not in _SYMBOLS:
        return False
    return all(word in _SYMBOLS or _is_word(word, within=place > 0) for place, word in enumerate(words))


def _is_word(word: str, *, within: bool) -> bool:
    if word.rstrip(".") in _SYMBOLS and len(word) > _SHORT - 2:
        # "sq. ft."
        return True
    bare = word.strip(".").lower()
    return (within and bare in _WITHIN) or (len(bare) >= _SHORT - 1 and bare not in _NO_UNITS)


class BrokenSchema(Exception):
    """A schema that cannot decide, whatever the answer."""


def label_of(text: str) -> str:
    """The label of a choice in capitals, such as "B" of "B", "(b)", "**B.** Paris" and "B: Paris"; '' where none is.

    It stands at the beginning. Two labels, as in "A or B", are none.
    """
    bare = text
    for _ in range(_NESTED):
        bare, changed = _WRAPPER.subn(r"\1", bare)
        if not changed:
            break
    bare = _SPACE.sub(" ", bare).translate(_EMPHASIS).strip()
    bare = re.sub(r"\\(?:left|right)(?![A-Za-z])|^\\[(\[]|\\[)\]](?=[.!]?$)", "", bare.translate(_WIDE_SIGNS)).strip()
    bare = re.sub(r"^(?:[#•]\s{0,3}|-\s{1,3})", "", bare)
    while len(bare) > 2 and bare[0] + bare[-1] in ("{}", "[]", "()") and bare[1] in "{[(" and bare[-2] in "}])":
        bare = bare[1:-1].strip()
    bare = bare[1:-1].strip() if bare.startswith("{") and bare.endswith("}") else bare
    bare = bare[before.end() :] if (before := _BEFORE_LABEL.match(bare)) else bare
    found = _LABEL.match(bare)
    if found is None or _AND_ANOTHER.match(bare, found.end()) or _LISTED.match(bare):
        return ""
    label = next(group for group in found.groups() if group).upper()
    # "B. No, the answer is A" names two.
    later = (_LABEL.match(bare, place.end()) for place in _BEFORE_LABEL.finditer(bare, found.end()))
    named = {next(group for group in other.groups() if group).upper() for other in later if other}
    return label if named <= {label} else ""


def is_match(expression: str, answer: str) -> bool:
    """Whether the whole answer matches a regular expression, as Python's `re` reads it."""
    return re.fullmatch(expression, answer) is not None


def schema_fault(schema: str, answer: str) -> str | None:
    """None where the answer is JSON that is valid under a schema, otherwise why it is not.

    Raises BrokenSchema where the schema refers to what is not there.
    """
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        document = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"[:_SHOWN_EXPECTATION_CHARACTERS]
    try:
        fault = best_match(_validator(schema).iter_errors(document))
    except Unresolvable as error:
        raise BrokenSchema(f"the schema refers to what is not there: {error}"[:_SHOWN_EXPECTATION_CHARACTERS]) from None
    except RecursionError:
        if answer.count("[") + answer.count("{") < _FLAT:
            raise BrokenSchema("the schema refers to itself without end") from None
        return "the JSON is nested too deeply"
    return None if fault is None else f"{fault.json_path}: {fault.message}"[:_SHOWN_EXPECTATION_CHARACTERS]


def expectation_fault(comparison: int, expected: str) -> str | None:
    """What is wrong with an expected answer of one of these comparisons; None where nothing is."""
    match comparison:
        case AnswerComparison.ANSWER_COMPARISON_CHOICE:
            return None if label_of(expected) else "has no label of a choice, such as B, (b) or 2"
        case AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION:
            return _expression_fault(expected)
        case AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA:
            return _fault_of_schema(expected)
    return None


def _expression_fault(expression: str) -> str | None:
    if len(expression) > MOST_EXPRESSION:
        return f"is a regular expression of more than {MOST_EXPRESSION} characters"
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return f"is no regular expression: {error}"[:_SHOWN_EXPECTATION_CHARACTERS]
    return None


def _fault_of_schema(schema: str) -> str | None:
    from jsonschema.exceptions import SchemaError

    try:
        document = json.loads(schema, parse_constant=_refuse)
        if not isinstance(document, dict):
            return "is no JSON schema: it is no object"
        validator = _validator(schema)
        validator.check_schema(document)
        outside = [name for name in _references(document) if not name.startswith("#")]
    except SchemaError as error:
        return f"is no JSON schema: {error.json_path}: {error.message}"[:_SHOWN_EXPECTATION_CHARACTERS]
    except (ValueError, RecursionError) as error:
        return f"is no JSON schema: {error}"[:_SHOWN_EXPECTATION_CHARACTERS]
    if outside:
        return f"refers to {outside[0]!r}, and nothing is fetched: only #/... is"[:_SHOWN_EXPECTATION_CHARACTERS]
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Validator:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    document = json.loads(schema)
    kind = validator_for(document, default=Draft202012Validator)
    # An empty registry: a reference to an address is never fetched.
    return kind(document, registry=Registry())


def _references(schema: object) -> Iterator[str]:
    waiting: list[object] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from (one[name] for name in ("$ref", "$dynamicRef") if isinstance(one.get(name), str))
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def fault_of(rule: AnswerRule, response: str) -> str | None:
    """None when the response holds a right answer under the rule, otherwise what is wrong with it.

    Raises BrokenSchema where a schema cannot decide.
    """
    answer = answer_in(rule, response)
    longest = LONGEST_TEXT if rule.comparison in UNBOUNDED else LONGEST_ANSWER
    if not answer:
        return f"no answer found: {_places(rule)}"
    if len(answer) > longest:
        return f"the answer has {len(answer)} characters; at most {longest} are compared"
    match rule.comparison:
        case AnswerComparison.ANSWER_COMPARISON_NUMERIC:
            return _numeric_fault(rule, answer)
        case AnswerComparison.ANSWER_COMPARISON_CHOICE:
            return _choice_fault(rule, answer)
        case AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION:
            right = any(is_match(expression, answer) for expression in rule.expected)
        case AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA:
            faults = [schema_fault(schema, answer) for schema in rule.expected]
            return None if None in faults else faults[0]
        case _:
            right = any(answer == expected.strip() for expected in rule.expected)
    return None if right else _difference(rule, answer)


def answer_in(rule: AnswerRule, response: str) -> str:
    """The answer in a response without white space around it, '' where there is none."""
    match rule.extraction:
        case AnswerExtraction.ANSWER_EXTRACTION_FIRST_LINE:
            found = response.lstrip().partition("\n")[0]
        case AnswerExtraction.ANSWER_EXTRACTION_LAST_NUMBER:
            found = last_number(response)
        case AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            found = response.rpartition(rule.marker)[2].partition("\n")[0] if rule.marker in response else ""
        case AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            found = _last_boxed(response)
        case AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            inside, closed, _ = response.rpartition(f"</{rule.marker}>")
            _, opened, content = inside.rpartition(f"<{rule.marker}>")
            found = content if closed and opened else ""
        case _:
            found = response
    return found.strip()


def _numeric_fault(rule: AnswerRule, answer: str) -> str | None:
    if (found := number_of(answer)) is None:
        return f"{_shown(answer)} is no number, or more than one"
    wanted = (number_of(expected) for expected in rule.expected)
    tolerances = rule.absolute_tolerance, rule.relative_tolerance
    right = any(is_close(number, found, *tolerances) for number in wanted if number is not None)
    return None if right else _difference(rule, answer)


def _choice_fault(rule: AnswerRule, answer: str) -> str | None:
    if not (label := label_of(answer)):
        return f"{_shown(answer)} begins with no single label of a choice"
    right = any(label == label_of(expected) for expected in rule.expected)
    return None if right else _difference(rule, answer)


def _difference(rule: AnswerRule, answer: str) -> str:
    return f"expected {_shown(rule.expected[0])}, found {_shown(answer)}"


def _last_boxed(response: str) -> str:
    last = max(_BOXED.finditer(response), key=re.Match.start, default=None)
    if last is None:
        return ""
    if last[1]:
        return last[1]
    start, depth = last.end(), 1
    for brace in re.finditer(r"\\.|[{}]", response[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[start : start + brace.start()]
    return ""


def _places(rule: AnswerRule) -> str:
    match rule.extraction:
        case AnswerExtraction.ANSWER_EXTRACTION_LAST_NUMBER:
            return "the response holds no number"
        case AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER:
            return f"the response holds nothing after {_shown(rule.marker)}"
        case AnswerExtraction.ANSWER_EXTRACTION_BOXED:
            return "the response holds no whole \\boxed{...}"
        case AnswerExtraction.ANSWER_EXTRACTION_XML_TAG:
            return f"the response holds no whole <{rule.marker}>...</{rule.marker}>"
    return "the response is empty"


def _shown(text: str) -> str:
    shown = ascii(text[:_SHOWN_CHARACTERS])
    return shown if len(text) <= _SHOWN_CHARACTERS else f"{shown}... ({len(text)} characters)"
