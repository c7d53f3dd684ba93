"""What the judge sends to a child of the jail, and the parts of which a response's module is made."""

from __future__ import annotations

import _socket as socket  # as the zygote has it
import ast
import builtins
import contextlib
import marshal
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

MODULE, COMPLETION, PYTEST = 1, 2, 3
RESPONSE_FILE = "solution.py"
PAYLOAD = 3
# What nobody can compile raises one of these.
UNCOMPILABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# What the judge sends, and what a module holds.
Sent = dict[str, Any]
Names = dict[str, object]
# What the two sides of a rehearsal are sent.
REHEARSED: Sent = {
    "style": COMPLETION,
    "before": 'from typing import List\n\ndef f(x: List[int], y) -> list:\n    """ Both of them. """\n',
    "response": "    if y == 'raise':\n        raise ValueError('bad')\n    return [x, y]\n",
    "entry_point": "f",
}
_REHEARSALS = 16
# Taken now: the response may have replaced it by the time it is needed.
_compile = compile


def received(descriptor: int = PAYLOAD) -> Sent:
    """What the judge has sent in a sealed file, which is closed again."""
    # As much as there is: a buffer for more would be mapped and unmapped again.
    payload: Sent = marshal.loads(os.pread(descriptor, os.lseek(descriptor, 0, os.SEEK_END), 0))
    os.close(descriptor)
    return payload


def sources(style: int, before: str, response: str, entry_point: str) -> list[CodeType]:
    """What is executed, in order. Raises one of UNCOMPILABLE where it is no program."""
    response = response.removeprefix("\ufeff")
    if style == PYTEST:
        return [_compiled(response)]
    if style == COMPLETION and not _defines(response, entry_point):
        return [continued(before, response)]
    if style == COMPLETION:
        # The function anew: what stands before it still brings the imports and helpers.
        return [*begun(before), _compiled(response)]
    try:
        return [_compiled(f"{before}\n{response}" if before else response)]
    except SyntaxError:
        # An import from the future stands at the beginning of a file.
        if "__future__" not in response:
            raise
        return [_compiled(before), _compiled(response)]


def begun(before: str) -> list[CodeType]:
    """The beginning by itself, a function without its body; nothing where that is no program."""
    for body in ("", f"\n{_indentation(before)}pass\n", "\n    pass\n"):
        try:
            return [_compiled(before + body)]
        except UNCOMPILABLE:
            continue
    return []


def continued(before: str, response: str) -> CodeType:
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


def _compiled(source: str) -> CodeType:
    code: CodeType = _compile(source, RESPONSE_FILE, "exec", dont_inherit=True, optimize=0)
    return code


def _defines(response: str, entry_point: str) -> bool:
    first = response.lstrip("\r\n").partition("\n")[0]
    if first[:1] in (" ", "\t") and first.strip() and not first.strip().startswith("#"):
        return False  # it goes on, as most completions do
    try:
        body = ast.parse(response).body
    except UNCOMPILABLE:
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in body if isinstance(node, kinds)}
    return entry_point in names if entry_point else bool(names)


def _indentation(before: str) -> str:
    """That of the last line which has any, else four spaces."""
    for line in reversed(before.splitlines()):
        if line.strip() and line[0] in " \t":
            return line[: len(line) - len(line.lstrip())]
    return "    "


def rehearse(play: Callable[[int], object], others: Callable[[int], object]) -> None:
    """Play one side of responses and their tests in this process, over sockets, and the other one in a fork.

    Caches, specialised bytecode and versions are then filled in, which every child would do, a copied page each.
    """
    pairs = [[end.detach() for end in socket.socketpair()] for _ in range(_REHEARSALS)]
    pid = os.fork()
    if not pid:
        try:
            _play_all(others, [two[::-1] for two in pairs])
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    _play_all(play, pairs)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the rehearsal failed")


def _play_all(play: Callable[[int], object], pairs: list[list[int]]) -> None:
    for ours, theirs in pairs:
        os.close(theirs)
        with _nothing_kept():
            play(ours)
        os.close(ours)


@contextlib.contextmanager
def _nothing_kept() -> Iterator[None]:
    """Put back what either side changes in a process that is its own."""
    streams, limit, asked = (sys.stdin, sys.stdout, sys.stderr), sys.getrecursionlimit(), builtins.input
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        (sys.stdin, sys.stdout, sys.stderr), builtins.input = streams, asked
        sys.setrecursionlimit(limit)
        sys.modules.pop("solution", None)
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)
