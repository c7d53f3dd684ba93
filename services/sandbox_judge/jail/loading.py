"""What the judge sends to a child of the jail, and the parts of which a response's module is made."""

from __future__ import annotations

import ast
import marshal
import os
import textwrap
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
# Taken now: the response may have replaced it by the time it is needed.
_compile = compile


def received() -> Sent:
    """What the judge has sent at descriptor 3, a sealed file that is closed again."""
    chunks, place = [], 0
    while chunk := os.pread(PAYLOAD, 1 << 20, place):
        chunks.append(chunk)
        place += len(chunk)
    os.close(PAYLOAD)
    payload: Sent = marshal.loads(b"".join(chunks))
    return payload


def sources(style: int, before: str, response: str, entry_point: str) -> list[CodeType]:
    """What is executed, in order. Raises one of UNCOMPILABLE where it is no program."""
    if style == PYTEST:
        return [_compiled(response)]
    if style == COMPLETION and not _defines(response, entry_point):
        return [continued(before, response)]
    if style == COMPLETION:
        # The function anew: what stands before it still brings the imports and helpers.
        return [*begun(before), _compiled(response)]
    return [_compiled(f"{before}\n{response}" if before else response)]


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
