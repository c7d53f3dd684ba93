r"""Numbers as models write them: in LaTeX, in bold, with units, currencies and parted thousands; docs/verifiers.md has
the rules.

A text is one number or none: nothing takes the 4 of `3/4` or the 5 of `1.234,5`. All functions take time linear in the
text and raise on none.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import NamedTuple

# What is longer is no answer; it also bounds the time that arithmetic takes.
LONGEST_ANSWER = 10_000
# Products of two answers are exact; of numbers far apart, the difference is known by its leading digits.
_ARITHMETIC = Context(prec=2 * LONGEST_ANSWER + 100, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation])

# Spaces and commas count where they part thousands; "1,2" and "1 2" are two numbers.
_PARTED = r"\d{1,3}(?:,\d{3})+(?!,?\d)|(?<![A-Za-z])\d{1,3}(?: \d{3})+(?! ?\d)"
_NUMERAL = rf"(?:(?:{_PARTED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,9}}(?!\d))?"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = rf" ?(?i:{'|'.join(_SCALES)}|dozen)\b"
_CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK|C|A)?\$|[€£¥₹₩₽₪฿]"
    r"|(?<![A-Za-z])(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|CAD|AUD|Rs\.?)(?![A-Za-z]))"
)
_LEADING_CURRENCY = re.compile(rf"^([+-]?){_CURRENCY} ?", re.ASCII)
_HEAD = re.compile(rf"(?:[A-Za-z]? ?= ?)?(?P<sign>[+-] ?)?(?:{_CURRENCY} ?(?P<inner>[+-])?)?", re.ASCII)
_FRACTION = rf"\\frac ?(?:\{{ ?([+-]?{_NUMERAL}) ?\}}|(\d)) ?(?:\{{ ?([+-]?{_NUMERAL}) ?\}}|(\d))"
_ANY_FRACTION = rf"\\frac ?(?:\{{ ?[+-]?{_NUMERAL} ?\}}|\d) ?(?:\{{ ?[+-]?{_NUMERAL} ?\}}|\d)"
# Tried in this order: what stands at the beginning of a number, its sign apart.
_MIXED = re.compile(rf"(\d+)(?: ?{_FRACTION}| (\d+) ?/ ?(\d+))", re.ASCII)
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
# These may stand within a unit: "miles per hour", "units of mass", "feet by hand".
_WITHIN = frozenset({"of", "a"})

_VULGAR = {
    **{"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"},
    **{"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"},
}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u202f\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u3000\t", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **dict.fromkeys("\u00ba\u02da\u2218", "°"),
        **{"\uff05": "%", "\uff04": "$", "\u2044": "/", "\u00d7": "·", "\u22c5": "·"},
        **{sign: f" {quotient}" for sign, quotient in _VULGAR.items()},
    }
)
_ANY_DIGIT = frozenset("0123456789").union(_VULGAR)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
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
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?:\{\})? ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\(?:degrees?|textdegree)(?![A-Za-z])", "°"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "·"),
        (r"\\div(?![A-Za-z])", "/"),
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
_MARKED = re.compile(r"[\\*_`~{]")
_LONGEST_UNIT = 80
_NESTED = 4
# Letters of a word that may follow a number at once, as in "57apples"; shorter ones are symbols or variables.
_SHORT = 4
# Where the last number is looked for: so far before the last digit and behind it. Nothing longer is an answer.
_BEFORE, _BEHIND = 3 * LONGEST_ANSWER, 60
_NEAR = 24
# What makes one expression of two numbers. No line break does.
_JOIN = r"(?: ?[/·÷^+] ?[{(]?[+-]?|\*{1,2}| \* |-| - | x (?=\d)|[.,:_'](?=\d)|(?= ?\\frac) ?| (?=\d+ ?/ ?\d))"
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
    bare = plain(bare).lstrip(" \n$*_").rstrip(" \n$*_.,;:")
    head = _HEAD.match(bare)
    assert head is not None
    if (head["sign"] and head["inner"]) or (found := _value(bare, head.end())) is None:
        return None
    number, end = found
    if scale := re.match(_SCALE, bare[end : end + _NEAR]):
        number, end = _scaled(number, scale[0].strip().lower()), end + scale.end()
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
    # A sign may stand before the currency, which is no part of the number.
    return _LEADING_CURRENCY.sub(r"\1", near[start:end].strip())


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
    return Decimal(digits.replace(",", "").replace(" ", ""))


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
    if bare[:1] in ("%", "°"):
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
    bare = word.strip(".").lower()
    return (within and bare in _WITHIN) or (len(bare) >= _SHORT - 1 and bare not in _NO_UNITS)
