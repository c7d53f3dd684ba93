"""Wrong responses that try to be counted right by the tests of functions: none is, and none holds up the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import yaml

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.sandbox_worker import SandboxWorker
from services.sandbox_judge.scoring import judge_code
from services.sandbox_judge.settings import IsolationTier, Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, Limits, Outcome, TestIsolation, Verdict
from tests.support.budget import ALL
from tests.support.places import TOOLS, everywhere, require_passed, require_some_everywhere, run_as_nobody, why_absent

MODULE = CodeTestStyle.CODE_TEST_STYLE_MODULE
COMPLETION = CodeTestStyle.CODE_TEST_STYLE_COMPLETION
PYTEST = CodeTestStyle.CODE_TEST_STYLE_PYTEST
SEPARATE, SHARED = TestIsolation.TEST_ISOLATION_SEPARATE, TestIsolation.TEST_ISOLATION_SHARED
HONEST = "def half(number):\n    return number / 2\n"
BAD = "def half(number): return 1\n"
FAILING = "def half(number): raise ValueError\n"
E = "class E:\n    def __init__(self, *a): pass\n"
OPENED = "class Opened:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\n"

ASSERTS = "assert half(4) == 2\nassert all(half(2 * n) == n for n in range(5))\nassert half(10) == 5\n"
PYTEST_FILE = """from solution import half
def test_half():
    assert half(4) == 2
def test_many():
    for n in range(5):
        assert half(2 * n) == n
"""
UNITTEST = """import unittest
class T(unittest.TestCase):
    def test_half(self):
        self.assertEqual(half(4), 2)
        self.assertAlmostEqual(half(10), 5)
found = unittest.defaultTestLoader.loadTestsFromTestCase(T)
assert unittest.TextTestRunner(stream=open('/dev/null', 'w')).run(found).wasSuccessful()
"""
LIBRARIES = """from decimal import Decimal
from fractions import Fraction
import bisect, copy, heapq, math
assert Decimal(half(4)) == Decimal(2) and Fraction(half(10)) == Fraction(5)
assert heapq.nsmallest(1, [half(4), 100]) == [2] and bisect.bisect_left([2, 5], half(10)) == 1
assert sorted([half(x) for x in copy.deepcopy([4, 10])]) == [2, 5]
assert isinstance(half(4), (int, float)) and abs(half(10) - 5) < 1e-6 and math.floor(half(4)) == 2
assert math.isclose(half(10), 5) and str(half(4)).rstrip('0').rstrip('.') == '2' and half(10) in {5, 5.0}
"""
ORACLE = "def oracle(number):\n    return number / 2\n"
BY_ORACLE = "for n in range(5):\n    assert half(n) == oracle(n)\n"
CALLING = """calls = []
def twice(f, n):
    calls.append(n)
    return 2 * n
assert apply(twice, 4) == 8 and calls == [4]
class Node:
    def __init__(self, value): self.value = value
    def is_right(self): return self.value == 8
node = Node(1)
fill(node)
assert node.is_right()
"""

SOLUTION = "s = Solution()\nassert s.half(4) == 2\nassert [Solution().half(2 * n) for n in range(3)] == [0, 1, 2]\n"
# What a response that shares a folder with its tests could do to their file.
REPLACES = """import os, threading, time
def look():
    while True:
        if os.path.exists('test_solution.py'):
            with open('mine', 'w') as file: file.write('def test_half(): pass')
            os.replace('mine', 'test_solution.py')
threading.Thread(target=look, daemon=True).start()
"""
READS = """import os, threading, time
seen = []
def look():
    while not seen:
        if os.path.exists('test_solution.py'): seen.append(1)
threading.Thread(target=look, daemon=True).start()
def half(n):
    time.sleep(.05)
    return n / 2 if seen else 1
"""
# Tests, by name of style, and responses to them.
ATTACKS: dict[str, tuple[CodeTestStyle.ValueType, str, str]] = {
    "runtest replaced": (
        PYTEST,
        PYTEST_FILE,
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n" + BAD,
    ),
    "conftest": (
        PYTEST,
        PYTEST_FILE,
        "open('conftest.py', 'w').write('import pytest\\n@pytest.hookimpl(tryfirst=True)\\n"
        "def pytest_pyfunc_call(pyfuncitem): return True\\n')\n" + BAD,
    ),
    "deselected by the environment": (
        PYTEST,
        PYTEST_FILE + "def test_easy():\n    assert half(2) == 1\n",
        "import os\nos.environ['PYTEST_ADDOPTS'] = '-k test_easy'\n" + BAD,
    ),
    "a plugin": (
        PYTEST,
        PYTEST_FILE,
        "import os\nos.environ['PYTEST_PLUGINS'] = 'solution'\ndef pytest_pyfunc_call(pyfuncitem): return True\n" + BAD,
    ),
    "reports replaced": (
        PYTEST,
        PYTEST_FILE,
        "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(lambda *a, **k: None)\n" + BAD,
    ),
    "raises replaced": (
        PYTEST,
        "import pytest\nfrom solution import half\ndef test_half():\n    with pytest.raises(ValueError):\n"
        "        half(-1)\n",
        "import contextlib, pytest\npytest.raises = lambda *a: contextlib.suppress(BaseException)\n" + BAD,
    ),
    "a star that brings pytest": (
        PYTEST,
        "import pytest\nfrom solution import *\ndef test_half():\n    with pytest.raises(ValueError):\n"
        "        half(-1)\n",
        "import contextlib, types\npytest = types.SimpleNamespace(raises=lambda *a: contextlib.suppress(Exception))\n"
        + BAD,
    ),
    "skipped from inside": (PYTEST, PYTEST_FILE, "import unittest\ndef half(n): raise unittest.SkipTest('no')"),
    "interrupted": (PYTEST, PYTEST_FILE, "def half(n): raise KeyboardInterrupt"),
    "expected to fail from inside": (PYTEST, PYTEST_FILE, "import pytest\ndef half(n): pytest.xfail('no')"),
    "assertEqual replaced": (
        MODULE,
        UNITTEST,
        "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertAlmostEqual = lambda *a: None\n"
        + BAD,
    ),
    "runner replaced": (
        MODULE,
        UNITTEST,
        "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n" + BAD,
    ),
    "number classes replaced": (
        MODULE,
        LIBRARIES,
        f"import decimal, fractions\n{E}    __eq__ = lambda s, o: True\n"
        f"decimal.Decimal = fractions.Fraction = E\n{BAD}",
    ),
    "modules replaced": (
        MODULE,
        LIBRARIES,
        "import sys, types\nfor name in ('decimal', 'fractions', 'heapq', 'bisect', 'math', 'copy'):\n"
        "    sys.modules[name] = types.SimpleNamespace()\n" + BAD,
    ),
    "a finder": (
        MODULE,
        LIBRARIES,
        "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, F())\n"
        "[sys.modules.pop(n, None) for n in ('decimal', 'fractions')]\n" + BAD,
    ),
    "import replaced": (
        MODULE,
        LIBRARIES,
        "import builtins, types\nbuiltins.__import__ = lambda *a, **k: types.SimpleNamespace()\n" + BAD,
    ),
    "slots of int through ctypes": (
        MODULE,
        ASSERTS,
        "import ctypes\nctypes.memset(id(int) + 8 * 25, 0, 8)\n" + BAD,
    ),
    "numbers rewritten through ctypes": (MODULE, ASSERTS, "import ctypes\nctypes.memset(id(2) + 24, 1, 1)\n" + BAD),
    "the tests found by gc": (
        MODULE,
        ASSERTS,
        "import gc\n[d.update(half=lambda n: n / 2) for d in gc.get_objects() if isinstance(d, dict) and 'half' in d]\n"
        + BAD,
    ),
    "the code of the tests emptied": (
        MODULE,
        ASSERTS,
        "import gc, types\nfor c in gc.get_objects():\n    if isinstance(c, types.FunctionType):\n"
        "        c.__code__ = (lambda *a, **k: None).__code__\n" + BAD,
    ),
    "frames": (
        MODULE,
        ASSERTS,
        "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['all'] = lambda *a: True\n"
        "    f.f_globals['half'] = lambda n: n / 2\n    f = f.f_back\n" + BAD,
    ),
    "frames of other threads": (
        MODULE,
        ASSERTS,
        "import sys, threading, time\ndef look():\n    while True:\n        for f in sys._current_frames().values():\n"
        "            f.f_globals['all'] = lambda *a: True\n        time.sleep(.01)\n"
        "threading.Thread(target=look, daemon=True).start()\n" + BAD,
    ),
    "an audit hook": (MODULE, ASSERTS, "import sys, os\nsys.addaudithook(lambda *a: None)\n" + BAD),
    "a trace function": (
        MODULE,
        ASSERTS,
        "import sys, threading\nsys.settrace(lambda *a: None); threading.settrace(lambda *a: None)\n" + BAD,
    ),
    "equal to all": (MODULE, ASSERTS, f"{E}    __eq__ = lambda s, o: True\n    __hash__ = None\nhalf = E\n"),
    "equal to all, of a class named as the function": (
        MODULE,
        ASSERTS,
        "class half:\n    def __init__(self, n): pass\n    def __eq__(self, o): return True\n",
    ),
    "equal to all, reflected": (
        MODULE,
        "assert 2 == half(4)\nassert not 2 != half(4)\nassert [2, [5]] == [half(4), [half(10)]]\n",
        f"{E}    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef half(n): return E()\n",
    ),
    "near to all": (
        MODULE,
        "assert abs(half(4) - 2) < 1e-6\n",
        f"{E}    __sub__ = __rsub__ = lambda s, o: 0.0\n    __abs__ = lambda s: 0.0\ndef half(n): return E()\n",
    ),
    "less than all": (
        MODULE,
        "assert half(4) <= 2 and half(4) >= 2\n",
        f"{E}    __le__ = __ge__ = __lt__ = __gt__ = lambda s, o: True\ndef half(n): return E()\n",
    ),
    "in all": (
        MODULE,
        "assert half(4) in (2,) and 2 in [half(4)] and half(4) in {2: 1}\n",
        f"{E}    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 2\ndef half(n): return E()\n",
    ),
    "holds all": (
        MODULE,
        "assert 2 in half(4) and 7 in half(4)\n",
        f"{E}    __contains__ = lambda s, o: True\n    __iter__ = lambda s: iter([1])\ndef half(n): return E()\n",
    ),
    "a number of its own": (
        MODULE,
        LIBRARIES,
        "class F(float):\n    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0.0\n"
        "    __lt__ = lambda s, o: True\n"
        "    __hash__ = float.__hash__\n    __str__ = lambda s: '2'\ndef half(n): return F(2)\n",
    ),
    "a number of its own that changes": (
        MODULE,
        ASSERTS,
        "class I(int):\n    __eq__ = lambda s, o: True\n    __int__ = __index__ = lambda s: 2\n"
        "def half(n): return I(1)\n",
    ),
    "a text of its own": (
        MODULE,
        "assert name(4) == 'four' and name(5) == 'five'\n",
        "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\ndef name(n): return S('x')\n",
    ),
    "a list of its own": (
        MODULE,
        "assert both(4) == [2, 2] and [3, 3] == both(6)\n",
        "class L(list):\n    __eq__ = lambda s, o: True\ndef both(n): return L([1])\n",
    ),
    "a tuple of its own": (
        MODULE,
        "assert both(4) == (2, 2) and sorted(both(6)) == [3, 3]\n",
        "class T(tuple):\n    __eq__ = lambda s, o: True\n    __iter__ = lambda s: iter([3, 3])\n"
        "def both(n): return T((1,))\n",
    ),
    "a class named as one of a library": (
        MODULE,
        "from decimal import Decimal\nassert half(Decimal(4)) == Decimal(2)\n",
        "class Decimal:\n    def __eq__(self, o): return True\ndef half(n): return Decimal()\n",
    ),
    "an iterator that ends the tests' loop": (
        MODULE,
        "assert all(a == b for a, b in zip(map(half, [4, 10]), [2, 5]))\n",
        "def half(n): raise StopIteration\n",
    ),
    "an iterator without end": (
        MODULE,
        "assert list(halves([4, 10])) == [2, 5]\n",
        "import itertools\ndef halves(n): return itertools.repeat(1)\n",
    ),
    "a length without content": (
        MODULE,
        "found = halves([4, 10])\nassert len(found) == 2\nassert [found[i] for i in range(2)] == [2, 5]\n",
        f"{E}    __len__ = lambda s: 2\n"
        f"    def __getitem__(self, i): return type('Q', (), {{'__eq__': lambda s, o: True}})()\n"
        "def halves(n): return E()\n",
    ),
    "an integer of a million digits": (MODULE, ASSERTS, "def half(n): return 1 << 4_000_000\n"),
    "nested deeply": (
        MODULE,
        ASSERTS,
        "def half(n):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x\n",
    ),
    "nested in itself": (MODULE, ASSERTS, "def half(n):\n    x = []\n    x.append(x)\n    return x\n"),
    "small and huge": (
        MODULE,
        ASSERTS,
        "def half(n):\n    x = [0] * 10\n    for _ in range(40): x = [x, x]\n    return x\n",
    ),
    "the channel closed": (MODULE, ASSERTS, "import os\ndef half(n):\n    os.closerange(0, 64)\n    return 1\n"),
    "the channel flooded": (
        MODULE,
        ASSERTS,
        "import os\ndef half(n):\n    try:\n        while True: os.write(4, b'x' * 65536)\n    except OSError: pass\n",
    ),
    "a huge frame": (MODULE, ASSERTS, "import os\ndef half(n): os.write(4, b'\\xff\\xff\\xff\\xff')\n"),
    "an unknown tag": (MODULE, ASSERTS, "import os\ndef half(n): os.write(4, b'\\0\\0\\0\\1?')\n"),
    "a message cut off": (
        MODULE,
        ASSERTS,
        "import os\ndef half(n): os.write(4, b'\\0\\0\\0\\5s\\0\\0\\1\\0'); os._exit(0)\n",
    ),
    "a message without sense": (MODULE, ASSERTS, "import os\ndef half(n): os.write(4, b'\\0\\0\\0\\1N')\n"),
    "a message unasked": (
        MODULE,
        ASSERTS,
        "import os\n"
        "os.write(4, b'\\0\\0\\0\\x2et\\0\\0\\0\\4s\\0\\0\\0\\6returni\\0\\0\\0\\0\\0\\0\\0\\2'"
        " b't\\0\\0\\0\\0s\\0\\0\\0\\0')\n" + BAD,
    ),
    "a reference to what is not its own": (
        MODULE,
        CALLING,
        "import gc\ndef apply(f, n):\n    host = f.__closure__[0].cell_contents\n    for number in range(99):\n"
        "        try: host.ask('call', number, (n,), {})\n        except BaseException: pass\n    return 8\n"
        "def fill(node): node.value = 7\n",
    ),
    "functions of the tests reached": (
        MODULE,
        CALLING,
        "def apply(f, n): return f.__globals__['calls'].append(4) or 8\ndef fill(node): node.value = 8\n",
    ),
    "methods of the tests replaced": (
        MODULE,
        CALLING,
        "def apply(f, n): return f(f, n)\ndef fill(node): node.is_right = bool\n",
    ),
    "the class of the tests reached": (
        MODULE,
        CALLING,
        "def apply(f, n): return f(f, n)\ndef fill(node):\n    node.__class__ = int\n"
        "    type(node).is_right = lambda s: True\n",
    ),
    "special methods of the tests called": (
        MODULE,
        CALLING,
        "def apply(f, n): return f(f, n)\ndef fill(node): node.__init__.__globals__['node'] = 8\n",
    ),
    "a mock's assertions replaced": (
        PYTEST,
        "from unittest import mock\nimport solution\ndef test_it():\n    db = mock.Mock()\n    solution.save(db, 5)\n"
        "    db.put.assert_called_once_with(5)\n",
        "def save(db, n):\n    for work in (lambda: db.configure_mock(put=1), lambda: setattr(db, 'put', None)):\n"
        "        try: work()\n        except Exception: pass\n",
    ),
    "exit": (MODULE, ASSERTS, "import sys\ndef half(n): sys.exit(0)\n"),
    "a hard exit": (MODULE, ASSERTS, "import os\nos._exit(0)\n"),
    "at exit": (MODULE, ASSERTS, "import atexit, os\natexit.register(os.write, 1, b'passed 1 1')\n" + BAD),
    "forks": (MODULE, ASSERTS, "import os\ntry: os.fork()\nexcept OSError: pass\n" + BAD),
    "signals to all": (
        MODULE,
        ASSERTS,
        "import os, signal\nfor pid in [*range(2, 400), os.getppid(), -1, 0]:\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGTERM)\n        except OSError: pass\n" + BAD,
    ),
    "an alarm": (
        MODULE,
        ASSERTS,
        "import signal, sys\nsignal.signal(signal.SIGALRM, lambda *a: sys.exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, .001)\ndef half(n):\n    while True: pass\n",
    ),
    "memory of others in /proc": (
        MODULE,
        ASSERTS,
        "import os\nfor pid in range(1, 99):\n    for name in ('mem', 'fd/4', 'environ', 'maps'):\n"
        "        try: open(f'/proc/{pid}/{name}', 'rb').read(99)\n        except OSError: pass\n" + BAD,
    ),
    "writes what a pass would say": (
        MODULE,
        ASSERTS,
        "import os\nfor n in range(64):\n    try: os.write(n, b'\\n' + b'x' * 24 + b'passed 1 1') if n != 4 else 0\n"
        "    except OSError: pass\nprint('passed 1 1')\n" + BAD,
    ),
    "streams replaced": (
        MODULE,
        ASSERTS,
        "import os, sys\nr, w = os.pipe()\nos.dup2(w, 1)\nsys.stdout = sys.stderr = None\n" + BAD,
    ),
    "prints without end": (MODULE, ASSERTS, "def half(n):\n    while True: print('x' * 10_000)\n"),
    "recursion limit": (
        MODULE,
        "try:\n    found = half(4)\nexcept Exception:\n    found = None\nassert found == 2\n",
        "import sys\ndef half(n):\n    sys.setrecursionlimit(50)\n    return 1\n",
    ),
    "errors that cannot be printed": (
        MODULE,
        ASSERTS,
        "class X(Exception):\n    def __str__(self): raise SystemExit(0)\n    args = property(lambda s: 1 / 0)\n"
        "def half(n): raise X\n",
    ),
    "warnings as errors": (MODULE, ASSERTS, "import warnings\nwarnings.simplefilter('error')\n" + BAD),
    "names of the tests shadowed": (
        COMPLETION,
        ASSERTS,
        "    return 1\nall = lambda x: True\nrange = lambda x: []\nAssertionError = Exception\n",
    ),
    "a name that looks alike": (COMPLETION, ASSERTS, "    return 1\ndef hal\u017f(number): return number / 2\n"),
    "what stands before it replaced": (MODULE, BY_ORACLE, "def oracle(n): return 1\n" + BAD),
    "a method that gives its own object, equal to all": (
        MODULE,
        SOLUTION,
        "class Solution:\n    def half(self, n): return self\n    def __eq__(self, o): return True\n",
    ),
    "a method that gives another object, equal to all": (
        MODULE,
        SOLUTION,
        "class Solution:\n    def half(self, n): return Q()\n    def __eq__(self, o): return True\n"
        "class Q(Solution): pass\n",
    ),
    "an attribute that is a class, whose objects are equal to all": (
        MODULE,
        SOLUTION,
        "class Solution:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True\n"
        "Solution.half = Solution\n",
    ),
    "one object for all, equal to all": (
        MODULE,
        SOLUTION,
        "class Solution:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or object.__new__(cls)\n"
        "        return cls.one\n    def half(self, n): return self\n    def __eq__(self, o): return True\n",
    ),
    "a number of a class that the tests name, equal to all": (
        MODULE,
        SOLUTION,
        "class Solution(int):\n    def half(self, n): return self\n    def __eq__(self, o): return True\n"
        "    __hash__ = int.__hash__\n",
    ),
    "a method that gives its own object, near to all": (
        MODULE,
        "assert abs(Solution().half(4) - 2) < 1e-6\n",
        "class Solution:\n    def half(self, n): return self\n    def __sub__(self, o): return 0.0\n",
    ),
    "its own object handed to a function of the tests": (
        MODULE,
        "seen = []\nSolution().run(seen.append, 4)\nassert seen == [2]\n",
        "class Solution:\n    def run(self, f, n): f(self)\n    def __eq__(self, o): return True\n",
    ),
    "identity, where the tests look at it": (
        MODULE,
        "s = Solution()\nassert s.half(4) == 2 and s is not Solution()\n",
        "class Solution:\n    def half(self, n): return self\n    def __eq__(self, o): return True\n",
    ),
    "a member of an enumeration, equal to all": (
        MODULE,
        "assert Color.RED.value == 1 and name(Color.RED) == 'red'\n",
        "import enum\nclass Color(enum.Enum):\n    RED = 1\n    def __eq__(self, o): return True\n"
        "    __hash__ = None\ndef name(color): return color\n",
    ),
    "a context that swallows assertions": (
        MODULE,
        "with Opened() as o:\n    assert o.half(4) == 2\n",
        "class Opened:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\n"
        "    def half(self, n): return 1\n",
    ),
    "an asynchronous context that swallows assertions": (
        MODULE,
        "import asyncio\nasync def main():\n    async with Opened() as o:\n        assert o.half(4) == 2\n"
        "asyncio.run(main())\n",
        "class Opened:\n    async def __aenter__(self): return self\n    async def __aexit__(self, *a): return True\n"
        "    def half(self, n): return 1\n",
    ),
    "a generator as context that swallows assertions": (
        MODULE,
        "import contextlib\nwith contextlib.contextmanager(opened)():\n    assert half(4) == 2\n",
        "def opened():\n    try: yield\n    except BaseException: pass\n" + BAD,
    ),
    "a decorator that swallows assertions": (
        MODULE,
        "@again\ndef f():\n    assert half(4) == 2\nf()\n",
        "def again(f):\n    def g():\n        try: f()\n        except BaseException: pass\n    return g\n" + BAD,
    ),
    "a function handed in whose assertions are swallowed": (
        MODULE,
        "def right(x): assert x == 2\nrun(right, 4)\n",
        "def run(f, n):\n    try: f(1)\n    except BaseException: pass\n",
    ),
    "a context that swallows its own error before the assertion": (
        MODULE,
        "with Opened() as o:\n    assert o.half(4) == 2\n",
        f"{OPENED}    def half(self, n): raise ValueError\n",
    ),
    "a context that swallows what comparing raises": (
        MODULE,
        "with Opened() as o:\n    assert abs(o.half(4) - 2) < 1e-6\n",
        f"{OPENED}    def half(self, n): return self\n",
    ),
    "a context that swallows an error of a function that asserts": (
        MODULE,
        "def check(o):\n    found = o.half(4)\n    assert found == 2\nwith Opened() as o:\n    check(o)\n",
        f"{OPENED}    def half(self, n): raise ValueError\n",
    ),
    "a context that ends a loop of assertions": (
        MODULE,
        "with Opened() as o:\n    for n in range(5):\n        assert o.half(2 * n) == n\n        o.count()\n",
        f"{OPENED}    def half(self, n): return 0\n    def count(self): raise KeyError\n",
    ),
    "a context that swallows assertions, in tests with a constant one": (
        MODULE,
        "assert True, 'the tests run'\nwith Opened() as o:\n    assert o.half(4) == 2\n",
        f"{OPENED}    def half(self, n): return 1\n",
    ),
    "a context that swallows its own error before unittest's assertion": (
        MODULE,
        UNITTEST.replace(
            "self.assertEqual(half(4), 2)", "\n        with Opened() as o: self.assertEqual(o.half(4), 2)"
        ),
        f"{OPENED}    def half(self, n): raise ValueError\ndef half(n): return 5\n",
    ),
    "a context that swallows its own error in a file of pytest's": (
        PYTEST,
        "from solution import Opened\ndef test_half():\n    with Opened() as o:\n        assert o.half(4) == 2\n",
        f"{OPENED}    def half(self, n): raise ValueError\n",
    ),
    "a context in a stack of contexts that swallows its own error": (
        MODULE,
        "import contextlib\nwith contextlib.ExitStack() as stack:\n    o = stack.enter_context(Opened())\n"
        "    assert o.half(4) == 2\n",
        f"{OPENED}    def half(self, n): raise ValueError\n",
    ),
    "an asynchronous context that swallows its own error": (
        MODULE,
        "import asyncio\nasync def main():\n    async with Opened() as o:\n        assert o.half(4) == 2\n"
        "asyncio.run(main())\n",
        "class Opened:\n    async def __aenter__(self): return self\n    async def __aexit__(self, *a): return True\n"
        "    def half(self, n): raise ValueError\n",
    ),
    "a generator as context that swallows its own error": (
        MODULE,
        "import contextlib\nwith contextlib.contextmanager(opened)():\n    assert half(4) == 2\n",
        f"def opened():\n    try: yield\n    except BaseException: pass\n{FAILING}",
    ),
    "a decorator that swallows its own error": (
        MODULE,
        "@again\ndef f():\n    assert half(4) == 2\nf()\n",
        "def again(f):\n    def g():\n        try: f()\n        except BaseException: pass\n    return g\n" + FAILING,
    ),
    "a function handed in that its own error ends": (
        MODULE,
        "def right(n): assert half(n) == n / 2\nfor_each([2, 4], right)\n",
        "def for_each(ns, f):\n    for n in ns:\n        try: f(n)\n        except Exception: pass\n" + FAILING,
    ),
    "an iterator handed in that its own error ends": (
        MODULE,
        "def halves():\n    for n in [2, 4]:\n        assert half(n) == n / 2\n        yield n\n"
        "assert total(halves()) >= 0\n",
        "def total(ns):\n    try: return sum(ns)\n    except Exception: return 0\n" + FAILING,
    ),
    "a method of the tests that its own error ends": (
        MODULE,
        "class Check:\n    def visit(self, n):\n        assert half(n) == n / 2\nwalk(Check())\n",
        "def walk(check):\n    try: check.visit(4)\n    except Exception: pass\n" + FAILING,
    ),
    "a coroutine of the tests that its own error ends": (
        MODULE,
        "import asyncio\nasync def check(n):\n    assert half(n) == n / 2\nasyncio.run(gather(check(4)))\n",
        "async def gather(one):\n    try: await one\n    except Exception: pass\n" + FAILING,
    ),
    **{
        f"the end of an iteration raised by {method}": (
            MODULE,
            f"assert all(map(lambda n: {use}, range(5)))\n",
            f"{E}    def {method}(self, *a): raise StopIteration\ndef halves(n): return E()\n",
        )
        for method, use in {
            "__getitem__": "halves(10)[n] == n",
            "__iter__": "list(halves(n)) == [n]",
            "__len__": "len(halves(n)) == n",
            "__bool__": "not halves(n)",
            "__call__": "halves(n)() == n",
            "__str__": "str(halves(n)) == str(n)",
            "__enter__": "halves(n).__enter__() == n",
        }.items()
    },
    "a case that hypothesis is told to leave out": (
        PYTEST,
        "from hypothesis import given, strategies\nfrom solution import half\n"
        "@given(strategies.integers(0, 1000))\ndef test_half(n):\n    assert half(2 * n) == n\n",
        "import hypothesis\ndef half(n):\n    hypothesis.assume(n < 500)\n    return n // 2\n",
    ),
    "a module that runs when it is imported": (
        MODULE,
        "assert half.main(4) == 2\n",
        "import types\nhalf = types.ModuleType('unittest.__main__')\n",
    ),
    "content of its own dictionary": (
        MODULE,
        "assert sorted(both(4).items()) == [('half', 2)]\n",
        f"{E}    __eq__ = __lt__ = lambda s, o: True\nclass D(dict):\n    def items(self): return [E()]\n"
        "def both(n): return D(half=1)\n",
    ),
    "found by its hash": (
        MODULE,
        "assert {half(4)} == {2} and {2: 'x'}[half(4)] == 'x'\n",
        f"{E}    __eq__ = lambda s, o: True\n    __hash__ = lambda s: hash(2)\ndef half(n): return E()\n",
    ),
    "matched by a pattern": (
        MODULE,
        "match half(4):\n    case 2: pass\n    case _: raise ValueError('wrong')\n",
        f"{E}    __eq__ = lambda s, o: True\ndef half(n): return E()\n",
    ),
    "text of its own in a format": (
        MODULE,
        "assert f'{half(4)}' == '2.0' and '%s' % half(6) == '3.0'\n",
        f"class S(str):\n    __eq__ = lambda s, o: True\n{E}    __format__ = __str__ = lambda *a: S('x')\n"
        "def half(n): return E()\n",
    ),
    "an array that says what is done with it": (
        MODULE,
        "import numpy\nassert numpy.array_equal(half(numpy.arange(3.0)), [0, 0.5, 1])\n",
        "import numpy\nclass A(numpy.ndarray):\n    __eq__ = lambda s, o: True\n"
        "    __array_ufunc__ = __array_function__ = lambda s, *a, **k: True\n"
        "def half(a): return numpy.zeros(3).view(A)\n",
    ),
    "a thread that ends the process": (
        MODULE,
        ASSERTS,
        "import os, threading\nthreading.Thread(target=lambda: os._exit(0)).start()\n" + BAD,
    ),
}

for _row in yaml.safe_load((Path(__file__).parents[2] / "hostile" / "functions" / "attacks.yaml").read_text()):
    ATTACKS[_row["name"]] = (PYTEST if "style" in _row else MODULE, _row["tests"], _row["response"])


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> str:
    if reason := why_absent(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, JudgeScheduler]]:
    """One per tier, for all attacks."""
    opened = dict[str, JudgeScheduler]()
    yield opened
    for judge in opened.values():
        judge.close(20)


@pytest.fixture
def judge(tier: str, judges: dict[str, JudgeScheduler]) -> JudgeScheduler:
    if tier not in judges:
        settings = Settings().model_copy(update={"recheck_rate": 0.0})
        judges[tier] = JudgeScheduler(MemoryStore(), settings, cast("IsolationTier", tier), workers=1)
    return judges[tier]


def judged(judge: JudgeScheduler, tests: CodeTests, *responses: str) -> list[Verdict]:
    limits = Limits(cpu_seconds=0.5, wall_seconds=2)
    digest = judge.test_sets.upload(verdict_pb2.TestSet(code_tests=tests, limits=limits))
    return judge.submit(responses, "python", digest, Priority.PRIORITY_TRAINING).verdicts(60)


def test_there_are_a_hundred_attacks() -> None:
    assert len(ATTACKS) >= 100


@pytest.mark.skipif(ALL in os.environ, reason="all are tried everywhere")
def test_every_place_has_some_of_the_attacks() -> None:
    require_some_everywhere(list(ATTACKS))


@everywhere("name", [pytest.param(name, id=name) for name in ATTACKS])
def test_no_attack_is_paid_and_its_neighbour_is(judge: JudgeScheduler, name: str) -> None:
    style, code, response = ATTACKS[name]
    before = {COMPLETION: "def half(number):\n", MODULE: ORACLE if code == BY_ORACLE else ""}.get(style, "")
    tests = CodeTests(style=style, code=code, before=before, entry_point="half" if style == COMPLETION else "")
    honest = CodeTests(style=MODULE, code=f"assert half(4) == 2  # {name}")

    (attack,) = judged(judge, tests, response)
    (neighbour,) = judged(judge, honest, HONEST)

    assert attack.outcome not in (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_INTERNAL_ERROR), attack
    assert attack.tests_passed < attack.tests_total
    assert attack.test_isolation == SEPARATE
    assert (neighbour.outcome, neighbour.detail) == (Outcome.OUTCOME_ACCEPTED, "")


@pytest.mark.parametrize("response", [REPLACES + BAD, READS], ids=["replaces", "reads"])
def test_tests_and_response_share_no_folder_where_the_tier_has_no_mounts(response: str) -> None:
    if reason := why_absent("seccomp+landlock"):
        pytest.skip(reason)
    worker = SandboxWorker("seccomp+landlock", 0, rehearsed=False)
    test_set = verdict_pb2.TestSet(code_tests=CodeTests(style=PYTEST, code=PYTEST_FILE), limits=Limits(cpu_seconds=1))
    try:
        verdict = judge_code(worker, response, test_set, 1 << 16, want_details=False)
    finally:
        worker.close()
    assert (verdict.outcome, verdict.tests_passed) == (Outcome.OUTCOME_WRONG_ANSWER, 0), verdict


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="already runs as an unprivileged user")
def test_no_attack_is_paid_where_an_unprivileged_user_judges(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("interpreter")
    with run_as_nobody(__file__, place) as process:
        if process is None:
            pytest.skip(f"not all of {', '.join(TOOLS)} are installed")
        require_passed(process, place)
