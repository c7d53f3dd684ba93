"""Scores responses one after the other inside a fork, each within limits of its own: one line of JSON for each.

The process is killed where a response takes too long; the judge then knows by the lines which one it was, and goes on
with the next in a new fork. The lines:

    ["ready"]                                    first, when the function is there, otherwise ["broken", why]
    ["score", number, parts, CPU seconds]        for each response
    ["refused", why]                             in its place, where the response cannot be read
    ["fault", why]                               in its place, where the function throws or gives no score
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, SupportsFloat

from services.sandbox_judge.jail.loading import Sent, received

MOST_PARTS = 32
_REHEARSALS = 16
MOST_NAME = 100
_SHOWN = 300
# As `spo.spec.reward` has it, which no jail imports.
_ROUNDING = 1e-9
# Environments of LaTeX's that are mathematics by themselves; others, such as pmatrix, stand within mathematics.
_EQUATION = re.compile(r"\s*\\begin\{(align|displaymath|eqnarray|equation|flalign|gather|math|multline)\*?\}")
_DOLLAR = re.compile(r"(?<!\\)\$")
_CURRENCY = re.compile(r"(?<!\\)\$ ?-?[\d.]+(?![\d.]*\$)")
_ENCLOSED = re.compile(r"(?<!\\)\$\$([^$]+)\$\$|(?<!\\)\$((?:\\\$|[^$])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# What the package would leave out with all text: the comma of "2\text{, }3", the currency of "\text{\$}36".
_TEXT_OF_SIGNS = re.compile(r"\\(?:text|mbox|mathrm)\{\s*([,;]|\\\$|)\s*\}")
_PARTED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|~|[ \u00a0\u2009\u202f])\d{3})+(?![\d,])")
# Rows and columns outside a matrix, and cases: more than one result.
_SEVERAL = re.compile(
    r"\\\\(?![A-Za-z])(?=.*\S)|(?<!\\)&|\d\s*\?\s*\d|\\text\{[^{}]*\b(?:if|otherwise|unless|else)\b"
    r"|\\text\{\s*(?:\(\s*or\b|or (?:more|less|fewer|greater|above|below|higher|lower)\b)"
)
# What ends a sentence and not a formula; other ways to write what the package knows by one; bounds of a variable.
_END = re.compile(r"(?<!\\)(?<!\\left)(?<!\\right)\s*[.,;:]\s*$")
_WRITTEN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\varnothing(?![A-Za-z])|\u2205"), r"\\emptyset "),
    (re.compile(r"\\(?:mathrm|text|mathbf|mathit) ?\{ ?i ?\}|\\imath(?![A-Za-z])"), "i"),
    (re.compile(r"(?<=\d) +i(?![A-Za-z])"), "i"),
    (re.compile(r"\\(?:mathrm|text|mathbf|mathit) ?\{ ?e ?\}(?=\s*\^)"), "e"),
    (re.compile(r"\((\d+)\)(?=\s*_)"), r"\1"),
)
# A decimal number whose last digits repeat, which the package does not read.
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{\s*(\d+)\s*\}")
_ORDER, _STRICTLY = re.compile(r"[<\u2264]|\\l(?:t|e)"), ("<", r"\lt")
_BETWEEN = re.compile(
    r"\s*([^<>=,\u2264]+?)\s*(<|\\lt(?![A-Za-z])|\\leq?(?:slant)?(?![A-Za-z])|\u2264)\s*(?:[A-Za-z]|\\[a-z]+)\s*"
    r"(<|\\lt(?![A-Za-z])|\\leq?(?:slant)?(?![A-Za-z])|\u2264)\s*([^<>=,\u2264]+?)\s*"
)
# A bound of a variable, which is the interval that is expected.
_HALF_LINE = re.compile(
    r"[\s$]*(?:[A-Za-z]|\\[a-z]+)\s*(<|>|\\[lg]t(?![A-Za-z])|\\[lg]eq?(?:slant)?(?![A-Za-z])|\u2264|\u2265)"
    r"\s*([^<>=,\u2264\u2265]+?)[\s$]*"
)
_OR = re.compile(r"\\text ?\{\s*or\s*\}|\bor\b|\\(?:lor|vee)(?![A-Za-z])|\u2228")
# A bound of nothing: the package reads the number alone.
_BOUND = re.compile(r"[\s${(]*(?:\\(?:neq?|not|geq?|leq?|gtr?|less|lt)(?![A-Za-z])|[<>\u2260\u2264\u2265])")
# A congruence: what is left out, residues, and the modulus.
_CONGRUENCE = re.compile(
    r"\s*(?:[^=\u2261]*?(?:\\equiv(?![A-Za-z])|\u2261|=)\s*)?([^=\u2261]+?)\s*\(?\s*"
    r"(?:\\p?od(?![A-Za-z])|\\?[bp]?mod(?:ulo)?(?![A-Za-z]))\s*\{?\s*([^(){}\s]+)\s*\}?\s*\)?\s*"
)
_SPACING = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z])|left(?![A-Za-z])|right(?![A-Za-z]))|~|\$")
_TEXT = re.compile(r"\\(?:text|mathrm|operatorname|mbox|rm) ?\{([^{}]*)\}")
# A number with an imaginary part.
_COMPLEX = re.compile(r"\s*-?[\d.]+\s*[+-]\s*[\d.]*\s*i\s*")
# Signs by which an answer says that its sides are one number, or nearly one.
_SAMENESS = re.compile(
    r":=|=+|\\(?:equiv|approxeq|thickapprox|sim|thicksim|simeq|cong|doteq|fallingdotseq|risingdotseq|triangleq|"
    r"coloneqq|eqqcolon)(?![A-Za-z])|[\u2261\u223c\u2243\u2245\u2250]"
)
# The package reads what stands before it.
_ROUNDED = re.compile(r"\\approx(?![A-Za-z])|\u2248")
# Signs between numbers that make no number of them; the package takes one side and leaves the other out.
_PARTING = re.compile(
    r"\\not\s*(?:=|\\[A-Za-z]+)|=/=|!=|<=>|<?[-=]+>|<-+|<>|\s~\s|\\[#&]|\\[hv]space\*?\s*\{[^{}]*\}|"
    r"\\color\s*\{[^{}]*\}|(?:\.\.+|\u2026|\\[lc]?dots(?![A-Za-z]))(?=\s*[\d\\-])|"
    r"\\(?:[A-Za-z]*(?:arrow|Arrow|mapsto)|to|gets|iff|implies|impliedby|therefore|because|(?:big)?(?:cup|cap|vee|wedge)|"
    r"setminus|backslash|land|lor|neg|mid|parallel|perp|choose|atop|vdash|dashv|models|(?:sub|sup)set(?:eq|neq)?|ni|in|"
    r"notin|uplus|sqcup|sqcap|oplus|ominus|otimes|odot|prec(?:eq)?|succ(?:eq)?|ll|gg|asymp|n(?:leq|geq|less|gtr|sim|mid|cong)|"
    r"underbrace|overbrace|propto|amalg|diamond|wr|bowtie|triangle)(?![A-Za-z])|[\u2190-\u2199\u21d0-\u21d9\u2227-\u222a]|"
    r"(?<=\d)\s*\|\s*(?=-?\d+\s*$)"
)
# Products by some, operations of any kind by others: no number unless an equation says what comes of it.
_OPERATION = re.compile(r"(?<!\^)(?<!\^\{)\\(?:ast|star|bullet|circ)(?![A-Za-z])")
_MARKS = re.compile(r"\\ |\\[()\[\]]|\\?\$|\\displaystyle|\\left(?![A-Za-z])|\\right(?![A-Za-z])")
_OUTER = re.compile(r"(?:\\(?:boxed|fbox|mathbf|mathrm|bm))?\{(.*)\}|\((.*)\)", re.DOTALL)
_UNIT = re.compile(
    r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}(?:\s*\^\s*\{?-?\d\}?)?|\^\s*\{?\\(circ)(?![A-Za-z])\}?"
)
# All that a number may be written with; letters may be symbols, and a subscript a base.
_NUMERAL = re.compile(
    r"(?:[\d.,+*/^(){}!%\s\u2212-]|\\[,!;:%\s]|\\(?:[dtc]?frac|sqrt|pi|cdot|times|div|binom|ln|log|exp|sin|cos|tan|quad)"
    r"(?![A-Za-z]))+"
)
_SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")
# Marks on a number that make another of it and that the package leaves out: a base, primes, digits left open.
_BASE = re.compile(r"\d\)?\s*(?:_|\\sb(?![A-Za-z]))\s*(\d|\{(?:[^{}]|\{[^{}]*\})*\})")
_BASES = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}
_OPEN = re.compile(
    r"\d\s*(?:'|\\prime(?![A-Za-z])|\^\s*\{?\s*\\prime|\u2032|\.\s*\.|\u2026|\\[lc]?dots(?![A-Za-z])|\?)[\s.'?\u2032\u2026}$]*$"
)
# Generators whose scorers compare tuples, which JSON does not know.
_OF_TUPLES = ("arc_agi", "rearc")

# Those whose scorers compute with symbols, and answers by which those learn what they would learn in every fork.
_SYMBOLIC = ("countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration")
_SYMBOLS = ("0.5*x**2 + 3", "x*exp(x) - log(x)/2 + C", "(sin(2*x) + cos(x))/3", "-4*x**3 + sqrt(x)", "(7 + 2)*3 - 1/2")

# Under which name a module of a person's holds what it was made of.
_SOURCE = "__source__"
# What a scorer makes of a response: a number, or numbers by name.
Score = Callable[[str], object]

# The scorers of reasoning-gym's generators, made before the first fork.
_scorers: dict[str, Callable[[str, dict[str, Any]], object]] = {}


class Refused(Exception):
    """The response, not the function, is at fault."""


def run() -> NoReturn:
    """Score what the judge has sent; the process ends here."""
    status = 1
    try:
        sent = received()
        out = os.dup(1)
        # What a function prints is nobody's result.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        _score_all(sent, lambda line: os.write(out, json.dumps(line).encode() + b"\n"))
        status = 0
    finally:
        os._exit(status)


def _score_all(sent: Sent, say: Callable[[list[object]], object]) -> None:
    """Score a group, and the others that came with it as long as this process is young and nothing has gone wrong."""
    began, (busy, lived) = time.monotonic(), sent.get("shared_seconds", (0.0, 0.0))
    if not _score_group(sent, say):
        return
    for other in sent.get("others", ()):
        # On a busy machine a young process has lived for long, and more processes would be no help.
        is_old = time.process_time() > busy or time.monotonic() > began + lived
        if is_old or not _score_group(other, say):
            return


def _score_group(sent: Sent, say: Callable[[list[object]], object]) -> bool:
    """Say the scores of a group; whether the function was at fault nowhere."""
    _arm(sent)
    name, is_well = sent["name"], True
    try:
        score = _SCORERS[sent["kind"]](sent)
    except BaseException as error:
        say(["broken", f"{name}: {_said(error)}"])
        return False
    say(["ready"])
    for response in sent["responses"]:
        _arm(sent)
        started = time.process_time()
        try:
            total, parts = _checked(score(response))
            line = ["score", total, parts, time.process_time() - started]
        except Refused as error:
            line = ["refused", str(error)[:_SHOWN]]
        except BaseException as error:
            line, is_well = ["fault", f"{name}: {_said(error)}"], False
        say(line)
    return is_well


def _arm(sent: Sent) -> None:
    """Let the kernel kill this process when one response takes too long, whatever it hangs in."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, sent["cpu_seconds"])
    signal.setitimer(signal.ITIMER_REAL, sent["wall_seconds"])


def _checked(result: object) -> tuple[float, dict[str, float]]:
    """The score and its parts. Raises ValueError on anything but a number, or numbers by name, between 0 and 1."""
    if not isinstance(result, dict):
        return _number(result, "the function gave"), {}
    if not 0 < len(result) <= MOST_PARTS:
        raise ValueError(f"the function gave {len(result)} parts; between 1 and {MOST_PARTS} are taken")
    for part in result:
        if not isinstance(part, str) or not 0 < len(part) <= MOST_NAME:
            raise ValueError(f"a part's name must be text of 1 to {MOST_NAME} characters")
    parts = {part: _number(value, f"the function's part {part!r} is") for part, value in result.items()}
    return sum(parts.values()) / len(parts), parts


def _number(value: object, what: str) -> float:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise ValueError(f"{what} {type(value).__name__}, not a number")
    # False for NaN as well.
    if not -_ROUNDING <= number <= 1 + _ROUNDING:
        raise ValueError(f"{what} {number}, not a number between 0 and 1")
    return min(1.0, max(0.0, number))


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text[:_SHOWN]}".removesuffix(": ")


def _own(sent: Sent) -> Score:
    """A function that a person wrote, from its source."""
    module = sys.modules.get("scoring")
    # Groups that share a process are of one source, which is loaded once, as in a loop.
    if module is None or module.__dict__.get(_SOURCE) != sent["source"]:
        module = sys.modules["scoring"] = ModuleType("scoring")
        exec(compile(sent["source"], "scoring.py", "exec", dont_inherit=True), module.__dict__)
        module.__dict__[_SOURCE] = sent["source"]
    found = module.__dict__.get(sent["function"])
    if not callable(found):
        raise ValueError("the source does not define it")
    arguments = json.loads(sent["arguments_json"] or "{}")
    return lambda response: found(response, **arguments)


def _reasoning_gym(sent: Sent) -> Score:
    """A generator's own scorer; what it throws is the response's doing where it can score the entry's own answer."""
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    arguments = json.loads(sent["arguments_json"])
    entry, tag = arguments["entry"], arguments.get("tag", "")
    if arguments["dataset"] in _OF_TUPLES:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    # Some generators read word lists of megabytes before they score anything.
    score = _scorers.get(arguments["dataset"]) or reasoning_gym.get_score_answer_fn(arguments["dataset"])

    def scored(response: str) -> object:
        answer = extract_answer(response, tag) if tag else response.strip()
        if answer is None:
            raise Refused(f"no answer found: the response holds no whole <{tag}>...</{tag}>")
        try:
            return score(answer, entry)
        except Exception as error:
            score(entry["answer"], entry)
            raise Refused(f"the scorer cannot read the answer: {_said(error)}") from error

    return scored


def _tuples(value: object) -> object:
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _mathematics(sent: Sent) -> Score:
    """math-verify's comparison with any of the expected answers."""
    import logging

    from math_verify import verify

    logging.disable()  # its warning that time limits are left to the caller: they are set here
    moduli = {found[1] for text in sent["expected"] if (found := _congruence(text))}
    wanted = [_expected(_without_modulus(text)) for text in sent["expected"]]
    bounded = any(map(_BOUND.match, sent["expected"]))
    unbounded = any("\\infty" in text and "<" not in text for text in sent["expected"])
    # Where it is rows or cases that are expected, they are one result.
    several = any(_SEVERAL.search(text) or _contradicts_itself(text) for text in sent["expected"])
    unread = [text for text, found in zip(sent["expected"], wanted, strict=True) if not found]
    if unread:
        raise ValueError(f"math-verify cannot read the expected answer {unread[0][:80]!r}")

    def scored(answer: str) -> float:
        if not sent["whole"] and not bounded and _BOUND.match(answer):
            raise Refused("the answer is a bound, no number")
        if not sent["whole"]:
            _refuse_marks(answer, sent["expected"])
        if not sent["whole"] and (congruence := _congruence(answer)):
            if moduli:
                return float(any(_is_congruent(congruence, text) for text in sent["expected"]))
            answer = congruence[0]
        if unbounded and not sent["whole"]:
            answer = _intervals(answer)
        found = mathematical(answer, whole=sent["whole"], several=several)
        if not found:
            raise Refused("math-verify finds no mathematics in the answer")
        read = found[-1] if sent["whole"] and isinstance(found[-1], str) else answer
        if not several and _contradicts_itself(read):
            raise Refused("the answer holds several results")
        return float(any(verify(gold, found, timeout_seconds=None) for gold in wanted))

    return scored


def _refuse_marks(answer: str, expected: list[str]) -> None:
    """Raises Refused where an answer's numbers have a base that no expected answer has, or end in primes or dots."""
    # What an equation comes to is its last side.
    bases = _bases(answer.rpartition("=")[2])
    if bases and not any(bases == _bases(text) for text in expected):
        raise Refused("the answer is a number in another base")
    if _OPEN.search(answer.strip("* ")) and not any(map(_OPEN.search, expected)):
        raise Refused("the answer ends in a mark that leaves its number open")


def _bases(text: str) -> set[str]:
    """The bases that a text's numbers have, in digits where it writes them as words."""
    written = (re.sub(r"\\[a-z]+|[{}\s]|base", "", base).lower() for base in _BASE.findall(text))
    return {_BASES.get(base, base) for base in written}


def _congruence(text: str) -> tuple[str, str] | None:
    """The residues and the modulus that a text names; None where it is no congruence."""
    if "mod" not in text and "\\pod" not in text:
        return None
    found = _CONGRUENCE.fullmatch(_SPACING.sub(" ", _TEXT.sub(r" \1 ", text)).rstrip(" ."))
    return (found[1], found[2]) if found and "mod" not in found[1] else None


def _without_modulus(text: str) -> str:
    return found[0] if (found := _congruence(text)) else text


def _is_congruent(answer: tuple[str, str], expected: str) -> bool:
    """Whether a congruence names the same residues by the same modulus as an expected one."""
    wanted = _congruence(expected)
    if wanted is None or wanted[1] != answer[1]:
        return False
    here, there = (_residues(residues, wanted[1]) for residues in (answer[0], wanted[0]))
    return here == there


def _residues(text: str, modulus: str) -> set[str | int]:
    """The residues of a text, as the smallest that is not negative where they are numbers."""
    texts = [each.strip() for each in re.split(r",|\bor\b|\band\b", text) if each.strip()]
    number = re.compile(r"[+-]? ?\d{1,18}")
    if modulus.isdecimal() and int(modulus) and all(map(number.fullmatch, texts)):
        return {int(each.replace(" ", "")) % int(modulus) for each in texts}
    return {re.sub(r"\s", "", each) for each in texts}


def _expected(text: str) -> list[object]:
    """What an expected answer may mean: a bare "1,22" is a decimal number, or two numbers."""
    found = mathematical(text, whole=False, several=True)
    return found if set(text) - set("0123456789.,- ") else [*found, *mathematical(text, whole=True)]


def mathematical(text: str, *, whole: bool, several: bool = False) -> list[object]:
    """What math-verify reads in a text: in a whole response where it finds it, in an answer all of it.

    Raises Refused on an answer of several results, unless several may be there.
    """
    from math_verify import parse

    if not whole:
        text = _as_mathematics(text, several=several)
    found: list[object] = parse(text, parsing_timeout=None)
    return found


def _as_mathematics(answer: str, *, several: bool) -> str:
    """An answer as one piece of mathematics: dollars before numbers are a currency, other marks enclose it.

    Raises Refused on several results, of which the package would take one, unless several may be there.
    """
    if _EQUATION.match(answer):
        return answer
    answer = _END.sub("", answer.strip().strip("*"))
    for pattern, instead in _WRITTEN:
        answer = pattern.sub(instead, answer)
    answer = _REPEATING.sub(_as_fraction, answer)
    if _ORDER.search(answer) and (bounds := _BETWEEN.fullmatch(answer.strip("$"))):
        low, first, second, high = bounds.groups()
        answer = f"{'(' if first in _STRICTLY else '['}{low},{high}{')' if second in _STRICTLY else ']'}"
    if "\\begin" not in answer:
        answer = _TEXT_OF_SIGNS.sub(r"\1", answer).replace("\n", " ")
        answer = _PARTED.sub(lambda found: re.sub(r"\D", "", found[0]), answer)
        if not several and _SEVERAL.search(answer):
            raise Refused("the answer holds several results")
    if (dollars := _DOLLAR.findall(answer)) and len(dollars) == len(_CURRENCY.findall(answer)):
        answer = _DOLLAR.sub(r"\\$", answer)
    pieces = [next(filter(None, found), "").strip() for found in _ENCLOSED.findall(answer)]
    distinct = list(dict.fromkeys(piece for piece in pieces if piece and piece[0] not in "^_"))
    if len(distinct) > 1:
        return f"${', '.join(distinct)}$"
    return answer if pieces or "\\boxed" in answer or _DOLLAR.search(answer) else f"${answer}$"


def _intervals(answer: str) -> str:
    """Bounds of a variable, joined by "or", as intervals; any other answer as it is."""
    found = [_HALF_LINE.fullmatch(part) for part in _OR.split(answer)]
    names = {part.strip("$ ")[:1] for part in _OR.split(answer)}
    if not all(found) or len(names) > 1:
        return answer
    return " \\cup ".join(_interval(*half_line.groups()) for half_line in found if half_line)


def _interval(order: str, bound: str) -> str:
    end = "" if order in ("<", ">", r"\lt", r"\gt") else "]"
    if order[:2] in ("<", r"\l", "\u2264"):
        return f"(-\\infty,{bound}{end or ')'}"
    return f"{'[' if end else '('}{bound},\\infty)"


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, fixed, period = repeating.groups()
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}" or "0")
    return f"\\frac{{{above}}}{{{below}}}"


def _contradicts_itself(answer: str) -> bool:
    """Whether an answer names several numbers as one: the sides of its equations differ, or other signs part them."""
    text = _MARKS.sub(" ", answer).strip().strip("*").strip()
    text = _unwrapped(text)
    if "=" not in text:
        text = _OPERATION.sub(r"\\cup ", text)
    # A congruence says nothing of its sides being equal.
    sameness = re.compile("=+") if "mod" in text else _SAMENESS
    bare: list[str] = []
    by_symbol: dict[str, list[str]] = {}
    for part in _split(_PARTING, text):
        exact, *rounded = _split(_ROUNDED, part)
        sides = [side.strip() for side in _split(sameness, exact)]
        numerals = [side for side in sides if _is_numeral(side)]
        if numerals and any(map(_COMPLEX.fullmatch, sides)):
            return True
        if _differ(numerals) or (numerals and not all(_rounds(numerals[-1], other) for other in rounded)):
            return True
        if numerals and len(numerals) == len([side for side in sides if side]):
            bare.append(numerals[-1])
        elif numerals and len(sides) == 2 and _SYMBOL.fullmatch(sides[0]):
            by_symbol.setdefault(sides[0], []).append(numerals[-1])
    return _differ(bare) or any(map(_differ, by_symbol.values()))


def _unwrapped(text: str) -> str:
    """A text without brackets around all of it."""
    while outer := _OUTER.fullmatch(text):
        inner: str = outer[1] if outer[1] is not None else outer[2]
        if not _is_balanced(inner):
            break
        text = inner.strip()
    return text


def _is_numeral(text: str) -> bool:
    return bool(_NUMERAL.fullmatch(_UNIT.sub("", text)) and re.search(r"\d|\\pi", text))


def _rounds(numeral: str, other: str) -> bool:
    """Whether what follows an approximation sign may be the numeral rounded, to an integer or to zeros at its end."""
    if not _is_numeral(other) or not _differ([numeral, other]):
        return True
    integer = re.fullmatch(r"\s*-?[\d,]*?(0*)\s*", _UNIT.sub("", other))
    values = [_value(_UNIT.sub("", text)) for text in (numeral, other)]
    if integer is None or values[0] is None or values[1] is None:
        return False
    return bool(abs(values[0] - values[1]) <= 0.5 * 10.0 ** len(integer[1]))


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in "({") - (sign in ")}")
        if depth < 0:
            return False
    return depth == 0


def _split(signs: re.Pattern[str], text: str) -> list[str]:
    """The pieces between signs that stand in no bracket."""
    pieces, begin = [], 0
    for sign in signs.finditer(text):
        if _is_balanced(text[begin : sign.start()]):
            pieces.append(text[begin : sign.start()])
            begin = sign.end()
    return [*pieces, text[begin:]]


def _differ(numerals: list[str]) -> bool:
    """Whether neighbours are certainly different numbers; those in different units are not compared."""
    return any(
        one != other and _are_of_one_unit(one, other) and not _is_near(_UNIT.sub("", one), _UNIT.sub("", other))
        for one, other in itertools.pairwise(numerals)
    )


def _are_of_one_unit(one: str, other: str) -> bool:
    """Whether two numerals may be compared: their unit is the same, or only one has one, other than a degree."""
    units = [
        sorted(filter(None, (word.strip() for found in _UNIT.findall(text) for word in found))) for text in (one, other)
    ]
    return units[0] == units[1] or (not all(units) and ["circ"] not in units)


def _is_near(one: str, other: str) -> bool:
    """Whether two numerals are one number up to the digits written; true as well where that cannot be found."""
    values = [_value(text) for text in (one, other)]
    if None in values:
        return True
    # Written with decimals, a number stands for its neighbours as well.
    decimals = [len(found[1]) for text in (one, other) if (found := re.search(r"\d\.(\d+)", text))]
    step = 10.0 ** -min(decimals) if decimals else 0.0
    first, second = (value or 0.0 for value in values)
    return any(
        abs(first * here - second * there) <= max(step, 1e-9 * abs(first))
        for here, there in ((1, 1), (100 if "%" in one else 1, 100 if "%" in other else 1))
    )


def _value(numeral: str) -> float | None:
    """What a numeral is worth; None where the package reads no real number in it."""
    from math_verify import parse

    found = parse(f"${_unwrapped(numeral.strip())}$", parsing_timeout=None)
    try:
        return float(found[0])
    except (IndexError, TypeError, ValueError, OverflowError):
        return None


_SCORERS: dict[str, Callable[[Sent], Score]] = {
    "function": _own,
    "mathematics": _mathematics,
    "reasoning_gym": _reasoning_gym,
}

# Answers of many kinds: what the parser learns of its grammar while it reads them, it need not learn in every fork.
_REHEARSAL = r"""
12 -3.5 1,000,000 1/2 \frac{1}{2} -\frac{3}{4} 2\frac{1}{3} \sqrt{2} 3\sqrt{8} \sqrt[3]{27} x^2+1 2x-3y
(x+1)(x-2) \pi 2\pi \frac{\pi}{4} e^{x} \ln(2) \log_2(8) \sin(x) \cos^2(\theta) (1,2) (1,2,3) [0,1)
(-\infty,3] \{1,2,3\} (-\infty,1)\cup(2,\infty) x=5 y=2x+1 x>3 1<x\leq4 50\% 25% 12\text{cm} \text{cm} 10^{-3}
2.5\times10^4 1+2i \binom{5}{2} 5! |x| \infty \pm2 a_n \begin{pmatrix}1&2\\3&4\end{pmatrix} x\in[1,2]
\emptyset \frac{x+1}{x-1} \frac{\sqrt{3}}{2} 90^\circ \overline{AB} 0.\overline{3} \left(\frac{1}{2},3\right)
\dfrac{7}{8} \tfrac{1}{3} \mathbb{R} A \text{A} f(x)=x^2 \int_0^1xdx \sum_{k=1}^nk \lfloor2.5\rfloor x=1,x=2
x=1\text{or}x=2 \$5 1:2 2^{10} \frac{a}{b} n(n+1)/2 \arctan(1)
"""


def rehearse(imports: tuple[str, ...]) -> None:
    """Let libraries do once, before the first fork, what every fork would do anew."""
    own = "import json\ndef score(response, **arguments):\n    return {'length': len(response) / 10}\n"
    for _ in range(_REHEARSALS):
        sent = {"source": own, "function": "score", "arguments_json": '{"a": [1, "b"]}'}
        score = _own(sent)
        del sys.modules["scoring"]
        total, parts = _checked(score("abc"))
        json.dumps(["score", total, parts, time.process_time()])
    if "reasoning_gym" in imports:
        _rehearse_generators()
    if "math_verify" in imports:
        _rehearse_mathematics()


def _rehearse_generators() -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for name in DATASETS:
        with contextlib.suppress(Exception):  # that of several generators cannot be made without naming them
            _scorers[name] = reasoning_gym.get_score_answer_fn(name)
    for name in _SYMBOLIC:
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        for answer in (entry["answer"], f"{entry['answer']} + 1", *_SYMBOLS):
            with contextlib.suppress(Exception):
                _scorers[name](answer, entry)


def _rehearse_mathematics() -> None:
    import logging

    from math_verify import verify

    logging.disable()
    for text in _REHEARSAL.split():
        found = mathematical(text, whole=False)
        verify(found, found, timeout_seconds=None)
        verify(found, mathematical("7", whole=False), timeout_seconds=None)
    mathematical("The answer is $\\boxed{\\frac{1}{2}}$, so we get 7.", whole=True)
    logging.disable(logging.NOTSET)
