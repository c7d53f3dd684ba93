"""Runs a response and its tests in one interpreter, where tests need the very objects of the response.

A response can find its way to tests that share its memory. It is made as hard as it can be, and the verdict says
`shared`: what the tests import is imported before the response's first line and put back after it, in modules and in
their classes; there is no ctypes, nothing that pytest reads from files or the environment, and no test left out counts.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from services.sandbox_judge.jail import loading, running
from services.sandbox_judge.jail.loading import PYTEST, UNCOMPILABLE, Names, Sent
from services.sandbox_judge.jail.wire import Foreign

_NO_MODULES = ("ctypes", "_ctypes")
# Whose classes are put back attribute by attribute, beside the names of every module.
_RUNNERS = ("_pytest", "decimal", "fractions", "pluggy", "pytest", "unittest")
_exec = exec


def judge(sent: Sent) -> int:
    """Run both; the exit status."""
    trusted = dict(builtins.__dict__)
    try:
        tests = _tests(sent, trusted)
    except UNCOMPILABLE as error:
        running.report(sent["nonce"], f"broken {type(error).__name__}: {error}")
        return running.FAILED
    module = ModuleType("solution")
    module.__file__ = loading.RESPONSE_FILE
    sys.modules["solution"] = module
    entry_point = sent["entry_point"]
    try:
        parts = loading.sources(sent["style"], sent["before"], sent["response"], entry_point)
    except UNCOMPILABLE as error:
        running.say(f"{type(error).__name__}: {error}")
        return running.NOT_A_PROGRAM
    kept = _Kept(trusted)
    # No closure of the response may find it in a frame below.
    nonce, sent = sent["nonce"], {}
    try:
        for part in parts:
            _exec(part, module.__dict__)
        if entry_point and entry_point not in module.__dict__:
            running.say(f"the response does not define {entry_point}")
            return running.WRONG
        kept.put_back()
        outcome = tests(_scope(module, trusted, entry_point))
    except BaseException as error:
        return running.explained(error)
    running.report(nonce, outcome)
    return 0


def _tests(sent: Sent, trusted: Names) -> running.Tests:
    """The tests, with what they import imported and ctypes out of reach."""
    code = running.compiled(sent["code"], running.TESTS_FILE)
    for name in _imported(sent["code"]):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    tests = running.pytest_file(sent["code"], trusted) if sent["style"] == PYTEST else running.asserts(code)
    for name in _NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    return tests


def _imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


class _Kept:
    """What modules held before the response."""

    def __init__(self, trusted: Names) -> None:
        self._modules = {name: module for name, module in sys.modules.items() if name != "solution"}
        self._finders = list(sys.meta_path), list(sys.path_hooks), list(sys.path)
        self._spaces: list[tuple[Foreign, Names]] = [(vars(builtins), trusted)]
        for name, module in self._modules.items():
            if not isinstance(module, ModuleType):
                continue
            self._spaces.append((vars(module), dict(vars(module))))
            if name.split(".")[0] in _RUNNERS:
                classes = {each for each in vars(module).values() if isinstance(each, type)}
                self._spaces += [(each, dict(vars(each))) for each in classes if each.__flags__ & 1 << 9]

    def put_back(self) -> None:
        """Undo what the response has replaced."""
        sys.settrace(None)
        sys.setprofile(None)
        sys.meta_path[:], sys.path_hooks[:], sys.path[:] = self._finders
        sys.path_importer_cache.clear()
        for name in [name for name, module in sys.modules.items() if name != "solution"]:
            if name in self._modules and sys.modules[name] is not self._modules[name]:
                sys.modules[name] = self._modules[name]
        sys.modules.update({name: module for name, module in self._modules.items() if name not in sys.modules})
        for name in [name for name in os.environ if name.startswith("PYTEST")]:
            del os.environ[name]
        for space, before in self._spaces:
            _put_back(space, before)


def _put_back(space: Foreign, before: Names) -> None:
    """Name by name: to write the whole of it would cost a copy of every page that it lies in."""
    names: Foreign = space if isinstance(space, dict) else vars(space)
    for name in [name for name in names if name not in before]:
        _without(space, name)
    for name, value in before.items():
        if names.get(name) is value:
            continue
        if isinstance(space, dict):
            space[name] = value
        else:
            with contextlib.suppress(AttributeError, TypeError):
                type.__setattr__(space, name, value)


def _without(space: Foreign, name: str) -> None:
    if isinstance(space, dict):
        del space[name]
    else:
        with contextlib.suppress(AttributeError, TypeError):
            type.__delattr__(space, name)


def _scope(module: ModuleType, trusted: Names, entry_point: str) -> Names:
    """The names that tests see: those of the response, and the builtins as they were before it."""
    names = {name: value for name, value in module.__dict__.items() if name not in trusted or name == entry_point}
    return {**names, "__builtins__": dict(trusted), "__name__": "tests"}
