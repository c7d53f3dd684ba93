"""Tests that people wrote, run to their end: asserts of a module, or a file of pytest's; and how it went in words."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from services.sandbox_judge.jail.loading import Names

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    import pytest

# Exit statuses beside the proof: hints for people, nothing depends on them.
NOT_A_PROGRAM, FAILED, WRONG, ENDED = 12, 1, 10, 0
TESTS_FILE, PYTEST_FILE = "tests.py", "test_solution.py"
# Runs the tests with the names that they see; what it says of them.
Tests = Callable[[Names], str]
# Taken now: a response in the same interpreter may have replaced them by the time they are needed.
_write, _compile, _exec = os.write, compile, exec


def proof_of(nonce: bytes) -> bytes:
    """What stands for a nonce in a report; the nonce itself, found somewhere and printed, is no proof."""
    return bytes(255 - byte for byte in nonce)


def report(nonce: bytes, text: str) -> None:
    """Say what came of the tests, with the proof that they ran."""
    flush()
    _write(1, b"\n" + proof_of(nonce) + text.encode(errors="replace")[:1000])


def compiled(code: str, file: str) -> CodeType:
    """Tests, whose lines can be shown. Raises one of UNCOMPILABLE."""
    found: CodeType = _compile(code, file, "exec", dont_inherit=True, optimize=0)
    show(code, file)
    return found


def show(code: str, file: str) -> None:
    """Let the lines of some code be found, once somebody looks for them."""
    linecache.cache[file] = (lambda: code,)


def asserts(code: CodeType) -> Tests:
    """Tests of a module: right when none of them raises."""

    def tests(scope: Names) -> str:
        _exec(code, scope)
        return "passed 1 1"

    return tests


class _Outcomes:
    """Every collected test has to pass; one that does not run has not, unless a mark of its own says so."""

    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.excused: set[str] = set()
        self._excusable: dict[str, set[str | None]] = {}
        self.broken = 0
        self.fault = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """All that there are, before anybody deselects some."""
        self.collected = {each.nodeid for each in items}
        kinds = {"skip": "skip in setup", "skipif": "skip in setup", "xfail": "xfail"}
        self._excusable = {each.nodeid: {kinds.get(mark.name) for mark in each.iter_markers()} for each in items}

    def pytest_collection_finish(self) -> None:
        """From here on the file would only serve a response that looks for it."""
        os.unlink(PYTEST_FILE)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a test that failed."""
        if report.failed or report.skipped:
            self.broken += 1
            self.fault = self.fault or report.longreprtext[-600:]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test."""
        marks = self._excusable.get(report.nodeid, set())
        if report.passed:
            if report.when == "call":
                self.passed.add(report.nodeid)
        elif report.skipped and ("xfail" if hasattr(report, "wasxfail") else f"skip in {report.when}") in marks:
            self.excused.add(report.nodeid)
        else:
            self.failed.add(report.nodeid)
            self.fault = self.fault or f"{report.nodeid}: {report.longreprtext[-600:]}"

    def text(self) -> str:
        """How many of how many have passed."""
        wanted = self.collected - self.excused
        passed = wanted & self.passed - self.failed
        return f"passed {len(passed)} {max(len(wanted) + self.broken, 1)}"


def pytest_file(code: str, trusted: Names) -> Tests:
    """Tests of a file of pytest's, which sees these builtins."""
    import pytest
    from _pytest.assertion.rewrite import AssertionRewritingHook

    def module_of(_: object, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__builtins__"] = dict(trusted)
        return module

    AssertionRewritingHook.create_module = module_of  # type: ignore[assignment, method-assign]
    main = pytest.main

    def tests(_: Names) -> str:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        with open(PYTEST_FILE, "w", encoding="utf-8") as file:
            file.write(code)
        outcomes, here = _Outcomes(), os.getcwd()
        options = ["-q", "-c", os.devnull, f"--rootdir={here}", f"--confcutdir={here}", "--noconftest"]
        options += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:faulthandler", PYTEST_FILE]
        main(options, plugins=[outcomes])
        say(outcomes.fault)
        return outcomes.text()

    return tests


def explained(error: BaseException) -> int:
    """Say on standard error what went wrong and in which line of the tests; the exit status for it."""
    place, innermost, trace = "", False, error.__traceback__
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename == TESTS_FILE
        if innermost:
            place = f"tests, line {trace.tb_lineno}: {linecache.getline(TESTS_FILE, trace.tb_lineno).strip()[:200]}: "
        trace = trace.tb_next
    if isinstance(error, SystemExit):
        say(f"{place}the response ended the process")
        return ENDED
    try:
        text = str(error)
    except BaseException:
        text = ""
    say(f"{place}{type(error).__name__}: {text[:200]}".removesuffix(": "))
    return WRONG if innermost and isinstance(error, AssertionError) else FAILED


def say(text: str) -> None:
    """Write a text to standard error, after what was printed."""
    flush()
    if text:
        _write(2, text.encode(errors="replace"))


def flush() -> None:
    """Write out what was printed, if that is possible."""
    try:
        sys.stdout.flush()
    except BaseException:
        return
