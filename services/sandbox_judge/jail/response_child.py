"""Holds a response in a process of its own and does with it what the tests' process asks over a channel.

The response may do here what it likes: whatever it writes to the channel is read there as plain values. It sees the
arguments that the tests pass, never the tests.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Generator, Iterator
from functools import cached_property
from types import CodeType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import NoReturn, cast

from services.sandbox_judge.jail import loading
from services.sandbox_judge.jail.coroutines import ResponseLoop
from services.sandbox_judge.jail.lending import LendingCodec, holders, kept_in
from services.sandbox_judge.jail.wire import (
    FIXED,
    NAMED,
    SPECIAL,
    Codec,
    Foreign,
    Link,
    Uncarriable,
    chance_in,
    differs,
    sow,
)

# What comes from the judge, in place of standard streams, and where the channel stays.
_PAYLOAD, _SENT_LINK, LINK = 0, 1, 3
_PRINTED_TOGETHER = 1 << 16
# Frames below a function of the response: they must not shorten the recursion it may count on.
_FRAMES = 12
_exit, _exec = os._exit, exec
Request = tuple[Foreign, ...]


def run() -> NoReturn:
    """Serve the tests until they are through; the process ends here."""
    try:
        sent = loading.received(_PAYLOAD)
        os.dup2(_SENT_LINK, LINK)
        # What is written past `sys.stdout` is nobody's: the tests could not see it.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in {0, 1, 2} - {nowhere}:
            os.dup2(nowhere, descriptor)
        sys.setrecursionlimit(1000 + _FRAMES)
        _Host(Link(LINK), sent).serve()
    finally:
        _exit(0)


def play(descriptor: int) -> None:
    """The response's side of a rehearsal, over a socket."""
    _Host(Link(descriptor), loading.REHEARSED).serve()


class _Host(LendingCodec):
    """The response's side of the channel: its objects by number, and what stands here for those of the tests."""

    def __init__(self, link: Link, sent: loading.Sent) -> None:
        super().__init__(self._bytes_of, 1)
        self.link, self.sent = link, sent
        self.objects: list[Foreign] = []
        self._numbers: dict[int, int] = {}
        self._described: set[int] = set()
        self._fresh: list[int] = []
        # By number, and by the identity of what stands for it.
        self._guests: dict[int, Foreign] = {}
        self._guest_numbers: dict[int, int] = {}
        self._lock = threading.RLock()
        self.printed, self.complained = _Printed(self), _Printed(self)
        self.module = ModuleType("solution")

    @cached_property
    def coroutines(self) -> ResponseLoop:
        """What the tests await; most await nothing."""
        return ResponseLoop()

    def serve(self) -> None:
        """Answer requests until the tests' process is gone."""
        sys.stdout, sys.stderr, sys.stdin = self.printed, self.complained, _Typed(self)
        builtins.input = lambda prompt="", /: self.ask("input", str(prompt))
        while True:
            try:
                request = self._received()
            except EOFError:
                return
            self.link.send(self.answer(request))

    def answer(self, request: Request) -> bytes:
        """Do what is asked; the frame that says what came of it."""
        mutables, roots = self.mutables, self.roots
        operation, *arguments = request
        counts = [holders(mutables[place]) for place, _ in roots]
        result: Foreign
        try:
            outcome, result = "return", _OPERATIONS[operation](self, *arguments)
        except BaseException as error:
            outcome, result = "raise", error.with_traceback(None)
        for place, mutable in enumerate(mutables):
            if mutable is result:
                result = _Argument(place)
        mutable = None
        kept = [place for (place, _), count in zip(roots, counts, strict=True) if holders(mutables[place]) > count]
        if kept and type(result) in (list, tuple):
            # What stands in the result is held by that.
            kept = [place for place in kept if not any(each is mutables[place] for each in result)]
        told = self.lending.changes()
        is_loaded = operation == "load" and outcome == "return" and result[0] == "loaded"
        self.lend_each([value for _, value in result[1]] if is_loaded else kept_in(result))
        changed = self._changes(mutables, roots) if mutables else ()
        lent = tuple((place, number) for place in kept if (number := self.lending.lend(mutables[place])))
        return self._framed((outcome, result, changed, self.taken(), told, lent))

    def taken(self) -> tuple[str, str] | None:
        """What was printed, and what of errors, since the last time; None for nothing."""
        texts = self.printed.taken(), self.complained.taken()
        return texts if any(texts) else None

    def ask(self, operation: str, *arguments: object) -> Foreign:
        """Have the tests' process do something and serve it meanwhile."""
        with self._lock:
            frame = self.dumps(("ask", self.lending.changes(), operation, *arguments))
            while True:
                self.link.send(frame)
                received = self._received()
                if received[0] in ("return", "raise"):
                    break
                frame = self.answer(received)
            outcome, result, changes = received
            self.lending.take(changes)
            if outcome == "raise":
                raise result
            return result

    def _received(self) -> Request:
        return cast(Request, self.loads(self.link.receive()))

    def _framed(self, message: Request) -> bytes:
        try:
            return self.dumps(message)
        except BaseException as error:
            text = f"the response's value cannot be carried: {error}"
            return self.dumps(("raise", TypeError(text), (), None, (), ()))

    def _changes(self, mutables: list[object], roots: list[tuple[int, bytes]]) -> tuple[tuple[int, object], ...]:
        """What of the arguments the response has changed in place."""
        changed = []
        for place, before in roots:
            try:
                if self._bytes_of(mutables[place]) != before:
                    changed.append((place, mutables[place]))
            except Uncarriable:
                changed.append((place, None))
        return tuple(changed)

    def dumps(self, value: object) -> bytes:
        """The bytes of a value. Raises Uncarriable."""
        kept, self._fresh = self._fresh, []
        try:
            return super().dumps(value)
        except BaseException:
            self._described.difference_update(self._fresh)
            raise
        finally:
            self._fresh = kept

    def _bytes_of(self, value: object) -> bytes:
        """The bytes of a value that are not sent: classes in it are described when they are. Raises Uncarriable."""
        kept, self._fresh = self._fresh, []
        try:
            return super().dumps(value)
        finally:
            self._described.difference_update(self._fresh)
            self._fresh = kept

    def reference(self, value: Foreign) -> tuple[object, ...]:
        """What stands for an object of the response."""
        kind = type(value)
        if id(value) in self._guest_numbers:
            return ("guest", self._guest_numbers[id(value)])
        if kind is _Argument:
            return ("argument", value.place)
        if isinstance(value, type):
            return ("class", self._class(value))
        if isinstance(value, ModuleType) and value is not self.module:
            return ("module", value.__name__, self._number(value), self._class(kind))
        number = self._number(value)
        if kind is GeneratorType or kind is CoroutineType:
            return ("generator" if kind is GeneratorType else "coroutine", number)
        if isinstance(value, BaseException):
            return ("error", *self._error(value), value.__cause__ and self._error(value.__cause__))
        for base in FIXED:
            if isinstance(value, base):
                return ("value", number, self._class(kind), _content(base, value))
        return ("object", number, self._class(kind))

    def _number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            # Kept alive, so that its identity stays its own.
            number = self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return number

    def _error(self, value: BaseException) -> tuple[object, ...]:
        kind = type(value)
        if isinstance(value, BaseExceptionGroup) and NAMED.get(kind.__name__) is kind:
            return (self._number(value), kind.__name__, (str(value.message), list(value.exceptions)))
        return (self._number(value), self._class(kind), tuple(map(_plain, value.args)))

    def _class(self, kind: type) -> object:
        """A class: its name where it is builtin, its number, or where it is new all of it."""
        if NAMED.get(kind.__name__) is kind:
            return kind.__name__
        number = self._number(kind)
        if number in self._described:
            return number
        self._described.add(number)
        self._fresh.append(number)
        special = _OF_FUNCTIONS if kind is FunctionType else tuple(name for name in SPECIAL if differs(kind, name))
        bases = tuple(self._class(base) for base in kind.__bases__)
        module = kind.__module__ if isinstance(kind.__module__, str) else ""
        return (number, kind.__name__, kind.__qualname__, module, bases, special, kind.__hash__ is None)

    def resolve(self, reference: Request) -> object:
        """What stands here for an object of the tests, or the response's own that they hold."""
        kind, *parts = reference
        return _RESOLVERS[kind](self, *parts)

    def guest(self, number: int, make: Callable[[], object]) -> object:
        """What stands for an object of the tests, one for each."""
        if number not in self._guests:
            self._guests[number] = made = make()
            self._guest_numbers[id(made)] = number
        return self._guests[number]

    def load(self, wanted: tuple[str, ...] | None, entry_point: str) -> tuple[object, ...]:
        """Execute the response; what it defines of the names that are wanted, None: all of them."""
        sent, module = self.sent, self.module
        module.__file__ = loading.RESPONSE_FILE
        sys.modules["solution"] = module
        self.objects.append(module)
        self._numbers[id(module)] = 0
        try:
            parts = loading.sources(sent["style"], sent["before"], sent["response"], sent["entry_point"])
        except loading.UNCOMPILABLE as error:
            return ("no program", f"{type(error).__name__}: {error}")
        self._execute(parts)
        names = vars(module)
        if entry_point and entry_point not in names:
            return ("missing", entry_point)
        chosen = [name for name in names if not name.startswith("__")] if wanted is None else wanted
        return ("loaded", tuple((name, names[name]) for name in chosen if name in names))

    def _execute(self, parts: list[CodeType]) -> None:
        for part in parts:
            _exec(part, vars(self.module))

    def public_names(self) -> tuple[str, ...]:
        """What `from solution import *` takes."""
        names = vars(self.module)
        return tuple(names.get("__all__") or (name for name in names if not name.startswith("_")))


class _Argument:
    """A mutable argument of the request, by its place."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Printed(io.TextIOBase):
    """Standard output or error: goes to the tests' with the next answer."""

    encoding = "utf-8"

    def __init__(self, host: _Host) -> None:
        self._host, self._parts, self._size = host, list[str](), 0
        self.buffer = _PrintedBytes(self)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Keep a text for the next answer; much of it is sent at once."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._parts.append(text)
        self._size += len(text)
        if self._size > _PRINTED_TOGETHER:
            self._host.ask("output", self._host.taken())
        return len(text)

    def taken(self) -> str:
        """What has been written since the last time."""
        if not self._parts:
            return ""
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        return text


class _PrintedBytes(io.RawIOBase):
    """The bytes below standard output."""

    def __init__(self, printed: _Printed) -> None:
        self._printed = printed

    def write(self, content: Foreign) -> int:
        """Keep it as text."""
        return self._printed.write(bytes(content).decode(errors="replace"))


class _Typed(io.TextIOBase):
    """Standard input: that of the tests' process, which they may have replaced."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    def readable(self) -> bool:
        """It is."""
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """The next line."""
        return str(self._host.ask("stdin", "readline", -1 if size is None else size))

    def read(self, size: int | None = -1, /) -> str:
        """What is left, or so many characters."""
        return str(self._host.ask("stdin", "read", -1 if size is None else size))


def _content(base: Foreign, value: Foreign) -> object:
    """The plain content of an instance of a subclass, whatever the subclass says of itself."""
    if base is bool or base is int:
        return int.__index__(value)
    if base in (tuple, frozenset):
        return base(base.__iter__(value))
    if base is complex:
        return complex.__pos__(value)
    if base is bytes:
        return bytes.__getitem__(value, slice(None))
    return float.__float__(value) if base is float else str.__str__(value)


def _plain(value: object) -> object:
    """A part of an exception as plain value, or its text."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    try:
        Codec().dumps(value)
    except BaseException:
        try:
            return str(value)
        except BaseException:
            return type(value).__name__
    return value


def _special(host: _Host, name: str, target: Foreign, arguments: tuple[object, ...]) -> object:
    return getattr(type(target), name)(target, *arguments)


def _drawn(host: _Host, generator: Generator[Foreign, Foreign, Foreign], value: object) -> tuple[bool, object]:
    try:
        return True, generator.send(value)
    except StopIteration as stop:
        return False, stop.value


def _thrown(host: _Host, generator: Generator[Foreign, Foreign, Foreign], error: BaseException) -> tuple[bool, object]:
    try:
        return True, generator.throw(error)
    except StopIteration as stop:
        return False, stop.value


def _copied(host: _Host, target: object, *, deep: bool) -> object:
    import copy

    return copy.deepcopy(target) if deep else copy.copy(target)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "load": _Host.load,
    "names": _Host.public_names,
    "call": lambda host, target, positional, named: target(*positional, **named),
    "dunder": _special,
    "getattr": lambda host, target, name: getattr(target, name),
    "setattr": lambda host, target, name, value: setattr(target, name, value),
    "delattr": lambda host, target, name: delattr(target, name),
    "plain": lambda host, target: next(kind for kind in (list, dict, set, bytearray) if isinstance(target, kind))(
        target
    ),
    "type": lambda host, name, kind, *arguments: getattr(type(kind), name)(kind, *arguments),
    "subscript": lambda host, target, key: target[key],
    "dir": lambda host, target: dir(target),
    "draw": _drawn,
    "throw": _thrown,
    "close": lambda host, generator: generator.close(),
    "turn": lambda host, target, seconds: host.coroutines.turn(target, seconds),
    "cancel": lambda host, target: host.coroutines.cancel(target),
    "settle": lambda host, *settled: host.coroutines.settle(*settled),
    "copy": lambda host, target: _copied(host, target, deep=False),
    "in a loop": lambda host, operation, *arguments: host.coroutines.within(
        lambda: _OPERATIONS[operation](host, *arguments)
    ),
    "sow": lambda host, library, state: sow(library, state),
    "mend": lambda host, changes: host.lending.take(changes),
    "deepcopy": lambda host, target: _copied(host, target, deep=True),
}


def _coroutine(host: _Host, number: int) -> object:
    async def awaited() -> object:
        import asyncio

        if asyncio.get_running_loop() is host.coroutines.loop:
            return await host.coroutines.tests_own(number)
        return host.ask("await", number)

    return host.guest(number, awaited)


def _function(host: _Host, number: int, name: str, document: str | None, parameters: tuple[str, ...] | None) -> object:
    def make() -> object:
        def stub(*positional: object, **named: object) -> object:
            host.lend_each([*positional, *named.values()])
            return host.ask("call", number, positional, named)

        if parameters is not None:  # what a response counts, as one that curries does
            names = ", ".join(parameters)
            counted: Foreign = eval(f"lambda {names}: _tests_own({names})", {"_tests_own": stub})
            stub = counted
        stub.__name__ = stub.__qualname__ = name
        stub.__doc__ = document
        stub.__module__ = "tests"
        return stub

    return host.guest(number, make)


def _iterator(host: _Host, number: int) -> object:
    def draw() -> Iterator[object]:
        while (found := host.ask("next", number))[0]:
            yield found[1]

    return host.guest(number, draw)


def _visitor(host: _Host, number: int, name: str, special: tuple[str, ...]) -> object:
    """An object of a class of the tests: what is done with it is done there."""

    def forward(which: str) -> Callable[..., object]:
        def asked(self: object, *arguments: object, **named: object) -> object:
            host.lend_each([*arguments, *named.values()])
            return host.ask("dunder", number, which, arguments, named)

        return asked

    def make() -> object:
        body: dict[str, Foreign] = {which: forward(which) for which in special}
        body["__getattr__"] = lambda self, attribute: host.ask("get", number, attribute)
        body["__setattr__"] = lambda self, attribute, value: host.ask("set", number, attribute, value)
        if "__hash__" not in body:
            body["__hash__"] = object.__hash__
        return type(name, (), body)()

    return host.guest(number, make)


def _visiting_class(host: _Host, number: int, name: str, base: str) -> object:
    if not issubclass(NAMED[base], BaseException):
        return _function(host, number, name, None, None)
    return host.guest(number, lambda: type(name, (NAMED[base],), {"__module__": "tests"}))


def _visiting_error(host: _Host, number: int, kind: Foreign, arguments: tuple[object, ...]) -> object:
    return host.guest(number, lambda: _error(kind, arguments))


def _error(kind: Foreign, arguments: tuple[object, ...]) -> object:
    try:
        return kind(*arguments)
    except TypeError:
        return Exception(*arguments)


def _named_tuple(host: _Host, name: str, fields: tuple[str, ...], values: tuple[object, ...]) -> object:
    made: Foreign = namedtuple(name, list(fields))  # type: ignore[misc]
    return cast(object, made(*values))


def _global(host: _Host, module: str, path: str) -> object:
    found: object = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


_RESOLVERS: dict[str, Callable[..., object]] = {
    "remote": lambda host, number: host.objects[number],
    "global": _global,
    "function": _function,
    "iterator": _iterator,
    "coroutine": _coroutine,
    "chance": lambda host, library, state: chance_in(library, state),
    "visitor": _visitor,
    "class": _visiting_class,
    "error": _visiting_error,
    "namedtuple": _named_tuple,
}
# Most responses have no other class to describe.
_OF_FUNCTIONS = tuple(name for name in SPECIAL if differs(FunctionType, name))
