"""What the text of tests says: names they take and bind, and which assertions an error keeps from being tried.

A response that is called by tests, or that tests enter as a context, may swallow what they raise there. That is right
of a response that is to swallow errors, and wrong where assertions are lost with it: those that failed, and those that
come behind the error. Which these are, only the text says. It is parsed when that is first asked: few tests need it.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from types import FrameType, TracebackType

from services.sandbox_judge.jail import running

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CONTEXTS = (ast.With, ast.AsyncWith)
# Calls that assert; `fail` and its like only say that a place is not to be reached.
_ASSERTING = ("assert", "raises", "warns")


class Source:
    """The text of one set of tests."""

    def __init__(self, code: str) -> None:
        self.code = code

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.code)))

    @cached_property
    def looks_at_identity(self) -> bool:
        """Whether tests compare objects by what they are, not only with None and the like."""
        for node in self._nodes:
            if isinstance(node, ast.Compare) and any(isinstance(sign, ast.Is | ast.IsNot) for sign in node.ops):
                if not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators)):
                    return True
            elif (getattr(node, "attr", "") or getattr(node, "id", "")) in ("assertIs", "assertIsNot", "id"):
                return True
        return False

    def is_lost(self, error: BaseException) -> bool:
        """Whether an assertion of the tests that failed is lost with an error that the response may swallow.

        Not where the tests fail on purpose: the assertion is a constant, or they name such errors.
        """
        if not isinstance(error, AssertionError) and type(error).__module__ != "_pytest.outcomes":
            return False
        entries = list(_entries(error.__traceback__))
        if not entries or entries[-1].tb_frame.f_code.co_filename == _PROXIES:
            return False  # the response has raised it
        lines = [entry.tb_lineno for entry in entries if _is_of_tests(entry.tb_frame)]
        return not lines or not self._fails_on_purpose(lines[-1])

    def is_missed(self, error: BaseException) -> bool:
        """Whether an error that the response has swallowed has kept an assertion of the tests from being tried."""
        standing = set(_stack())
        for entry in _entries(error.__traceback__):
            if _is_of_tests(entry.tb_frame) and self._is_behind(entry, standing=entry.tb_frame in standing):
                return True
        return False

    def _fails_on_purpose(self, line: int) -> bool:
        if "AssertionError" in self.code:
            return True
        at = [node for node in self._nodes if isinstance(node, ast.stmt) and _spans(node, line)]
        innermost = max(at, key=lambda node: (node.lineno, node.col_offset), default=None)
        if isinstance(innermost, ast.Assert):
            return _is_constant(innermost.test)
        return isinstance(innermost, ast.Raise) or (
            isinstance(innermost, ast.Expr) and _called(innermost.value) == "fail"
        )

    @cached_property
    def _assertions(self) -> list[int]:
        """The lines of all assertions that may fail."""
        found = []
        for node in self._nodes:
            if isinstance(node, ast.Assert):
                may_fail = not _is_constant(node.test)
            elif isinstance(node, ast.Call):
                may_fail = _called(node).startswith(_ASSERTING)
            else:
                continue
            if may_fail:
                found.append(node.end_lineno or node.lineno)
        return found

    def _is_behind(self, entry: TracebackType, *, standing: bool) -> bool:
        """Whether an assertion stands behind the line of an error: in the `with` statement that it has ended, in a
        frame that goes on, else in the function that it has ended."""
        line, kinds = entry.tb_lineno, _CONTEXTS if standing else _FUNCTIONS
        around = [node for node in self._nodes if isinstance(node, ast.stmt) and _spans(node, line)]
        ended = [node for node in around if isinstance(node, kinds)]
        if standing:
            ended = [each for each in ended if _begins_at(each, entry.tb_frame.f_lineno)] or ended[:1]
        elif entry.tb_frame.f_code.co_name.startswith("<"):
            return False  # a lambda has no statements
        if not ended:
            return False
        whole = ended[0] if standing else ended[-1]
        if any(isinstance(node, ast.Raise) for node in around):
            # On purpose; a function that fails a few times is called again.
            return standing and self._has_assertion(line, _end(whole))
        # The rounds that would have come count as well.
        loops = [node.lineno for node in around if isinstance(node, _LOOPS) and node.lineno >= whole.lineno]
        return self._has_assertion(min([line, *loops]), _end(whole))

    def _has_assertion(self, first: int, last: int) -> bool:
        return any(first <= line <= last for line in self._assertions)


def names_bound(tree: ast.Module) -> set[str]:
    """Names that the tests define, import or set themselves."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "solution":
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def names_taken(tree: ast.Module) -> Iterator[str]:
    """What a file takes from the module `solution`."""
    aliases = {"solution"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            yield from (alias.name for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                loaded = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
                yield from loaded - names_bound(tree)
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "solution" and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield node.attr


_PROXIES = os.path.join(os.path.dirname(__file__), "proxies.py")


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_tests(frame: FrameType) -> bool:
    return os.path.basename(frame.f_code.co_filename) in (running.TESTS_FILE, running.PYTEST_FILE)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= _end(node)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _begins_at(node: ast.stmt, line: int) -> bool:
    """Whether the interpreter says this line while it leaves a `with` statement."""
    return line in {node.lineno, *(item.context_expr.lineno for item in getattr(node, "items", ()))}


def _is_constant(test: ast.expr) -> bool:
    """Whether an assertion has one outcome, whatever the response does."""
    return not any(isinstance(part, ast.Name) for part in ast.walk(test))


def _called(node: ast.AST) -> str:
    """The last word of the name of what is called; '' for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
