"""Runs a response and then the tests that people wrote for it, inside a fork: only tests that ran through can sign.

What the judge sends is read and closed before the response's first line. When the tests are through, the proof is
written to standard output and the process ends at once: an exit before that, of whatever status, signs nothing.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import marshal
import os
import sys
import textwrap
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    import pytest

MODULE, COMPLETION, PYTEST = 1, 2, 3
# Exit statuses beside the proof: hints for people, nothing depends on them.
NOT_A_PROGRAM, FAILED, WRONG, ENDED = 12, 1, 10, 0
RESPONSE_FILE, TESTS_FILE, PYTEST_FILE = "solution.py", "tests.py", "test_solution.py"
PAYLOAD = 3
_REHEARSALS = 16
_PROTECTED = [
    "math",
    "cmath",
    "operator",
    "copy",
    "random",
    "re",
    "itertools",
    "functools",
    "collections",
    "string",
    "statistics",
    "json",
    "os",
]
# What the judge sends, and what a module holds.
Sent = dict[str, Any]
Names = dict[str, object]
# Taken now: the response may have replaced them by the time they are needed.
_exit, _write, _compile, _exec = os._exit, os.write, compile, exec


def received() -> Sent:
    """What the judge has sent at descriptor 3, a sealed file that is closed again."""
    chunks, place = [], 0
    while chunk := os.pread(PAYLOAD, 1 << 20, place):
        chunks.append(chunk)
        place += len(chunk)
    os.close(PAYLOAD)
    payload: Sent = marshal.loads(b"".join(chunks))
    return payload


def proof_of(nonce: bytes) -> bytes:
    """What stands for a nonce in a report; the nonce itself, found somewhere and printed, is no proof."""
    return bytes(255 - byte for byte in nonce)


def run() -> NoReturn:
    """Load the response, run the tests, say how it went; the process ends here."""
    status = FAILED
    try:
        status = _judge(received())
    finally:
        _exit(status)


def rehearse() -> None:
    """Do in the zygote what every fork would do for the first time: the parser's own types above all."""
    for _ in range(_REHEARSALS):
        parts = _sources(COMPLETION, "def f(x):\n    pass\n", "def f(x):\n    return x\n", "f")
        module = ModuleType("solution")
        trusted = dict(builtins.__dict__)
        kept = {name: dict(vars(sys.modules[name])) for name in _PROTECTED if name in sys.modules}
        for part in [*parts, _continued("def g(x):\n", "    return [x]")]:
            _exec(part, module.__dict__)
        _restore(trusted, kept)
        code = _compile("assert f(1) == 1 and g(2) == [2]\n", TESTS_FILE, "exec", dont_inherit=True, optimize=0)
        _asserts(code)(_scope(module, trusted, "f"))


def _judge(sent: Sent) -> int:
    nonce, entry_point = sent["nonce"], sent["entry_point"]

    def report(text: str) -> None:
        _flush()
        _write(1, b"\n" + proof_of(nonce) + text.encode(errors="replace")[:1000])

    trusted = dict(builtins.__dict__)
    kept = {name: dict(vars(sys.modules[name])) for name in _PROTECTED if name in sys.modules}
    tests: Callable[[Names], str]
    if sent["style"] == PYTEST:
        tests = _pytest(sent["code"], trusted)
    else:
        try:
            tests = _asserts(_compile(sent["code"], TESTS_FILE, "exec", dont_inherit=True, optimize=0))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report(f"broken {type(error).__name__}: {error}")
            return FAILED
        linecache.cache[TESTS_FILE] = (len(sent["code"]), None, sent["code"].splitlines(keepends=True), TESTS_FILE)
    module = ModuleType("solution")
    module.__file__ = RESPONSE_FILE
    sys.modules["solution"] = module
    try:
        parts = _sources(sent["style"], sent["before"], sent["response"], entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _say(f"{type(error).__name__}: {error}")
        return NOT_A_PROGRAM
    try:
        for part in parts:
            _exec(part, module.__dict__)
        if entry_point and entry_point not in module.__dict__:
            _say(f"the response does not define {entry_point}")
            return WRONG
        _restore(trusted, kept)
        outcome = tests(_scope(module, trusted, entry_point))
    except BaseException as error:
        return _explained(error)
    report(outcome)
    return 0


def _sources(style: int, before: str, response: str, entry_point: str) -> list[CodeType]:
    """What is executed, in order. Raises SyntaxError where it is no program."""
    if style == PYTEST:
        return [_compiled(response)]
    if style == COMPLETION and not _defines(response, entry_point):
        return [_continued(before, response)]
    if style == COMPLETION:
        # The function anew: what stands before it still brings the imports and helpers.
        return [*_begun(before), _compiled(response)]
    return [_compiled(f"{before}\n{response}" if before else response)]


def _compiled(source: str) -> CodeType:
    code: CodeType = _compile(source, RESPONSE_FILE, "exec", dont_inherit=True, optimize=0)
    return code


def _defines(response: str, entry_point: str) -> bool:
    try:
        body = ast.parse(response).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in body if isinstance(node, kinds)}
    return entry_point in names if entry_point else bool(names)


def _begun(before: str) -> list[CodeType]:
    """The beginning by itself, a function without its body; nothing where that is no program."""
    for body in ("", f"\n{_indentation(before)}pass\n", "\n    pass\n"):
        try:
            return [_compiled(before + body)]
        except SyntaxError:
            continue
    return []


def _continued(before: str, response: str) -> CodeType:
    """The response goes on where `before` ends; models often leave out the first line's indentation, or all of it."""
    indentation = _indentation(before)
    indented = textwrap.indent(response, indentation)
    fault: SyntaxError | None = None
    for text in (response, indentation + response.lstrip(" \t"), indented, f"\n{response}", f"\n{indented}"):
        try:
            return _compiled(before + text)
        except SyntaxError as error:
            fault = fault or error
    raise fault or SyntaxError("no program")


def _indentation(before: str) -> str:
    """That of the last line which has any, else four spaces."""
    for line in reversed(before.splitlines()):
        if line.strip() and line[0] in " \t":
            return line[: len(line) - len(line.lstrip())]
    return "    "


def _scope(module: ModuleType, trusted: Names, entry_point: str) -> Names:
    """The names that tests see: those of the response, and the builtins as they were before it."""
    names = {name: value for name, value in module.__dict__.items() if name not in trusted or name == entry_point}
    return {**names, "__builtins__": dict(trusted), "__name__": "tests"}


def _restore(trusted: Names, kept: dict[str, Names]) -> None:
    """Undo what the response has replaced in modules that tests and this one use."""
    sys.settrace(None)
    sys.setprofile(None)
    for namespace, before in [(builtins.__dict__, trusted), *((vars(sys.modules[name]), kept[name]) for name in kept)]:
        # Name by name: to write the whole of it would cost a copy of every page that it lies in.
        for name in [name for name in namespace if name not in before]:
            del namespace[name]
        for name, value in before.items():
            if namespace.get(name) is not value:
                namespace[name] = value


def _asserts(code: CodeType) -> Callable[[Names], str]:
    def tests(scope: Names) -> str:
        _exec(code, scope)
        return "passed 1 1"

    return tests


def _pytest(code: str, trusted: Names) -> Callable[[Names], str]:
    import pytest
    from _pytest.assertion.rewrite import AssertionRewritingHook

    def module_of(_: object, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__builtins__"] = dict(trusted)
        return module

    AssertionRewritingHook.create_module = module_of  # type: ignore[assignment, method-assign]

    main = pytest.main

    class Count:
        """Every collected test has to pass; a skip counts only where a mark of the test says so."""

        def __init__(self) -> None:
            self.passed = self.total = 0
            self.fault = ""
            self.marked: set[str] = set()

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            # From here on the file would only serve a response that looks for it.
            os.unlink(PYTEST_FILE)
            marks = ("skip", "skipif")
            self.marked = {item.nodeid for item in session.items if any(map(item.get_closest_marker, marks))}

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                self.total += 1
                self.fault = self.fault or report.longreprtext[-600:]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.failed or report.skipped:
                if report.skipped and report.when == "setup" and report.nodeid in self.marked:
                    return
                self.total += 1
                self.passed += report.passed
                self.fault = self.fault or ("" if report.passed else f"{report.nodeid}: {report.longreprtext[-600:]}")

    def tests(_: Names) -> str:
        with open(PYTEST_FILE, "w", encoding="utf-8") as file:
            file.write(code)
        count, here = Count(), os.getcwd()
        options = [
            "-q",
            "-c",
            os.devnull,
            f"--rootdir={here}",
            f"--confcutdir={here}",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
        ]
        main([*options, "-p", "no:faulthandler", PYTEST_FILE], plugins=[count])
        _say(count.fault)
        return f"passed {count.passed} {max(count.total, 1)}"

    return tests


def _explained(error: BaseException) -> int:
    """Say on standard error what went wrong and in which line of the tests; the exit status for it."""
    place, innermost, trace = "", False, error.__traceback__
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename == TESTS_FILE
        if innermost:
            place = f"tests, line {trace.tb_lineno}: {linecache.getline(TESTS_FILE, trace.tb_lineno).strip()[:200]}: "
        trace = trace.tb_next
    if isinstance(error, SystemExit):
        _say(f"{place}the response ended the process")
        return ENDED
    try:
        text = str(error)
    except BaseException:
        text = ""
    _say(f"{place}{type(error).__name__}: {text[:200]}".removesuffix(": "))
    return WRONG if innermost and isinstance(error, AssertionError) else FAILED


def _say(text: str) -> None:
    _flush()
    if text:
        _write(2, text.encode(errors="replace"))


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BaseException:
        return
