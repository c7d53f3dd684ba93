"""What a response may ask of objects that its tests have handed to it: to call them, and what they hold.

Each is asked by its number, which only what was handed over has, and answers with what the tests' own side comes to.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING

from services.sandbox_judge.jail.coroutines import run_apart
from services.sandbox_judge.jail.wire import BROKEN, SPECIAL, Foreign, end

if TYPE_CHECKING:
    from services.sandbox_judge.jail.proxies import Remote


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
