"""What stands for a response in the process of its tests: calls go over a channel, plain values come back.

No code of the response runs here. An object that is no plain value is a proxy. Comparisons and arithmetic between a
proxy and a value of the tests would let the response see what is expected and say what it likes, so they are asked only
of objects that the tests have made themselves of classes that they name; elsewhere such a proxy equals nothing but
itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import cmp_to_key, partial
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, CoroutineType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import NoReturn, cast

from services.sandbox_judge.jail.coroutines import TestsCoroutines, run_apart, running_loop
from services.sandbox_judge.jail.lending import LendingCodec
from services.sandbox_judge.jail.source import Source
from services.sandbox_judge.jail.wire import (
    BINARY,
    BROKEN,
    FIXED,
    LOST,
    NAMED,
    SPECIAL,
    Foreign,
    Link,
    Malformed,
    Uncarriable,
    chance_of,
    chances,
    differs,
    end,
    parameters,
    plain,
    refresh,
)

# Calls within calls, of the response by the tests and the other way round.
MOST_NESTED = 200
MOST_DRAWN = 1_000_000
_NAME_CHARACTERS = 200
# Attributes with such names that a proxy asks for; all others it has itself, or not at all.
_ASKED = ("__name__", "__qualname__", "__doc__", "__annotations__", "__members__", "__wrapped__", "__notes__")
# Classes of the library whose bound methods the response may call when the tests hand them in.
_CONTAINERS = (list, dict, set, deque, defaultdict, str, bytes, int, float, tuple, frozenset, io.StringIO, io.BytesIO)
# A method such as str.upper, and what the library may have on either side.
_Method = type(str.upper)
_LIBRARYS_OWN = (type, FunctionType, BuiltinFunctionType, _Method)
# What stays with the tests and is asked there: the library's objects that compare, or take from others what they name.
_VISITING = (SimpleNamespace, io.StringIO, attrgetter, itemgetter, methodcaller, type(cmp_to_key(max)))
# What may look for the loop that it is called in.
_LOOPED = ("call", "dunder", "getattr", "setattr")
# Exceptions of these are the test runner's own.
_RUNNERS = ("pytest", "_pytest", "unittest", "pluggy", "hypothesis")
# Parts of names of modules that are run, or change others, by being imported.
_ACTING = frozenset(["__main__", "antigravity", "conftest", "idlelib", "test", "tests", "this"])
# What makes of an object another of its kind.
_MAKING = {f"__{name}__" for name in ["neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"]} | (
    set(BINARY) - {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)
_FORWARDED_BY_VALUES = ("__call__", "__enter__", "__exit__", "__get__", "__await__")


class RemoteClass(type):
    """The class of classes that stand for the response's."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **_: object) -> NoReturn:
        """Refuse a class of the tests that is derived from one of the response's."""
        raise TypeError("tests that derive from a class of the response need isolation: shared")

    def __call__(cls, *positional: object, **named: object) -> Foreign:
        """An instance, made by the response."""
        return remote().request("call", cls, positional, named)

    def __getattr__(cls, name: str) -> Foreign:
        """An attribute of the response's class."""
        _require_asked(name)
        return remote().request("getattr", cls, name)

    def __setattr__(cls, name: str, value: object) -> None:
        """Set it there."""
        remote().request("setattr", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        """Delete it there."""
        remote().request("delattr", cls, name)

    def __iter__(cls) -> Foreign:
        """What the class gives, as enumerations do."""
        return remote().request("type", "__iter__", cls)

    def __len__(cls) -> int:
        """As many as it says."""
        return int(remote().request("type", "__len__", cls))

    def __bool__(cls) -> bool:
        """A class is true."""
        return True

    def __getitem__(cls, key: object) -> Foreign:
        """A member of an enumeration, or the class itself with parameters."""
        return remote().request("subscript", cls, key)

    def __contains__(cls, member: object) -> bool:
        """Whether it is a member of an enumeration."""
        return bool(remote().request("type", "__contains__", cls, member))


@dataclass
class _Told:
    """An attribute that Python gives every class and object of its own accord, as the response's has it."""

    name: str

    def __get__(self, instance: object, owner: type) -> Foreign:
        return remote().request("getattr", owner if instance is None else instance, self.name)


class _Proxy:
    """Stands for an object of the response."""

    def __getattr__(self, name: str) -> Foreign:
        _require_asked(name)
        return remote().request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):  # what the interpreter and test runners set on exceptions
            object.__setattr__(self, name, value)
        else:
            remote().request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        remote().request("delattr", self, name)

    def __dir__(self) -> Foreign:
        return remote().request("dir", self)

    def __copy__(self) -> Foreign:
        return remote().request("copy", self)

    def __deepcopy__(self, _: object) -> Foreign:
        return remote().request("deepcopy", self)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("an object of the response cannot be pickled; that needs isolation: shared")


class _Solution(ModuleType):
    """The response's module."""

    def __getattribute__(self, name: str) -> Foreign:
        if name == "__all__":
            return [each for each in remote().request("names") if each not in remote().kept]
        if name.startswith("__"):
            return super().__getattribute__(name)
        return remote().request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            remote().request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        remote().request("delattr", self, name)


class Remote(LendingCodec):
    """The tests' side of the channel; one for each process."""

    def __init__(self, link: Link, source: Source) -> None:
        super().__init__(self.dumps, -1)
        self.link, self.source = link, source
        # Classes of the response that the tests name: what they say of other values is what is tested.
        self.named: frozenset[str] = frozenset()
        # Names that the tests have themselves: the response's stay away from them.
        self.kept: frozenset[str] = frozenset()
        self.module = _Solution("solution")
        self._proxies: dict[int, object] = {0: self.module}
        self._classes: dict[int, type] = {}
        self._numbers: dict[int, int] = {id(self.module): 0}
        self._handed: list[tuple[str, Foreign]] = []
        self._handed_numbers: dict[tuple[object, ...], int] = {}
        self._arguments: list[object] = []
        self.coroutines = TestsCoroutines(self)
        # Whether the tests seed what is random, and in which state the response has it.
        self.seeds = False
        self._sown: dict[str, object] = {}
        self._nested = self._drawn = 0
        # Identities of what stands for objects that the tests have made themselves; where the response gives one for
        # something else, another proxy stands for it there, unless the tests look at identities.
        self._own: set[int] = set()
        self._twins: dict[int, object] = {}
        # Classes that the response has given for something else than a name of its own.
        self._given_classes: set[type] = set()
        self._named_now = False
        # Errors of the tests that the response could catch, and with each an assertion that failed or was not tried.
        self.failures: list[BaseException] = []
        self.untried: list[BaseException] = []
        _THE.append(self)

    def request(self, operation: str, *arguments: object) -> Foreign:
        """Have the response do something; what it gives, or raises, is given or raised here."""
        if self._nested >= MOST_NESTED:
            raise RecursionError("calls between tests and response are nested too deeply")
        if self.seeds and operation not in ("sow", "mend"):
            self._sow()
        if operation != "mend" and (changes := self.lending.changes()):
            self.request("mend", changes)
        is_in_loop = operation in _LOOPED and running_loop() is not None
        frame = self.dumps(("in a loop", operation, *arguments) if is_in_loop else (operation, *arguments))
        kept, sent, untried = self._arguments, self.mutables, len(self.untried)
        self._nested += 1
        try:
            while True:
                # Only the response's own names are words of its tests.
                self._named_now = operation == "load" or (operation == "getattr" and arguments[0] is self.module)
                answer = self._exchange(frame, sent)
                if answer[0] != "ask":
                    return self._owned(operation, arguments, self._given(operation, arguments, answer))
                frame = self._served(*answer[1:])
        except BaseException:
            del self.untried[untried:]  # nothing was swallowed
            raise
        finally:
            self._arguments = kept
            self._nested -= 1

    def _exchange(self, frame: bytes, sent: list[object]) -> tuple[Foreign, ...]:
        """Send a frame and read the next; where there is none, this process ends."""
        try:
            self.link.send(frame)
            received = self.link.receive()
            self._arguments = sent
            answer = self.loads(received)
        except EOFError:
            end(LOST)
        except (Malformed, MemoryError) as error:
            end(BROKEN, f"the response has broken its channel: {error}")
        if type(answer) is not tuple or not answer or type(answer[0]) is not str:
            end(BROKEN, "the response has broken its channel")
        return answer

    def _given(self, operation: str, arguments: tuple[Foreign, ...], answer: tuple[Foreign, ...]) -> Foreign:
        if len(answer) != 6 or answer[0] not in ("return", "raise"):
            end(BROKEN, "the response has broken its channel")
        outcome, result, changes, printed, others, kept = answer
        for place, value in changes:
            refresh(self._arguments[place], value, self.lent)
        self.lending.take(others)
        for place, number in kept:
            if type(number) is int:
                self.lending.hold(number, self._arguments[place])
        if printed:
            serve_output(self, printed)
        if outcome == "return":
            return result
        if not isinstance(result, BaseException):
            end(BROKEN, "the response has broken its channel")
        is_drawn = operation == "dunder" and arguments[0] == "__next__"
        if isinstance(result, StopIteration | StopAsyncIteration) and not is_drawn:
            # It would end a loop of the tests early.
            raise RuntimeError("the response raised StopIteration") from result
        if type(result).__module__ == "asyncio.exceptions" and operation != "turn":
            raise RuntimeError(f"the response raised {type(result).__name__}") from result
        raise result

    def _sow(self) -> None:
        """Bring what is random on the response's side into the state that the tests have brought it to here."""
        for library, state in chances():
            if self._sown.get(library) != state:
                self._sown[library] = state
                self.request("sow", library, state)

    def _owned(self, operation: str, arguments: tuple[Foreign, ...], result: Foreign) -> Foreign:
        """What was given, which is the tests' own where they called its class, or an operator of one that is."""
        kind = type(result)
        if isinstance(kind, RemoteClass) and kind._remote_named and not vars(kind).keys().isdisjoint(BINARY):
            by_class = operation == "call" and isinstance(arguments[0], RemoteClass)
            is_own = (by_class and arguments[0] not in self._given_classes) or (
                operation == "dunder" and arguments[0] in _MAKING and self.is_own(arguments[1])
            )
            if is_own:
                result = self._proxies[self._numbers[id(result)]]
                self._own.add(id(result))
        return result

    def is_own(self, value: object) -> bool:
        """Whether the tests have made this object of the response's class themselves."""
        return id(value) in self._own

    def saw(self, error: object) -> None:
        """Note an error of the tests that the response can catch: a failed assertion must not be lost with it."""
        if isinstance(error, BaseException) and self.source.is_lost(error):
            self.failures.append(error)

    def swallowed(self, error: object) -> None:
        """Note an error that the response has caught, where the tests would have asserted something after it."""
        if isinstance(error, BaseException) and self.source.is_missed(error):
            self.failures.append(error)

    def _served(self, changes: Foreign, operation: str, *arguments: Foreign) -> bytes:
        """Do what the response asks of an object that was handed to it; the frame that says what came of it."""
        try:
            self.lending.take(changes)
            result = SERVED[operation](self, *arguments)
            self.lend_each(result if type(result) is tuple else (result,))
            return self.dumps(("return", result, self.lending.changes()))
        except BaseException as error:
            self.saw(error)
            if self.source.is_missed(error):
                self.untried.append(error)
            return self.dumps(("raise", error, self.lending.changes()))

    # What stands for values of the tests.

    def reference(self, value: Foreign) -> tuple[object, ...]:
        """What stands for a value of the tests. Raises Uncarriable."""
        kind = type(value)
        if kind is _Number:
            return ("remote", value.number)
        if id(value) in self._numbers:
            return ("remote", self._numbers[id(value)])
        if isinstance(value, ModuleType):
            return ("global", value.__name__, "")
        if isinstance(value, _LIBRARYS_OWN) and (named := _global(value)):
            return named
        return self._by_hand(value)

    def _by_hand(self, value: Foreign) -> tuple[object, ...]:
        """What stands for an object of the tests themselves. Raises Uncarriable."""
        kind = type(value)
        if isinstance(value, type):
            base = next(each.__name__ for each in value.__mro__ if NAMED.get(each.__name__) is each)
            return ("class", self._hand("call", value), value.__name__, base)
        if _is_function(value):
            name = getattr(value, "__name__", kind.__name__)
            return ("function", self._hand("call", value), name, getattr(value, "__doc__", None), parameters(value))
        if isinstance(value, BaseException):
            return ("error", self._hand("error", value), kind, tuple(map(plain, value.args)))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ("namedtuple", kind.__name__, tuple(kind._fields), tuple(value))
        if _is_visitor(value):
            special = tuple(name for name in SPECIAL if differs(kind, name))
            return ("visitor", self._hand("visit", value), kind.__name__, special)
        if hasattr(kind, "__next__"):
            return ("iterator", self._hand("next", value))
        if kind is CoroutineType:
            return ("coroutine", self._hand("await", value))
        if found := chance_of(value):
            return ("chance", *found)
        raise Uncarriable(f"the tests hand in {kind.__name__}, which cannot be carried; that needs isolation: shared")

    def _put_reference(self, value: object) -> None:
        """A value of a subclass is carried as that of its builtin class, unless the response gave it."""
        if id(value) not in self._numbers and not hasattr(type(value), "_fields") and not _is_visitor(value):
            for base in (*FIXED, list, dict, set):
                if isinstance(value, base):
                    return self._put(cast("Foreign", base)(value))
        return super()._put_reference(value)

    def _hand(self, use: str, value: object) -> int:
        """The number under which the response may use an object, in this way and no other."""
        key: tuple[object, ...] = use, id(value)
        if isinstance(value, MethodType | BuiltinFunctionType) and value.__self__ is not None:
            # Bound anew each time that somebody asks for it.
            key = use, id(value.__self__), value.__name__
        if key not in self._handed_numbers:
            self._handed_numbers[key] = len(self._handed)
            self._handed.append((use, value))
        return self._handed_numbers[key]

    def handed(self, use: str, number: object) -> Foreign:
        """An object that was handed to the response for this use."""
        if type(number) is int and 0 <= number < len(self._handed) and self._handed[number][0] == use:
            return self._handed[number][1]
        raise TypeError("no such object was handed in")

    def given_back(self, number: object) -> object:
        """An object that was handed to the response and comes back. Raises Malformed."""
        if type(number) is not int or not 0 <= number < len(self._handed):
            raise Malformed("no such object was handed in")
        return self._handed[number][1]

    # What stands for objects of the response.

    def resolve(self, reference: tuple[Foreign, ...]) -> object:
        """The proxy for an object of the response. Raises Malformed."""
        kind, *parts = reference
        resolver = _RESOLVERS.get(kind) if type(kind) is str else None
        if resolver is None:
            raise Malformed("unknown reference")
        return resolver(self, *parts)

    def remote_class(self, reference: object) -> type:
        """The class that stands for one of the response's. Raises Malformed."""
        if type(reference) is str and reference in NAMED:
            return NAMED[reference]
        if type(reference) is int and reference in self._classes:
            return self._classes[reference]
        if type(reference) is not tuple or len(reference) != 7 or type(reference[0]) is not int:
            raise Malformed("no class")
        number, name, path, module, bases, special, unhashable = reference
        texts = (name, path, module, *special)
        if any(type(text) is not str or len(text) > _NAME_CHARACTERS or "\0" in text for text in texts):
            raise Malformed("no class")
        found = _library_error(module, path)
        if found is None:
            found = self._made((name, path, module), tuple(map(self.remote_class, bases)), special)
            if unhashable is True:
                type.__setattr__(found, "__hash__", None)
            self._numbers[id(found)] = number
        self._classes[number] = found
        return found

    def given_class(self, reference: object) -> type:
        """A class that the response gives as a value. Raises Malformed."""
        found = self.remote_class(reference)
        if not self._named_now:
            self._given_classes.add(found)
        return found

    def _made(self, names: tuple[str, str, str], bases: tuple[type, ...], special: tuple[str, ...]) -> type:
        """A class derived from those that stand for its bases; of the builtin ones only what cannot change, and errors.

        A mutable one's content stays with the response.
        """
        mutable = next((base for base in bases if base in (list, dict, set, bytearray)), None)
        kept = tuple(base for base in bases if base is not object and base is not mutable)
        is_value = any(issubclass(base, FIXED) for base in kept)
        inherited = any(getattr(base, "_remote_named", False) for base in kept)
        body: dict[str, Foreign] = {"__module__": names[2], "__qualname__": names[1], "_remote_named": inherited}
        body["_remote_named"] = inherited or names[0] in self.named
        body["__doc__"] = _Told("__doc__")
        if not any(issubclass(base, BaseException) for base in kept):
            body["__dict__"] = _Told("__dict__")
        forwarded = _FORWARDED_BY_VALUES if is_value and not body["_remote_named"] else SPECIAL
        body |= {name: _FORWARDS[name] for name in special if name in forwarded}
        if mutable is not None:
            body |= {"__class__": property(lambda self: mutable), "__eq__": _equals_content, "__hash__": None}
        if not any(issubclass(base, _Proxy) for base in kept):
            kept = (_Proxy, *kept)
        made: type = type.__new__(RemoteClass, names[0], kept, body)  # type: ignore[arg-type]
        return made

    def instance(self, number: object, reference: object, content: tuple[object, ...] = ()) -> object:
        """The one proxy for an object. Raises Malformed."""
        if type(number) is not int:
            raise Malformed("no object")
        known = self._proxies.get(number)
        if number not in self._proxies:
            self._proxies[number] = self._standing(number, self.remote_class(reference), content)
        elif id(known) in self._own and self.source.looks_at_identity:
            self._own.discard(id(known))
        elif id(known) in self._own:
            if number not in self._twins:
                self._twins[number] = self._standing(number, type(known), content)
            return self._twins[number]
        return self._proxies[number]

    def _standing(self, number: int, kind: type, content: tuple[object, ...]) -> object:
        if not isinstance(kind, RemoteClass) and not issubclass(kind, BaseException):
            raise Malformed("no class of the response")
        base = next(each for each in kind.__mro__ if not isinstance(each, RemoteClass) and each is not _Proxy)
        made: object = base.__new__(kind, *content)
        if isinstance(kind, RemoteClass):
            self._numbers[id(made)] = number
        return made

    def once(self, target: _Number, make: Callable[[], Foreign]) -> Foreign:
        """What stands for an object of the response that is no proxy, made at its first mention."""
        if target.number not in self._proxies:
            self._proxies[target.number] = made = make()
            self._numbers[id(made)] = target.number
        return self._proxies[target.number]

    def error(self, number: object, reference: object, arguments: object, cause: object = None) -> object:
        """An exception of the response, and what it says caused it. Raises Malformed."""
        found = self._error(number, reference, arguments)
        if type(cause) is tuple and len(cause) == 3:
            found.__cause__ = self._error(*cause)
        return found

    def _error(self, number: object, reference: object, arguments: object) -> Foreign:
        if type(arguments) is not tuple:
            raise Malformed("no exception")
        kind = self.remote_class(reference)
        if not issubclass(kind, BaseException):
            raise Malformed("no exception")
        if isinstance(kind, RemoteClass):
            return self.instance(number, reference if type(reference) is not tuple else reference[0], arguments)
        try:
            return kind(*arguments)
        except Exception:
            return kind.__new__(kind, *arguments)

    def argument(self, place: object) -> object:
        """The mutable argument that the response has given back. Raises Malformed."""
        if type(place) is not int or not 0 <= place < len(self._arguments):
            raise Malformed("no argument")
        return self._arguments[place]

    def count_draw(self) -> None:
        """Raises RuntimeError after so many that no test means to draw."""
        self._drawn += 1
        if self._drawn > MOST_DRAWN:
            raise RuntimeError(f"more than {MOST_DRAWN} values were drawn from iterators of the response")


class _Number:
    """An object of the response, by its number."""

    def __init__(self, number: object) -> None:
        if type(number) is not int:
            raise Malformed("no object")
        self.number = number


# The one of this process.
_THE: list[Remote] = []


def forget() -> None:
    """Begin as a process without a channel."""
    _THE.clear()


def remote() -> Remote:
    """This process's end of the channel."""
    return _THE[-1]


def _require_asked(name: str) -> None:
    is_kept = name.startswith("_remote_") or name == "_asyncio_future_blocking"  # a future of no loop of this process
    if is_kept or (name.startswith("__") and name.endswith("__") and name not in _ASKED):
        raise AttributeError(name)


def _library_error(module: str, path: str) -> type | None:
    """An exception class of a library that the tests have imported, and can therefore mean."""
    if module == "solution" or module.split(".")[0] in _RUNNERS or not path.isidentifier():
        return None
    found = vars(sys.modules[module]).get(path) if module in sys.modules else None
    is_error = isinstance(found, type) and issubclass(found, Exception)
    return found if is_error or (module, path) == ("asyncio.exceptions", "CancelledError") else None


def _global(value: Foreign) -> tuple[object, ...] | None:
    """A class or function of a library by its name, so that each side uses its own."""
    home = getattr(value, "__objclass__", value)
    module, path = getattr(home, "__module__", None), getattr(value, "__qualname__", "")
    if type(module) is not str or module in ("tests", "solution", "test_solution") or "<" in path:
        return None
    found: Foreign = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return ("global", module, path) if found is value else None


def _is_function(value: Foreign) -> bool:
    if isinstance(value, MethodType):
        return isinstance(value.__func__, FunctionType) and not isinstance(value.__self__, ModuleType)
    if isinstance(value, BuiltinFunctionType):
        return type(value.__self__) in _CONTAINERS
    if isinstance(value, partial):
        return _is_function(value.func) or _global(value.func) is not None or id(value.func) in remote()._numbers
    return isinstance(value, FunctionType) or type(value).__name__ == "_lru_cache_wrapper"


def _is_visitor(value: object) -> bool:
    kind = type(value)
    return kind.__module__ in ("tests", "test_solution") or kind in _VISITING or is_mock(value)


def _word_of(self: Foreign, other: object) -> bool:
    """Whether the response may see the other value of a comparison, and say what comes of it."""
    return isinstance(type(other), RemoteClass) or (bool(type(self)._remote_named) and remote().is_own(self))


def _by_content(self: Foreign, name: str, arguments: tuple[object, ...]) -> Foreign:
    """What the builtin class of a value says, without asking the response."""
    kinds = (kind for kind in type(self).__mro__ if not isinstance(kind, RemoteClass) and kind is not _Proxy)
    found: Foreign = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
    return NotImplemented if found is None else found(self, *arguments)


def _binary(name: str) -> Callable[..., Foreign]:
    def forward(self: Foreign, other: object, *more: object) -> Foreign:
        if not _word_of(self, other):
            return _by_content(self, name, (other, *more))
        return remote().request("dunder", name, self, (other, *more))

    return forward


def _unary(name: str) -> Callable[..., Foreign]:
    def forward(self: Foreign, *arguments: object) -> Foreign:
        return remote().request("dunder", name, self, arguments)

    return forward


def _called(self: Foreign, *positional: object, **named: object) -> Foreign:
    return remote().request("call", self, positional, named)


def _contains(self: Foreign, member: object) -> bool:
    if _word_of(self, member):
        return bool(remote().request("dunder", "__contains__", self, (member,)))
    return any(each is member or each == member for each in iter(self))


def _left(self: Foreign, kind: object, error: object, _: object) -> Foreign:
    remote().saw(error)
    if is_caught := remote().request("dunder", "__exit__", self, (kind, error, None)):
        remote().swallowed(error)
    return is_caught


def _bound(self: Foreign, instance: object, owner: object = None) -> Foreign:
    return self if instance is None else MethodType(self, instance)


def _next(self: Foreign) -> Foreign:
    remote().count_draw()
    return remote().request("dunder", "__next__", self, ())


def _equals_content(self: Foreign, other: object) -> Foreign:
    """Of a list, say, that the response has derived a class from: its content decides."""
    if isinstance(type(other), RemoteClass):
        other = remote().request("plain", other)
    return remote().request("plain", self) == other


_FORWARDS: dict[str, Callable[..., Foreign]] = {
    **{name: _unary(name) for name in SPECIAL},
    **{name: _binary(name) for name in BINARY},
    "__call__": _called,
    "__contains__": _contains,
    "__aexit__": lambda self, kind, error, _: remote().coroutines.left(self, kind, error),
    "__anext__": lambda self: remote().coroutines.next_of(self),
    "__await__": lambda self: remote().coroutines.awaited(self).__await__(),
    "__exit__": _left,
    "__get__": _bound,
    "__next__": _next,
}


def _generator(sender: Remote, number: object) -> Generator[Foreign, Foreign, Foreign]:
    """A generator of the response, drawn one by one."""
    target = _Number(number)

    def draw() -> Generator[Foreign, Foreign, Foreign]:
        step: tuple[object, ...] = ("draw", target, None)
        while True:
            sender.count_draw()
            found = sender.request(*step)  # type: ignore[arg-type]
            if step[0] == "throw":
                sender.swallowed(step[2])
            if type(found) is not tuple or len(found) != 2 or type(found[0]) is not bool:
                end(BROKEN, "the response has broken its channel")
            if not found[0]:
                return found[1]
            try:
                step = ("draw", target, (yield found[1]))
            except GeneratorExit:
                sender.request("close", target)
                raise
            except BaseException as error:
                sender.saw(error)
                step = ("throw", target, error)

    made: Generator[Foreign, Foreign, Foreign] = sender.once(target, draw)
    return made


def _coroutine(sender: Remote, number: object) -> Coroutine[Foreign, Foreign, Foreign]:
    """A coroutine of the response, which goes on while it is awaited."""
    target = _Number(number)
    made: Coroutine[Foreign, Foreign, Foreign] = sender.once(target, lambda: sender.coroutines.awaited(target))
    return made


def _module(sender: Remote, name: object, number: object, reference: object) -> object:
    """A module that the response has imported, from this side's own packages; a proxy where there is none to import."""
    sender.remote_class(reference)
    if type(name) is not str or name in ("tests", "test_solution", "__main__"):
        raise Malformed("no module")
    # What does something when it is imported is not for a response to choose.
    if name in sys.modules or _ACTING.isdisjoint(name.split(".")):
        with contextlib.suppress(ImportError, ValueError):
            return importlib.import_module(name)
    return sender.instance(number, reference if type(reference) is not tuple else reference[0])


_RESOLVERS: dict[str, Callable[..., object]] = {
    "class": Remote.given_class,
    "object": Remote.instance,
    "value": lambda sender, number, kind, content: sender.instance(number, kind, (content,)),
    "error": Remote.error,
    "argument": Remote.argument,
    "generator": _generator,
    "coroutine": _coroutine,
    "module": _module,
    "guest": lambda sender, number: sender.given_back(number),
}


def is_mock(value: object) -> bool:
    """Whether it is one of the standard library's mocks, which answer whatever they are asked."""
    return type(value).__module__ == "unittest.mock"


def _serve_call(sender: Remote, number: object, positional: Foreign, named: Foreign) -> object:
    return sender.handed("call", number)(*positional, **named)


def _serve_special(sender: Remote, number: object, name: object, positional: Foreign, named: Foreign) -> object:
    target = sender.handed("visit", number)
    if name not in SPECIAL:
        raise TypeError("no such method was handed in")
    return getattr(type(target), name)(target, *positional, **named)


def _serve_get(sender: Remote, number: object, name: object) -> object:
    target = sender.handed("visit", number)
    if type(name) is not str or name.startswith("_") or (is_mock(target) and name in dir(type(target)())):
        raise AttributeError(name)
    return getattr(target, name)


def _serve_set(sender: Remote, number: object, name: object, value: object) -> None:
    target = sender.handed("visit", number)
    methods = (FunctionType, staticmethod, classmethod)
    if type(name) is not str or name.startswith("_") or isinstance(vars_of(type(target)).get(name), methods):
        raise AttributeError(name)
    if is_mock(target) or isinstance(target, io.StringIO):
        raise AttributeError(name)
    setattr(target, name, value)


def vars_of(kind: type) -> dict[str, object]:
    """What instances of a class find in it and its bases."""
    return {name: value for each in reversed(kind.__mro__) for name, value in vars(each).items()}


def _serve_next(sender: Remote, number: object) -> tuple[bool, object]:
    try:
        return True, next(sender.handed("next", number))
    except StopIteration:
        return False, None


def _serve_input(sender: Remote, prompt: object) -> str:
    import builtins

    return builtins.input(prompt)


def _serve_stdin(sender: Remote, method: object, size: object) -> str:
    if method not in ("read", "readline") or type(size) is not int:
        raise TypeError("no such method")
    return str(getattr(sys.stdin, method)(size))


def serve_output(sender: Remote, texts: Foreign) -> None:
    """What the response has printed, and what of errors; those only where the tests look at them."""
    if type(texts) is not tuple or [type(text) for text in texts] != [str, str]:
        end(BROKEN, "the response has broken its channel")
    printed, errors = texts
    with contextlib.suppress(ValueError):
        sys.stdout.write(printed)
        if errors and sys.stderr is not sys.__stderr__:
            sys.stderr.write(errors)


SERVED: dict[object, Callable[..., object]] = {
    "call": _serve_call,
    "dunder": _serve_special,
    "get": _serve_get,
    "set": _serve_set,
    "next": _serve_next,
    "input": _serve_input,
    "stdin": _serve_stdin,
    "output": serve_output,
    "await": lambda sender, number: run_apart(sender.handed("await", number)),
}
