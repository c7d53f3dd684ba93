"""Runs a Python program as `python program.py` would, inside a fork: real `__main__`, and an orderly exit."""

from __future__ import annotations

import _thread
import atexit
import builtins
import gc
import io
import os
import sys
import threading
from types import CodeType, ModuleType
from typing import Any, NoReturn

FILE_NAME = "program.py"
REHEARSALS = 32
_REHEARSAL = b"""
import sys
from collections import Counter, defaultdict, deque
def solve(count):
    return count if count < 2 else solve(count - 1) + solve(count - 2)
class Point:
    def __init__(self, x, y=0):
        self.x, self.y = x, y
    def __lt__(self, other):
        return self.x < other.x
first, *rest = map(int, input().split())
words = sys.stdin.readline().strip().split(" ")
lines = sys.stdin.read().splitlines()
found, groups, queue = {}, defaultdict(list), deque([first])
for position, word in enumerate(words):
    found[word] = found.get(word, 0) + 1
    groups[len(word)].append(position)
    queue.append(word)
while queue:
    queue.popleft()
squares = [number * number for number in rest if number % 2 == 0]
points = sorted(Point(number) for number in rest)
best = max(rest, key=lambda number: -number)
try:
    found["absent"]
except KeyError:
    seen = set(words) | {"last"}
print(sum(squares) + first, len(lines), min(rest), abs(best), round(first / 3, 2), f"{first:>4}", str(solve(6)))
print(*sorted(seen), sep=", ", end="\\n")
print("\\n".join(str(number) for number, _ in zip(rest, range(9))), "%d %.3f" % (first, 0.5), Counter(words))
sys.stdout.write("{} {}\\n".format(first, "".join(reversed(words[0].upper()))))
"""
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
    sys.setrecursionlimit(1000 + 7)
    sys.set_int_max_str_digits(0)
    return main.__dict__


def input_as_file() -> None:
    """Give this process, and all that fork from it, a standard input that is a file, the rehearsal's: as programs'
    will be, since Python decides about streams when it makes them. For the time before system calls are limited."""
    rehearsal = os.memfd_create("stdin")
    os.pwrite(rehearsal, b"1 2 3 4 5\nto be or not to be\n6\n7\n", 0)
    os.dup2(rehearsal, 0)
    os.close(rehearsal)
    before = sys.stdin
    # As the interpreter makes it: no line ends are translated.
    raw = io.BufferedReader(io.FileIO(0, closefd=False))
    stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, newline="\n")
    stream.buffer.raw.name = "<stdin>"
    stream.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stream  # type: ignore[misc]


def rehearse() -> None:
    """Run an ordinary program until nothing in the interpreter that it uses changes any more; after `input_as_file`.

    Method caches, specialised bytecode and versions are filled in where they lie, and would be by every single child:
    each such page is a copy. Must not be called with a program's namespace, nor after one has run.
    """
    streams = sys.stdin, sys.stdout
    code = compile_program(_REHEARSAL)
    for _ in range(REHEARSALS):
        os.lseek(0, 0, os.SEEK_SET)
        with open(os.dup(0)) as sys.stdin, open(os.devnull, "w") as sys.stdout:
            namespace = {"__name__": "__main__", "__builtins__": builtins}
            if _execute(code, namespace) or _shut_down(0, namespace):
                raise RuntimeError("the rehearsal failed")
    sys.stdin, sys.stdout = streams


def run(code: CodeType, namespace: dict[str, Any]) -> NoReturn:
    """Run the program to its exit, as the interpreter would; the process ends here."""
    status = 1
    try:
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
