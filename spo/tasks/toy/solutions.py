"""How people write a composition of the toy contest as a Python program: headers, styles and spellings."""

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from spo.tasks.toy.grammar import LIST_AGGREGATES, Composition

HEADERS = (
    "a=list(map(int,input().split()))\n",
    "a=[int(v) for v in input().split()]\n",
    "import sys\na=list(map(int,sys.stdin.read().split()))\n",
)
STYLES = ("inline", "named", "loop", "functional")

# Expressions of one element x; {n} is the component's number.
MAP_SPELLINGS: dict[str, tuple[str, ...]] = {
    "identity": ("x",),
    "squares": ("x*x", "x**2"),
    "cubes": ("x*x*x", "x**3"),
    "absolute": ("abs(x)",),
    "doubles": ("2*x", "x*2", "x+x"),
    "halves": ("x//2",),
    "opposites": ("-x", "0-x"),
    "successors": ("x+1", "1+x"),
    "predecessors": ("x-1", "-1+x"),
    "remainders": ("x%{n}",),
    "digits": ("abs(x)%10",),
}
FILTER_SPELLINGS: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "even": ("x%2==0", "not x%2", "x%2<1"),
    "odd": ("x%2", "x%2==1", "x%2!=0", "x%2>0"),
    "positive": ("x>0", "0<x"),
    "negative": ("x<0", "0>x"),
    "nonzero": ("x!=0", "x"),
    "multiples": ("x%{n}==0", "not x%{n}", "x%{n}<1"),
    "nonmultiples": ("x%{n}!=0", "x%{n}", "x%{n}>0"),
    "above": ("x>{n}", "{n}<x"),
    "below": ("x<{n}", "{n}>x"),
    "multidigit": ("abs(x)>9", "9<abs(x)"),
    "singledigit": ("abs(x)<10", "10>abs(x)"),
}
# (lines before the print, printed expression); {e} is the list.
AGGREGATE_SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "sum": (("", "sum({e})"), ("s=0\nfor y in {e}:\n s+=y\n", "s")),
    "count": (("", "len({e})"), ("", "sum(1 for y in {e})")),
    "max": (("", "max({e})"), ("", "sorted({e})[-1]")),
    "min": (("", "min({e})"), ("", "sorted({e})[0]")),
    "product": (("import math\n", "math.prod({e})"), ("s=1\nfor y in {e}:\n s*=y\n", "s")),
    "spread": (("", "(max({e})-min({e}))"), ("c=sorted({e})\n", "(c[-1]-c[0])")),
    "average": (("", "(sum({e})//len({e}))"), ("c={e}\n", "(sum(c)//len(c))")),
    "first": (("", "{e}[0]"), ("", "{e}.pop(0)")),
    "last": (("", "{e}[-1]"), ("", "{e}.pop()")),
    "second": (("", "sorted({e})[-2]"), ("", "sorted({e},reverse=True)[1]")),
    "distinct": (("", "len(set({e}))"),),
    "sorted": (("", "sorted({e})"), ("c=sorted({e})\n", "c")),
    "reversed": (("", "{e}[::-1]"), ("", "reversed({e})")),
}
POST_SPELLINGS: dict[str, tuple[str, ...]] = {
    "none": ("{v}",),
    "plus": ("{v}+{n}", "{n}+{v}"),
    "minus": ("{v}-{n}", "-{n}+{v}"),
    "times": ("{v}*{n}", "{n}*{v}"),
    "modulo": ("{v}%{n}",),
    "divided": ("{v}//{n}",),
}


def human_solutions(composition: Composition, rng: random.Random) -> tuple[str, ...]:
    """Return one right program per header and style, spellings at random, in random order, without repeats."""
    programs = [write_program(composition, header, style, rng) for header, style in product(HEADERS, STYLES)]
    rng.shuffle(programs)
    return tuple(dict.fromkeys(programs))


def write_program(composition: Composition, header: str, style: str, rng: random.Random) -> str:
    """Return a program for `composition` with spellings at random."""
    parts = _Parts(
        header,
        style,
        rng.choice(MAP_SPELLINGS[composition.map]),
        rng.choice(FILTER_SPELLINGS[composition.filter]),
        rng.choice(AGGREGATE_SPELLINGS[composition.aggregate]),
        rng.choice(POST_SPELLINGS[composition.post]),
    )
    return _assemble(composition, parts)


def every_program(composition: Composition) -> Iterator[str]:
    """Yield each right program that the headers, styles and spellings can make."""
    seen = set()
    for chosen in product(
        HEADERS,
        STYLES,
        MAP_SPELLINGS[composition.map],
        FILTER_SPELLINGS[composition.filter],
        AGGREGATE_SPELLINGS[composition.aggregate],
        POST_SPELLINGS[composition.post],
    ):
        program = _assemble(composition, _Parts(*chosen))
        if program not in seen:
            seen.add(program)
            yield program


class _Parts(NamedTuple):
    """How one program is written: its header, its style, and the spelling of each component."""

    header: str
    style: str
    map: str
    filter: str
    aggregate: tuple[str, str]
    post: str


def _assemble(composition: Composition, parts: _Parts) -> str:
    element = parts.map.format(n=composition.map_number)
    condition = parts.filter.format(n=composition.filter_number)
    lines, values = _survivors(parts.style, element, condition)
    before, result = (part.format(e=values) for part in parts.aggregate)
    if composition.aggregate in LIST_AGGREGATES:
        return f"{parts.header}{lines}{before}print(*{result})"
    printed = parts.post.format(v=result, n=composition.post_number)
    return f"{parts.header}{lines}{before}print({printed})"


def _survivors(style: str, element: str, condition: str) -> tuple[str, str]:
    """Return (lines that come first, expression of the list of mapped survivors)."""
    comprehension = f"[{element} for x in a if {condition}]" if condition else f"[{element} for x in a]"
    match style:
        case "inline":
            return "", comprehension
        case "named":
            return f"b={comprehension}\n", "b"
        case "loop":
            body = f" if {condition}:\n  b.append({element})\n" if condition else f" b.append({element})\n"
            return f"b=[]\nfor x in a:\n{body}", "b"
        case "functional":
            return f"b=list({_functional(element, condition)})\n", "b"
    raise ValueError(f"unknown style {style!r}")


def _functional(element: str, condition: str) -> str:
    survivors = f"filter(lambda x:{condition},a)" if condition else "a"
    return survivors if element == "x" else f"map(lambda x:{element},{survivors})"
