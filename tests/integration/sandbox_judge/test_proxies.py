"""What honest responses and their tests do with each other across two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.errors import InvalidInput
from spo.tasks.separate_tests import reasons_to_share
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, Limits, Outcome, TestIsolation, Verdict

MODULE, PYTEST = CodeTestStyle.CODE_TEST_STYLE_MODULE, CodeTestStyle.CODE_TEST_STYLE_PYTEST
SEPARATE, SHARED = TestIsolation.TEST_ISOLATION_SEPARATE, TestIsolation.TEST_ISOLATION_SHARED
NODE = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n"

# Name of a table's row -> style, `before`, the tests, a right response.
HONEST: dict[str, tuple[CodeTestStyle.ValueType, str, str, str]] = {
    "contexts and callers that are to swallow errors": (
        MODULE,
        "",
        """
with Suppress(ValueError):
    raise ValueError("x")
with Suppress(KeyError) as s:
    assert s.kinds
    {}[1]
try:
    with Suppress(KeyError): raise ValueError
except ValueError: pass
else: assert False
with ignoring(KeyError): raise KeyError
calls = []
@retry(3)
def flaky():
    calls.append(1)
    if len(calls) < 3: raise ValueError("x")
    assert len(calls) == 3
    return "ok"
assert flaky() == "ok"
def test():
    assert safely(lambda: boom()) is None and safely(int, "x") is None
    assert True
test()
""",
        """
import contextlib
class Suppress:
    def __init__(self, *kinds): self.kinds = kinds
    def __enter__(self): return self
    def __exit__(self, kind, *a): return kind is not None and issubclass(kind, self.kinds)
@contextlib.contextmanager
def ignoring(kind):
    try: yield
    except kind: pass
def retry(times):
    def decorate(f):
        def again(*a):
            for _ in range(times):
                try: return f(*a)
                except Exception as error: last = error
            raise last
        return again
    return decorate
def boom(): raise ValueError
def safely(f, *a):
    try: return f(*a)
    except Exception: return None
""",
    ),
    "modules": (
        PYTEST,
        "",
        """
from solution import *
def test_modules():
    assert math.floor(half(5)) == 2 and np.allclose(half(4), 2) and tools.half(4) == 2 and tools.half is tools.half
""",
        """
import math, types, numpy as np
def half(n): return n / 2
tools = types.ModuleType("tools")
tools.half = half
""",
    ),
    "builtins that the tests replace for themselves": (
        MODULE,
        "",
        """
import builtins
kept, builtins.sorted = sorted, lambda xs: "ours"
assert sorted([2, 1]) == "ours" and ordered([2, 1]) == [1, 2]
builtins.sorted = kept
assert sorted([2, 1]) == ordered([2, 1])
""",
        "def ordered(xs): return sorted(xs)\n",
    ),
    "a class": (
        MODULE,
        "",
        """
s = Stack([1])
s.push(2).push("x")
assert len(s) == 3 and list(s) == [1, 2, "x"] and s.pop() == "x" and 2 in s and s == [1, 2]
assert Stack.of(1, 2) == s and s + s == Stack([1, 2, 1, 2]) and repr(s) == "Stack([1, 2])" and s.top == 2
assert s[0] == 1 and isinstance(s, Stack)
try:
    Stack().pop()
    assert False
except IndexError as error:
    assert str(error) == "empty"
s.xs = [5]
assert s.pop() == 5 and not s and Stack.count >= 4
""",
        """
class Stack:
    count = 0
    def __init__(self, xs=()):
        self.xs = list(xs)
        Stack.count += 1
    def push(self, x):
        self.xs.append(x)
        return self
    def pop(self):
        if not self.xs:
            raise IndexError("empty")
        return self.xs.pop()
    def __len__(self): return len(self.xs)
    def __iter__(self): return iter(self.xs)
    def __contains__(self, x): return x in self.xs
    def __eq__(self, other): return self.xs == (other.xs if isinstance(other, Stack) else other)
    def __add__(self, other): return Stack(self.xs + other.xs)
    def __repr__(self): return f"Stack({self.xs})"
    def __getitem__(self, i): return self.xs[i]
    @property
    def top(self): return self.xs[-1]
    @classmethod
    def of(cls, *a): return cls(a)
""",
    ),
    "arguments changed in place": (
        MODULE,
        "",
        """
a, b, d = [3, 1, 2], [[2], [1]], {"x": {1}}
inner = b[0]
order(a); grow(b); add(d)
assert a == [1, 2, 3] and same(a) is a and inner == [2, 9] and b[0] is inner and d == {"x": {1, 2}, "y": 0}
""",
        """
def order(a): a.sort()
def same(a): return a
def grow(b):
    for row in b: row.append(9)
def add(d): d["x"].add(2); d["y"] = 0
""",
    ),
    "functions handed in": (
        MODULE,
        "",
        """
out, calls = [], []
each([1, 2, 3], out.append)
assert out == [1, 2, 3] and apply(lambda x: x * 2, 4) == 8 and apply(len, [1, 2]) == 2
class Own(Exception): pass
@retry(3, (Own,))
def flaky():
    calls.append(1)
    if len(calls) < 3: raise Own("x")
    return "ok"
assert flaky() == "ok" and len(calls) == 3 and flaky.__name__ == "flaky"
def bad(x): raise Own("no")
try: apply(bad, 1)
except Own as error: assert str(error) == "no"
else: assert False
""",
        """
import functools
def each(xs, f):
    for x in xs: f(x)
def apply(f, x): return f(x)
def retry(times, errors):
    def decorate(f):
        @functools.wraps(f)
        def wrapped(*a, **k):
            for _ in range(times):
                try: return f(*a, **k)
                except errors as error: last = error
            raise last
        return wrapped
    return decorate
""",
    ),
    "generators": (
        MODULE,
        "",
        """
import itertools, types
g = fibonacci()
assert list(itertools.islice(g, 6)) == [0, 1, 1, 2, 3, 5] and next(g) == 8 and isinstance(g, types.GeneratorType)
g.close()
assert list(evens(iter(range(5)))) == [0, 2, 4] and sum(evens(x for x in [2, 3])) == 2 and list(more([1, 2])) == [2, 3]
""",
        """
def fibonacci():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
def evens(xs): return (x for x in xs if x % 2 == 0)
def more(xs): return map(lambda x: x + 1, xs)
""",
    ),
    "objects of the tests": (
        MODULE,
        "",
        """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
node, found = turned(Node(1, Node(2, Node(3)))), []
while node: found.append(node.val); node = node.next
assert found == [3, 2, 1]
""",
        "def turned(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p\n",
    ),
    "classes that stand before": (
        MODULE,
        NODE,
        """
def build(xs):
    head = None
    for x in reversed(xs): head = ListNode(x, head)
    return head
node, found = turned(build([1, 2, 3])), []
while node: found.append(node.val); node = node.next
assert found == [3, 2, 1]
""",
        "def turned(n):\n    p = None\n    while n:\n        p, n = ListNode(n.val, p), n.next\n    return p\n",
    ),
    "plain values": (
        MODULE,
        "",
        """
from collections import *
from decimal import Decimal
from fractions import Fraction
import datetime as dt
for value in [None, True, 1, -5, 1 << 20000, 1.5, float("inf"), 1j, "\\u00e4\\ud800", b"x", bytearray(b"q"),
              (1, (2,)), {1: 2}, {3}, frozenset({4}), deque([1], 3), Counter("aab"), OrderedDict(a=1),
              Decimal("1.20"), Fraction(1, 3), dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, 3, 4), dt.timedelta(1),
              range(3),
              slice(1, 2), ..., [1] * 50]:
    same = identity(value)
    assert same == value and type(same) is type(value), value
found = identity(defaultdict(list))
found["x"].append(1)
x = []
for _ in range(600): x = [x]
assert depth(x) == 600 and identity(ValueError) is ValueError and identity(-0.0).hex() == "-0x0.0p+0"
""",
        "def identity(x): return x\ndef depth(x):\n    n = 0\n    while x: x = x[0]; n += 1\n    return n\n",
    ),
    "exceptions": (
        MODULE,
        "",
        """
import json
try: own()
except Own as error: assert error.code == 5 and str(error) == "bad" and isinstance(error, ValueError)
else: assert 0
try: key()
except KeyError as error: assert error.args == ("k",)
try: library()
except json.JSONDecodeError: pass
""",
        """
import json
class Own(ValueError):
    def __init__(self, text, code): super().__init__(text); self.code = code
def own(): raise Own("bad", 5)
def key(): raise KeyError("k")
def library(): json.loads("{")
""",
    ),
    "enumerations and records": (
        MODULE,
        "",
        """
assert Color.RED.value == 1 and Color(1) is Color.RED and [c.name for c in Color] == ["RED", "BLUE"]
assert Color["BLUE"] is pick() and len({Point(1, 2), Point(1, 2)}) == 1 and Point(1, 2) != Point(2, 2)
assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and sorted([Point(2, 1), Point(1, 1)])[0].x == 1
""",
        """
import enum
from dataclasses import dataclass
from typing import NamedTuple
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def pick(): return Color.BLUE
@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int
class Pair(NamedTuple):
    a: int
    b: int
""",
    ),
    "contexts and coroutines": (
        MODULE,
        "",
        """
import asyncio
with Switch() as switch: assert switch.on
assert not switch.on and asyncio.run(more(2)) == 3
async def main(): return await asyncio.gather(more(1), more(2))
assert asyncio.run(main()) == [2, 3]
""",
        """
class Switch:
    def __enter__(self): self.on = True; return self
    def __exit__(self, *a): self.on = False
async def more(x): return x + 1
""",
    ),
    "printing and input": (
        PYTEST,
        "",
        """
from solution import ask, greet
def test_greet(capsys):
    greet("x")
    assert capsys.readouterr().out == "hi x\\n"
def test_ask(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt="": "7")
    assert ask() == 8
""",
        "def greet(n): print('hi', n)\ndef ask(): return int(input('n? ')) + 1\n",
    ),
    "parts replaced": (
        PYTEST,
        "",
        """
from unittest import mock
import solution
def test_function():
    with mock.patch("solution.part", return_value=5) as part:
        assert solution.whole(1) == 6
    part.assert_called_once_with(1)
    assert solution.whole(1) == 3
def test_object():
    db = mock.Mock()
    db.get.return_value = 3
    assert solution.ask(db) == 4
    db.get.assert_called_once_with("k")
def test_constant(monkeypatch):
    monkeypatch.setattr(solution, "LIMIT", 10)
    assert solution.limit() == 10
""",
        """
LIMIT = 3
def part(x): return x + 1
def whole(x): return part(x) + 1
def ask(db): return db.get("k") + 1
def limit(): return LIMIT
""",
    ),
    "classes derived from builtin ones": (
        MODULE,
        "",
        """
s = Sorted([3, 1])
s.add(2)
assert len(s) == 3 and s == [1, 2, 3] and isinstance(s, list) and s[0] == 1
assert Celsius(3.5) + 1 == 4.5 and Celsius(1).fahrenheit() == 33.8
""",
        """
class Sorted(list):
    def __init__(self, xs): super().__init__(sorted(xs))
    def add(self, x): self.append(x); self.sort()
class Celsius(float):
    def fahrenheit(self): return self * 9 / 5 + 32
""",
    ),
    "recursion as deep as a program's own": (
        MODULE,
        "",
        "assert count(980) == 980\n",
        "def count(n): return n and 1 + count(n - 1)\n",
    ),
    "objects that the tests have made and the response gives back": (
        MODULE,
        "",
        """
m = Money(5)
assert m.add(3) == Money(8) and m.add(3).amount == 8 and m == 5 and m + 1 == 6 and -m == -5 and m < 6
m += 2
assert m.itself().itself().amount == 7 and m == 7 and sum([m, m]) == 14 and Money(7) in [m]
""",
        """
import functools
@functools.total_ordering
class Money:
    def __init__(self, amount): self.amount = amount
    def itself(self): return self
    def add(self, k): return Money(self.amount + k)
    def __add__(self, k): return Money(self.amount + getattr(k, "amount", k))
    __radd__ = __add__
    def __iadd__(self, k): self.amount += k; return self
    def __neg__(self): return Money(-self.amount)
    def __eq__(self, o): return self.amount == getattr(o, "amount", o)
    def __lt__(self, o): return self.amount < getattr(o, "amount", o)
""",
    ),
    "errors of the tests that the response is meant to catch": (
        MODULE,
        "",
        """
def bad(): assert 1 == 2
assert safe(bad) is None and safe(lambda: 3) == 3
""",
        "def safe(f):\n    try: return f()\n    except Exception: return None\n",
    ),
    "what is random, seeded by the tests": (
        MODULE,
        "",
        """
import random
import numpy as np
random.seed(1)
expected = [random.random() for _ in range(3)]
random.seed(1)
assert draw(3) == expected
np.random.seed(2)
numbers = np.random.rand(2).tolist()
np.random.seed(2)
assert rolled(2) == numbers
assert first(random.Random(5)) == random.Random(5).random()
assert rolled_from(np.random.default_rng(3)) == np.random.default_rng(3).random()
""",
        """
import random
import numpy
def draw(n): return [random.random() for _ in range(n)]
def rolled(n): return numpy.random.rand(n).tolist()
def first(source): return source.random()
def rolled_from(source): return source.random()
""",
    ),
    "causes and groups of exceptions": (
        MODULE,
        "",
        """
try: chained()
except ValueError as error: assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("x",)
else: assert False
try: group()
except* ValueError as found: assert [str(each) for each in found.exceptions] == ["a"]
""",
        """
def chained():
    try: {}["x"]
    except KeyError as error: raise ValueError("no") from error
def group(): raise ExceptionGroup("g", [ValueError("a")])
""",
    ),
    "what functions and objects say of themselves": (
        MODULE,
        "",
        """
assert curried(lambda a, b, c: a + b + c)(1)(2)(3) == 6 and arity(lambda: 0) == 0 and arity(lambda *a: 0) == 0
assert fib.__doc__.strip() == 'F.' and Square.__doc__ == 'A square.' and Square(2).__doc__ == 'A square.'
assert vars(Square(2)) == {'side': 2} and Square(3).__dict__ == {'side': 3}
""",
        """
import functools, inspect
def curried(f):
    count = len(inspect.signature(f).parameters)
    def more(*a): return f(*a) if len(a) >= count else lambda *b: more(*a, *b)
    return more
def arity(f): return f.__code__.co_argcount
@functools.lru_cache
def fib(n):
    ' F. '
class Square:
    'A square.'
    def __init__(self, side): self.side = side
""",
    ),
    "methods and coroutines handed in": (
        MODULE,
        "",
        """
import asyncio
got, bus = [], Bus()
bus.on(got.append); bus.emit(3); bus.off(got.append); bus.emit(4)
assert got == [3]
async def more(x): return x + 1
async def main(): return await both(more, 1)
assert asyncio.run(main()) == [2, 3]
""",
        """
import asyncio
class Bus:
    def __init__(self): self.handlers = []
    def on(self, f): self.handlers.append(f)
    def off(self, f): self.handlers.remove(f)
    def emit(self, x):
        for f in self.handlers: f(x)
async def both(f, x): return await asyncio.gather(f(x), f(x + 1))
""",
    ),
    "errors printed, and paths": (
        PYTEST,
        "",
        """
from pathlib import Path
from solution import complain, joined
def test_complain(capsys):
    complain()
    assert capsys.readouterr() == ("out\\n", "bad\\n")
def test_joined(): assert joined("a", "b") == Path("a/b")
""",
        """
import sys
from pathlib import Path
def complain(): print("out"); print("bad", file=sys.stderr)
def joined(*names): return Path(*names)
""",
    ),
    "a byte-order mark and an import from the future": (
        MODULE,
        "import math\n",
        "assert more(1) == 2 and math.floor(1.5) == 1\n",
        "\ufefffrom __future__ import annotations\ndef more(x: Number) -> Number: return x + 1\n",
    ),
    "methods of builtin classes handed in": (
        MODULE,
        "",
        "assert list(mapped(str.upper, 'ab')) == ['A', 'B'] and mapped(list.copy, [[1]]) == [[1]]\n",
        "def mapped(f, xs): return [f(x) for x in xs]\n",
    ),
    "a function that stands before and is not written yet": (
        MODULE,
        "def oracle(n):\n    return n + 1\ndef todo(n):\n    '''Write it.'''\n    raise NotImplementedError\n",
        "assert todo(1) == oracle(1)\n",
        "def todo(n): return oracle(n)\n",
    ),
}
for _row in yaml.safe_load((Path(__file__).parents[2] / "hostile" / "functions" / "honest.yaml").read_text()):
    HONEST[_row["name"]] = (PYTEST if "style" in _row else MODULE, "", _row["tests"], _row["response"])

WRONG = "class Base:\n    def f(self): return 2\n"
# Why tests share an interpreter with the response, and tests that do.
SHARING = {
    "derives a class from Base": "class Own(Base):\n    pass\nassert Own().f() == 1\n",
    "imports pickle": "import pickle\nassert pickle.loads(pickle.dumps(Base())).f() == 1\n",
    "imports inspect": "import inspect\nassert inspect.isfunction(Base.f)\n",
    "opens a file": "open('x', 'w').write('1')\nassert Base().f() == 1\n",
    "uses dataclasses.asdict": "import dataclasses\nassert dataclasses.asdict or Base().f()\n",
    "replaces time.time": "from unittest import mock\nwith mock.patch('time.time'):\n    assert Base().f() == 1\n",
}


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    scheduler = JudgeScheduler(MemoryStore(), settings, choose_tier(settings), workers=1)
    yield scheduler
    scheduler.close(20)


def judged(judge: JudgeScheduler, tests: CodeTests, response: str) -> Verdict:
    test_set = verdict_pb2.TestSet(code_tests=tests, limits=Limits(cpu_seconds=2, wall_seconds=5))
    digest = judge.test_sets.upload(test_set)
    return judge.submit([response], "python", digest, Priority.PRIORITY_TRAINING).verdicts(60)[0]


@pytest.mark.parametrize("name", HONEST)
def test_a_right_response_passes_apart_from_its_tests(judge: JudgeScheduler, name: str) -> None:
    style, before, code, response = HONEST[name]

    verdict = judged(judge, CodeTests(style=style, before=before, code=code), response)

    assert (verdict.outcome, verdict.detail) == (Outcome.OUTCOME_ACCEPTED, "")
    assert verdict.test_isolation == SEPARATE


@pytest.mark.parametrize("reason", SHARING)
def test_tests_that_need_the_very_objects_share_and_are_refused_where_that_is_forbidden(
    judge: JudgeScheduler, reason: str
) -> None:
    tests = CodeTests(style=MODULE, code=SHARING[reason])
    response = "class Base:\n    def f(self): return 1\n"

    verdict = judged(judge, tests, response)
    assert (verdict.outcome, verdict.detail) == (Outcome.OUTCOME_ACCEPTED, "")
    assert verdict.test_isolation == SHARED
    assert reason in "; ".join(reasons_to_share(tests))

    tests.isolation = SEPARATE
    with pytest.raises(InvalidInput) as refused:
        judge.test_sets.upload(verdict_pb2.TestSet(code_tests=tests))
    assert [violation.pointer for violation in refused.value.violations] == ["/code_tests/isolation"]
    assert reason in refused.value.violations[0].message


@pytest.mark.parametrize(
    "response",
    [
        "import ctypes\nclass Base:\n    def f(self): return 1\n",
        WRONG + "open('conftest.py', 'w').write('def pytest_pyfunc_call(pyfuncitem): return True')\n",
        WRONG + "import os\nos.environ['PYTEST_ADDOPTS'] = '-k other'\n",
        WRONG + "import _pytest.python\n_pytest.python.Function.runtest = lambda s: None\n",
        WRONG + "import pickle\npickle.loads = lambda *a: Base()\n",
        WRONG + "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(lambda *a, **k: None)\n",
    ],
)
def test_where_they_share_the_known_ways_are_closed(judge: JudgeScheduler, response: str) -> None:
    code = "import pickle\nfrom solution import Base\ndef test_it():\n    assert pickle.loads(pickle.dumps(1)) == 1\n"
    code += "def test_base():\n    class Own(Base): pass\n    assert Own().f() == 1\ndef test_other(): pass\n"

    verdict = judged(judge, CodeTests(style=PYTEST, code=code), response)

    assert verdict.outcome not in (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_INTERNAL_ERROR)
    assert verdict.test_isolation == SHARED
