"""Functions with hidden asserts and files of pytest's: what passes, what fails, and what tries to fake it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.errors import InvalidInput
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, Limits, Outcome, TestIsolation, Verdict

MODULE = CodeTestStyle.CODE_TEST_STYLE_MODULE
COMPLETION = CodeTestStyle.CODE_TEST_STYLE_COMPLETION
PYTEST = CodeTestStyle.CODE_TEST_STYLE_PYTEST
BEFORE = 'import math\n\ndef half(number):\n    """Half of a number."""\n'
ASSERTS = "assert half(4) == 2\nassert all(half(2 * n) == n for n in range(5))\nassert math.floor(half(5)) == 2\n"


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    scheduler = JudgeScheduler(MemoryStore(), settings, choose_tier(settings), workers=1)
    yield scheduler
    scheduler.close(20)


def judged(judge: JudgeScheduler, tests: CodeTests, *responses: str, language: str = "python") -> list[Verdict]:
    digest = judge.test_sets.upload(verdict_pb2.TestSet(code_tests=tests, limits=Limits(cpu_seconds=1, wall_seconds=3)))
    return judge.submit(responses, language, digest, Priority.PRIORITY_TRAINING).verdicts(120)


def outcome_of(verdict: Verdict) -> str:
    return Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower()


@pytest.mark.parametrize(
    ("style", "response"),
    [
        (COMPLETION, "    return number / 2\n"),
        (COMPLETION, "return number / 2"),
        (COMPLETION, "if number:\n    return number / 2\nreturn 0"),
        (COMPLETION, "    result = number / 2\n    return result\n\ndef other():\n    pass\n"),
        (COMPLETION, "def half(number):\n    return math.fsum([number]) / 2\n"),
        (
            COMPLETION,
            "import operator\n\ndef helper(n):\n    return operator.truediv(n, 2)\n\n"
            "def half(number):\n    return helper(number)",
        ),
        (MODULE, "def half(number):\n    print('noise')\n    return number / 2\n"),
        (MODULE, "def all(numbers):\n    return False\n\ndef half(number):\n    return number / 2\n"),
        (MODULE, "if __name__ == '__main__':\n    input()\nhalf = lambda number: number / 2\n"),
    ],
)
def test_a_right_function_passes(judge: JudgeScheduler, style: CodeTestStyle.ValueType, response: str) -> None:
    before = BEFORE if style == COMPLETION else "import math\n"

    (verdict,) = judged(judge, CodeTests(style=style, before=before, code=ASSERTS, entry_point="half"), response)

    assert (outcome_of(verdict), verdict.detail) == ("accepted", "")
    assert (verdict.tests_passed, verdict.tests_total) == (1, 1)
    assert verdict.judge_version
    assert verdict.isolation


@pytest.mark.parametrize(
    ("response", "outcome", "detail"),
    [
        ("def half(number):\n    return number", "wrong_answer", "tests, line 1: assert half(4) == 2: AssertionError"),
        ("def half(number):\n    return None", "wrong_answer", "AssertionError"),
        ("def half(number):\n    raise KeyError(7)", "runtime_error", "line 1: assert half(4) == 2: KeyError: 7"),
        ("def half(number)\n    return 1", "compile_error", "SyntaxError"),
        ("def third(number):\n    return 1", "wrong_answer", "does not define half"),
        ("def half(number):\n    while True: pass", "cpu_time_limit", ""),
        ("half = [0] * (1 << 31)", "memory_limit", "MemoryError"),
        ("", "wrong_answer", "does not define half"),
        ("\x00", "compile_error", "null bytes"),
        ("(" * 5000, "compile_error", ""),
    ],
)
def test_a_wrong_function_fails_with_the_line(judge: JudgeScheduler, response: str, outcome: str, detail: str) -> None:
    (verdict,) = judged(
        judge, CodeTests(style=MODULE, code=ASSERTS, before="import math\n", entry_point="half"), response
    )

    assert (outcome_of(verdict), verdict.tests_passed) == (outcome, 0)
    assert detail in verdict.detail


EXITS = ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()", "import os; os.abort()"]
HOSTILE = {
    **{f"at load: {text}": f"{text}\ndef half(number): return 1" for text in EXITS},
    **{f"in the call: {text}": f"def half(number):\n    {text}" for text in EXITS},
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef half(number): raise ValueError",
    "a thread that exits": """
import os, threading
threading.Thread(target=lambda: os._exit(0)).start()
def half(number):
    while True: pass
""",
    "builtins replaced": """
import builtins
for name in ("all", "any", "AssertionError", "BaseException", "compile", "exec"):
    setattr(builtins, name, lambda *a, **k: True)
def half(number): return 2
""",
    "builtins replaced in the call": """
def half(number):
    import builtins
    builtins.all = lambda *a: True
    return 2
""",
    "modules replaced": """
import math, os
math.floor = lambda x: 2
os._exit = os.write = lambda *a: None
def half(number): return number / 2 if number != 5 else 99
""",
    "names of the tests shadowed": "def all(x): return True\ndef range(x): return []\ndef half(number): return 2",
    "a trace function": """
import sys
def skip(frame, event, arg):
    return None
sys.settrace(skip); sys.setprofile(skip)
def half(number): return 3
""",
    "assertions off": "import sys\nsys.flags = type('F', (), {'optimize': 2})\ndef half(number): return 3",
    "prints what a pass would say": """
import os
os.write(1, b"\\npassed 1 1"); print("passed 1 1")
def half(number): return 3
""",
    "reads the descriptors": """
import os
for number in range(3, 62):
    try:
        found = os.read(number, 1 << 16)
        os.write(1, b"\\n" + found + b"passed 1 1")
    except OSError:
        pass
def half(number): os._exit(0)
""",
    "prints all that the frames know": """
import os, sys
def half(number):
    frame = sys._getframe()
    while frame:
        for found in list(frame.f_locals.values()):
            if isinstance(found, dict):
                for inner in list(found.values()):
                    if isinstance(inner, bytes):
                        os.write(1, b"\\n" + inner + b"passed 1 1")
            if isinstance(found, bytes):
                os.write(1, b"\\n" + found + b"passed 1 1")
        frame = frame.f_back
    os._exit(0)
""",
    "looks for the tests in the files": """
import glob, os
seen = [path for folder in ("/tmp", ".") for path in glob.glob(folder + "/**", recursive=True) if path.endswith(".py")]
seen += [path for path in os.listdir("/proc/self/fd") if 2 < int(path) < 60 and os.path.exists("/proc/self/fd/" + path)]
def half(number):
    if not seen:
        raise LookupError("no tests to read")
    return 3
""",
    "blames the tests": "import os\nos.write(1, b'broken x')\nos._exit(13)",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("style", [MODULE, PYTEST])
def test_success_cannot_be_faked(judge: JudgeScheduler, name: str, style: CodeTestStyle.ValueType) -> None:
    code = ASSERTS
    if style == PYTEST:
        code = "import math\nfrom solution import half\n\ndef test_half():\n" + "".join(
            f"    {line}\n" for line in ASSERTS.splitlines()
        )
    before = "import math\n" if style == MODULE else ""

    (verdict,) = judged(judge, CodeTests(style=style, before=before, code=code, entry_point="half"), HOSTILE[name])

    assert outcome_of(verdict) not in ("accepted", "internal_error"), verdict
    assert not verdict.tests_passed


FILE = """
import pytest
from solution import half

@pytest.mark.parametrize("number", [2, 4, 6])
def test_even(number):
    assert half(number) == number / 2

def test_zero():
    assert half(0) == 0

@pytest.mark.skip(reason="not here")
def test_odd():
    assert False
"""


@pytest.mark.parametrize(
    ("response", "outcome", "passed", "total", "detail"),
    [
        ("def half(n):\n    return n / 2", "accepted", 4, 4, ""),
        ("def half(n):\n    return n / 2 if n < 5 else 0", "wrong_answer", 3, 4, "test_even[6]"),
        ("import pytest\ndef half(n):\n    pytest.skip('no')", "wrong_answer", 0, 4, "Skipped"),
        ("import pytest\ndef half(n):\n    pytest.xfail('no')", "wrong_answer", 0, 4, ""),
        ("import pytest\ndef half(n):\n    pytest.exit('no', returncode=0)", "wrong_answer", 0, 4, ""),
        ("def third(n):\n    return 1", "wrong_answer", 0, 1, "cannot import name 'half'"),
        ("import os\nos.remove('test_solution.py')", "runtime_error", 0, 1, "FileNotFoundError"),
    ],
)
def test_every_test_of_a_pytest_file_has_to_pass(
    judge: JudgeScheduler, response: str, outcome: str, passed: int, total: int, detail: str
) -> None:
    (verdict,) = judged(judge, CodeTests(style=PYTEST, code=FILE), response)

    assert (outcome_of(verdict), verdict.tests_passed, verdict.tests_total) == (outcome, passed, total), verdict
    assert detail in verdict.detail


def test_tests_that_are_no_program_are_nobodys_wrong_answer_and_are_not_remembered(judge: JudgeScheduler) -> None:
    tests = CodeTests(style=MODULE, code="assert (", entry_point="half")

    first, again = (judged(judge, tests, "def half(n): return n")[0] for _ in range(2))

    assert outcome_of(first) == outcome_of(again) == "internal_error"
    assert first.test_isolation == TestIsolation.TEST_ISOLATION_SEPARATE
    assert first.detail.startswith("the tests are no program: SyntaxError")
    assert not again.cached


def test_responses_leave_nothing_to_the_next(judge: JudgeScheduler) -> None:
    left = "import builtins, os\nbuiltins.half = 1\nopen('left.py', 'w').close()\ndef half(n): return n / 2"
    look = (
        "import builtins, os\nassert not hasattr(builtins, 'half') and not os.listdir('.')\ndef half(n): return n / 2"
    )

    verdicts = judged(judge, CodeTests(style=MODULE, before="import math", code=ASSERTS), left, look)

    assert [outcome_of(verdict) for verdict in verdicts] == ["accepted", "accepted"], verdicts


@pytest.mark.parametrize(
    ("tests", "pointer"),
    [
        (CodeTests(code="assert f()"), "/code_tests/style"),
        (CodeTests(style=9, code="assert f()"), "/code_tests/style"),  # type: ignore[arg-type]
        (CodeTests(style=MODULE, code=" \n"), "/code_tests/code"),
        (CodeTests(style=MODULE, code="x" * (1 << 20)), "/code_tests/code"),
        (CodeTests(style=COMPLETION, code="f()", entry_point="f"), "/code_tests/before"),
        (CodeTests(style=COMPLETION, before="def f():\n", code="f()"), "/code_tests/entry_point"),
        (CodeTests(style=MODULE, code="f()", entry_point="os.exit()"), "/code_tests/entry_point"),
    ],
)
def test_tests_that_cannot_be_judged_by_are_refused(judge: JudgeScheduler, tests: CodeTests, pointer: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        judge.test_sets.upload(verdict_pb2.TestSet(code_tests=tests))
    assert [violation.pointer for violation in refused.value.violations] == [pointer]
