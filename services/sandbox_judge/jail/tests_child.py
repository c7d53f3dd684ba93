"""Runs the tests of a response in a process of their own: only tests that ran through can sign.

The response is in another process (`response_child.py`), and its names stand for it here (`proxies.py`). Tests that
need its very objects run in one interpreter with it (`shared_child.py`). When the tests are through, the proof is
written to standard output and the process ends at once: an exit before that, of whatever status, signs nothing.
"""

from __future__ import annotations

import ast
import builtins
import opcode
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NoReturn

from services.sandbox_judge.jail import loading, running, shared_child
from services.sandbox_judge.jail.loading import COMPLETION, PYTEST, UNCOMPILABLE, Names, Sent
from services.sandbox_judge.jail.proxies import Remote, forget
from services.sandbox_judge.jail.wire import Codec, Foreign, Link

LINK = 4
# Proxies, and calls within calls, take more frames than a program's own.
_RECURSION = 5000
_REHEARSALS = 16
# A function that only returns None is no longer in bytecode.
_STUB_BYTES = 8
# More of them take more than a byte in bytecode.
_MOST_SHORT_NAMES = 256
# Tests that use these may look for any name.
_REACHING = frozenset({"globals", "eval", "exec", "vars", "locals"})
_exit, _exec = os._exit, exec


def run() -> NoReturn:
    """Run the tests, say how it went; the process ends here."""
    status = running.FAILED
    try:
        sent = loading.received()
        status = shared_child.judge(sent) if sent["shared"] else _judge(sent, Link(LINK))
    finally:
        _exit(status)


def rehearse() -> None:
    """Do in the zygote what every fork would do for the first time: the parser's own types above all."""
    before = "from typing import List\n\ndef f(x: List[int]):\n    pass\n"
    for _ in range(_REHEARSALS):
        remote = Remote(Link(-1))
        tests = _Tests(COMPLETION, before, "def check(c):\n    assert c(1) == [2]\ncheck(f)\n", "f")
        answer = Codec().dumps(("return", ("loaded", (("f", None),)), (), "noise"))
        assert remote.loads(answer)
        remote.dumps(("load", tests.wanted, "f"))
        remote.dumps(("call", 1, ([2, "a"],), {}))
        sys.setrecursionlimit(_RECURSION)
        loading.sources(COMPLETION, before, "    return [x]\n", "f")
    forget()


def _judge(sent: Sent, link: Link) -> int:
    sys.setrecursionlimit(_RECURSION)
    nonce, entry_point = sent["nonce"], sent["entry_point"]
    try:
        tests = _Tests(sent["style"], sent["before"], sent["code"], entry_point)
    except UNCOMPILABLE as error:
        running.report(nonce, f"broken {type(error).__name__}: {error}")
        return running.FAILED
    remote = Remote(link)
    remote.kept, remote.named = tests.bound, tests.named()
    try:
        found, *rest = remote.request("load", tests.wanted, entry_point)
        if found == "no program":
            running.say(str(rest[0]))
            return running.NOT_A_PROGRAM
        if found == "missing":
            running.say(f"the response does not define {entry_point}")
            return running.WRONG
        outcome = tests.run(dict(rest[0]), remote)
    except BaseException as error:
        return running.explained(error)
    running.report(nonce, outcome)
    return 0


class _Tests:
    """Tests and what they have themselves: the names that they bind, and those that stand before the response."""

    def __init__(self, style: int, before: str, code: str, entry_point: str) -> None:
        self._style, self._source, self._entry_point = style, code, entry_point
        self._trusted = dict(builtins.__dict__)
        self._code = running.compiled(code, running.TESTS_FILE)
        self._scope: Names = {"__builtins__": dict(self._trusted), "__name__": "tests"}
        self._classes: set[str] = set()
        names = set() if style == PYTEST else _names_in(self._code)
        # Most tests know all that they need but the function.
        if style != PYTEST and before and (_REACHING & names or set(self._lacking(names)) - _stored(self._code)):
            names |= self._begin(before)
        names |= {entry_point} if entry_point else set()
        self.wanted = None if names & _REACHING else self._lacking(names)
        self.bound = frozenset[str]()
        if style == PYTEST:
            self.bound = frozenset(_bound(ast.parse(code)) | self._trusted.keys()) - {entry_point}

    def _begin(self, before: str) -> set[str]:
        """Execute what stands before the response; of that, what the response does not have to define."""
        code = loading.begun(before)
        for part in code:
            try:
                _exec(part, self._scope)
            except Exception:
                break
        for name, value in list(self._scope.items()):
            mine = getattr(value, "__module__", None) == "tests"
            if mine and isinstance(value, type):
                self._classes.add(name)
            if name == self._entry_point or (mine and (isinstance(value, type) or _is_stub(value))):
                del self._scope[name]
        return set().union(*map(_names_in, code))

    def _lacking(self, names: set[str]) -> tuple[str, ...]:
        own = self._scope.keys() | (self._trusted.keys() - {self._entry_point})
        return tuple(sorted(name for name in names if name not in own and not name.startswith("__")))

    def named(self) -> frozenset[str]:
        """Classes of the response that are tested themselves: their names are words of the tests.

        A name counts that the tests take from the response, and that begins as the names of classes do.
        """
        if self._style != PYTEST and not (self.wanted is None or any(name[:1].isupper() for name in self.wanted)):
            return frozenset(self._classes)
        tree = ast.parse(self._source)
        if self._style == PYTEST:
            names = set(_taken(tree))
        else:
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _bound(tree)
        return frozenset(name for name in names if name[:1].isupper()) - self._trusted.keys() | self._classes

    def run(self, names: Names, remote: Remote) -> str:
        """Run them with what the response defines; what to say of them."""
        sys.modules["solution"] = remote.module
        if self._style == PYTEST:
            return running.pytest_file(self._source, self._trusted)(names)
        own = self._scope.keys() | (self._trusted.keys() - {self._entry_point})
        self._scope.update((name, value) for name, value in names.items() if name not in own)
        return running.asserts(self._code)(self._scope)


def _names_in(code: CodeType) -> set[str]:
    """All names that some code may look for."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _stored(code: CodeType) -> set[str]:
    """Names that the tests bind at their outermost level, without parsing them once more; none where they have many."""
    if len(code.co_names) > _MOST_SHORT_NAMES:
        return set()
    steps = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    return {code.co_names[name] for step, name in steps if step == opcode.opmap["STORE_NAME"]}


def _bound(tree: ast.Module) -> set[str]:
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


def _taken(tree: ast.Module) -> Iterator[str]:
    """What a file takes from the module `solution`."""
    aliases = {"solution"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            yield from (alias.name for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                loaded = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
                yield from loaded - _bound(tree)
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "solution" and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield node.attr


def _is_stub(value: Foreign) -> bool:
    """Whether a function that stands before the response is left for it to write: it does nothing yet."""
    if not isinstance(value, FunctionType):
        return False
    code = value.__code__
    if code.co_names:
        return code.co_names == ("NotImplementedError",)
    return len(code.co_code) <= _STUB_BYTES and code.co_consts in ((None,), (value.__doc__, None))
