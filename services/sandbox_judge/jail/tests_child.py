"""Runs the tests of a response in a process of their own: only tests that ran through can sign.

The response is in another process (`response_child.py`), and its names stand for it here (`proxies.py`). Tests that
need its very objects run in one interpreter with it. When the tests are through, the proof is written to standard
output and the process ends at once: an exit before that, of whatever status, signs nothing.

A response can find its way to tests that share its memory. It is made as hard as it can be, and the verdict says
`shared`: what the tests import is imported before the response's first line and put back after it, in modules and in
their classes; there is no ctypes, nothing that pytest reads from files or the environment, and no test left out counts.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import marshal
import opcode
import os
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import NoReturn

from services.sandbox_judge.jail import loading, running
from services.sandbox_judge.jail.loading import COMPLETION, PYTEST, UNCOMPILABLE, Names, Sent
from services.sandbox_judge.jail.proxies import Remote, forget
from services.sandbox_judge.jail.source import Source, names_bound, names_taken
from services.sandbox_judge.jail.wire import Foreign, Link

LINK = 4
# Proxies, and calls within calls, take more frames than a program's own.
_RECURSION = 5000
# A function that only returns None is no longer in bytecode.
_STUB_BYTES = 8
# More of them take more than a byte in bytecode.
_MOST_SHORT_NAMES = 256
# Tests that use these may look for any name.
_REACHING = frozenset({"globals", "eval", "exec", "vars", "locals"})
_LOOKING = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"})
# Of tests that share their interpreter with the response: what is out of reach, and whose classes are put back
# attribute by attribute, like the names of every module.
_NO_MODULES = ("ctypes", "_ctypes")
_RUNNERS = ("_pytest", "decimal", "fractions", "pluggy", "pytest", "unittest")
_exit, _exec, _compile = os._exit, exec, compile
_REHEARSAL = """
import math
METADATA = {'author': 'somebody', 'dataset': 'test'}
def check(candidate):
    assert candidate([1.0, 2.5, 3.0], 0.5) == [[1.0, 2.5, 3.0], 0.5], "message"
    assert candidate('some words', ['a', 'b']) == ['some words', ['a', 'b']]
    assert candidate([1, 2, -3, 4, 5, 6, 7, 8, 9, 10], None) == [list(range(1, 11)), None] or True
    assert candidate((1, 'a'), {'k': [1]}) == [(1, 'a'), {'k': [1]}] and not candidate(True, []) == candidate(False, 7)
    assert math.fabs(candidate(1.5, -7)[0] - 1.5) < 1e-6 and candidate(1 << 70, set()) != [0, {1}]
    try:
        candidate(None, 'raise')
    except ValueError as error:
        assert str(error) == 'bad'
check(f)
"""


def run() -> NoReturn:
    """Run the tests, say how it went; the process ends here."""
    status = running.FAILED
    try:
        sent = loading.received()
        status = _judge_shared(sent) if sent["shared"] else _judge(sent, Link(LINK))
    finally:
        _exit(status)


def plan(style: int, before: str, code: str, entry_point: str) -> bytes:
    """What the text of tests alone says, marshalled, so that their process has not to find it out for each response.

    It is for the judge: nothing is executed. Raises one of UNCOMPILABLE.
    """
    tests = _compile(code, running.TESTS_FILE, "exec", dont_inherit=True, optimize=0)
    names, begun = set[str](), list[CodeType]()
    if style != PYTEST:
        names = _names_in(tests)
        # Most tests know all that they need but the function.
        lacking = set(_lacking(names, {}, entry_point)) - _stored(tests) - {entry_point}
        if before and (lacking or _REACHING & names):
            begun = loading.begun(before)
            names = names.union(*map(_names_in, begun))
    names |= {entry_point} if entry_point else set()
    bound, capitals = frozenset[str](), frozenset[str]()
    if style == PYTEST or names & _REACHING or any(_is_class_name(name) for name in names):
        tree = ast.parse(code)
        if style == PYTEST:
            bound = frozenset(names_bound(tree) | vars(builtins).keys()) - {entry_point}
            words = set(names_taken(tree))
        else:
            words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - names_bound(tree)
        capitals = frozenset(filter(_is_class_name, words))
    found = {"tests": tests, "begun": begun, "names": tuple(sorted(names)), "bound": bound, "capitals": capitals}
    return marshal.dumps(found, 2)


def play(descriptor: int) -> None:
    """The tests' side of a rehearsal, over a socket."""
    sent = loading.REHEARSED | {"code": _REHEARSAL, "nonce": b"", "plan": plan(COMPLETION, "", _REHEARSAL, "f")}
    status = _judge(sent, Link(descriptor))
    forget()
    if status:
        raise RuntimeError("the rehearsal of tests failed")


def _judge(sent: Sent, link: Link) -> int:
    sys.setrecursionlimit(_RECURSION)
    nonce, entry_point = sent["nonce"], sent["entry_point"]
    tests = _Tests(sent)
    remote = Remote(link, Source(sent["code"]))
    remote.kept, remote.named = tests.bound, tests.named()
    remote.seeds = "seed(" in sent["code"]
    try:
        found, *rest = remote.request("load", tests.wanted, entry_point)
        if found == "no program":
            running.say(str(rest[0]))
            return running.NOT_A_PROGRAM
        if found == "missing":
            running.say(f"the response does not define {entry_point}")
            return running.WRONG
        outcome = tests.run(dict(rest[0]), remote)
        if lost := [*remote.failures, *remote.untried]:
            raise lost[0]
    except BaseException as error:
        return running.explained(error)
    running.report(nonce, outcome)
    return 0


class _Tests:
    """Tests and what they have themselves: the names that they bind, and those that stand before the response."""

    def __init__(self, sent: Sent) -> None:
        self._style, self._source, self._entry_point = sent["style"], sent["code"], sent["entry_point"]
        planned: Sent = marshal.loads(sent["plan"])
        self._code, self._capitals, self.bound = planned["tests"], planned["capitals"], planned["bound"]
        running.show(self._source, running.TESTS_FILE)
        # The builtins themselves: to copy them would write to the pages of all of them.
        self._scope: Names = {"__builtins__": vars(builtins), "__name__": "tests"}
        self._classes: set[str] = set()
        if planned["begun"]:
            self._begin(planned["begun"])
        names = planned["names"]
        self.wanted = None if not _REACHING.isdisjoint(names) else _lacking(names, self._scope, self._entry_point)

    def _begin(self, code: list[CodeType]) -> None:
        """Execute what stands before the response; of that, what the response does not have to define."""
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

    def named(self) -> frozenset[str]:
        """Classes of the response that are tested themselves: their names are words of the tests.

        A name counts that the tests take from the response, and that begins as the names of classes do.
        """
        takes_class = self._style == PYTEST or self.wanted is None or any(name[:1].isupper() for name in self.wanted)
        return self._capitals | self._classes if takes_class else frozenset(self._classes)

    def run(self, names: Names, remote: Remote) -> str:
        """Run them with what the response defines; what to say of them."""
        sys.modules["solution"] = remote.module
        if self._style == PYTEST:
            return running.pytest_file(self._source, vars(builtins))(names)
        wanted = _lacking(tuple(names), self._scope, self._entry_point, private=True)
        self._scope.update((name, names[name]) for name in wanted)
        return running.asserts(self._code)(self._scope)


def _is_class_name(name: str) -> bool:
    return name[:1].isupper() and name not in vars(builtins)


def _lacking(names: Iterable[str], scope: Names, entry_point: str, *, private: bool = False) -> tuple[str, ...]:
    """Those names that the response has to define, among them private ones where it has."""
    known = vars(builtins)
    return tuple(
        name
        for name in names
        if name not in scope
        and (name not in known or name == entry_point)
        and (private or name == "__all__" or not name.startswith("__"))
    )


def _names_in(code: CodeType) -> set[str]:
    """All names that some code may look for; what it asks of objects is none of them."""
    import dis  # the judge's: nothing of this runs in the jail

    names = {step.argval for step in dis.get_instructions(code) if step.opname in _LOOKING}
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


def _is_stub(value: Foreign) -> bool:
    """Whether a function that stands before the response is left for it to write: it does nothing yet."""
    if not isinstance(value, FunctionType):
        return False
    code = value.__code__
    if code.co_names:
        return code.co_names == ("NotImplementedError",)
    return len(code.co_code) <= _STUB_BYTES and code.co_consts in ((None,), (value.__doc__, None))


def _judge_shared(sent: Sent) -> int:
    """Run response and tests in this interpreter; the exit status."""
    trusted = dict(builtins.__dict__)
    try:
        tests = _shared_tests(sent, trusted)
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
        outcome = tests(_shared_scope(module, trusted, entry_point))
    except BaseException as error:
        return running.explained(error)
    running.report(nonce, outcome)
    return 0


def _shared_tests(sent: Sent, trusted: Names) -> running.Tests:
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


def _shared_scope(module: ModuleType, trusted: Names, entry_point: str) -> Names:
    """The names that tests see: those of the response, and the builtins as they were before it."""
    names = {name: value for name, value in module.__dict__.items() if name not in trusted or name == entry_point}
    return {**names, "__builtins__": dict(trusted), "__name__": "tests"}
