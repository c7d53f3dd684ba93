"""Runs a Python program as `python program.py` would, inside a fork: real `__main__`, and an orderly exit."""

from __future__ import annotations

import _thread
import atexit
import builtins
import gc
import os
import sys
import threading
from types import CodeType, ModuleType
from typing import Any, NoReturn

FILE_NAME = "program.py"
_exit = os._exit  # the program may have replaced it by the time it is needed


def compile_program(source: bytes) -> CodeType:
    """Bytes, so that coding cookies and byte-order marks mean what they mean in a file."""
    return compile(source, FILE_NAME, "exec", dont_inherit=True)


def prepare() -> dict[str, Any]:
    """Make this process look like a fresh interpreter about to run a program; returns the program's namespace."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=FILE_NAME, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv[:] = [FILE_NAME]
    # The frames below the program must not shorten the recursion it may count on.
    sys.setrecursionlimit(1000 + 12)
    return main.__dict__


def run(code: CodeType, namespace: dict[str, Any]) -> NoReturn:
    """Run the program to its exit, as the interpreter would; the process ends here."""
    status = 1
    try:
        gc.enable()
        status = _execute(code, namespace)
        status = _shut_down(status, namespace)
    finally:
        _exit(status)


def _execute(code: CodeType, namespace: dict[str, Any]) -> int:
    try:
        exec(code, namespace)
    except SystemExit as request:
        return _exit_status(request.code)
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _shut_down(status: int, namespace: dict[str, Any]) -> int:
    """What the interpreter does at its end that a program can see: threads, atexit, flushes, destructors of globals."""
    if _thread._count() or threading._threading_atexits:  # type: ignore[attr-defined]
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    status = _flush(sys.stdout, status)
    _flush(sys.stderr, status)
    for private in (True, False):
        for name in list(namespace):
            if name != "__builtins__" and name.startswith("_") == private:
                namespace[name] = None
    stdout, sys.stdout = sys.stdout, sys.__stdout__
    del stdout
    # What the zygote had is frozen, so the oldest generation is empty unless the program has lived long; only then is
    # it worth a full collection, which costs more than a short program's whole run.
    gc.collect(2 if gc.get_objects(2) else 1)
    return _flush(sys.__stdout__, status)


def _flush(stream: Any, status: int) -> int:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException:
        return 120
    return status
