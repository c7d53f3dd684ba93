"""Bounds on what one step of a chat template may make: a power, a repetition, a width, a joined text.

A limit of time between lines does not reach into a single operation, which may take for ever, or all memory. So those
that can make much of little are refused where their result would be large; real templates come nowhere near.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sized
from functools import cache
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

MOST_CHARACTERS = 8 << 20
MOST_ELEMENTS = 1 << 20
MOST_BITS = 1 << 12
MOST_WIDTH = 10_000
# A width or precision of more than three digits, or one that is an argument.
_WIDE = re.compile(r"\d{4,}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_PADDING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round")


def bound_templates() -> None:
    """Have transformers compile chat templates under these bounds; for the time before the first is compiled."""
    _replace_environment()


@cache
def _replace_environment() -> None:
    from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", BoundedEnvironment)  # noqa: B010 - not exported


def _require(size: int, most: int, what: str) -> None:
    if size > most:
        raise OverflowError(f"the template makes too much at once: {what}")


def _widest(values: Iterable[object]) -> int:
    return max((abs(each) for each in values if isinstance(each, int)), default=0)


def joined(parts: Iterable[object]) -> str:
    """Texts one after the other. Raises OverflowError where together they are too long."""
    texts, characters = [], 0
    for part in parts:
        texts.append(str(part))
        characters += len(texts[-1])
        _require(characters, MOST_CHARACTERS, "a text")
    return "".join(texts)


class _Joining(CodeGenerator):
    """Joins texts by `joined` where a template has `~`."""

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, in which no single step makes much of little."""

    intercepted_binops = frozenset({"**", "*", "+", "%"})
    code_generator_class = _Joining
    concat = staticmethod(joined)
    joined = staticmethod(joined)

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)
        for name in _PADDING_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["replace"] = lambda text, old, new, count=None: _replaced(str(text), str(old), str(new), count)
        self.filters["format"] = lambda text, *values, **named: self._formatted(str(text), values or named)
        self.filters["join"] = self._join_filter

    @override
    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The result of an operator. Raises OverflowError where it would be too large."""
        if operator == "%" and isinstance(left, str | bytes):
            return self._formatted(left, right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _require(bits, MOST_BITS, f"a number by {operator}")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, Sized) and isinstance(times, int):
                    _require(len(sized) * times, MOST_ELEMENTS, "a repetition")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _require(len(left) + len(right), MOST_CHARACTERS, "a sum")
        return super().call_binop(context, operator, left, right)

    @override
    def call(self, context: Context, function: object, *arguments: object, **named: object) -> object:
        """The result of a call. Raises OverflowError where a text's method would make too much."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int):
            given = [*arguments, *named.values()]
            if name in _PADDING:
                _require(_widest(given), MOST_WIDTH, "a width")
            elif name == "replace" and isinstance(owner, str) and len(arguments) >= 2:
                return _replaced(owner, *arguments)  # type: ignore[arg-type]
            elif name == "join" and isinstance(owner, str) and len(arguments) == 1:
                return _join(arguments[0], owner)  # type: ignore[arg-type]
            _require(name == "translate", 0, "a translation")
        return super().call(context, function, *arguments, **named)

    @override
    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Raises OverflowError where a text that formats others has a large width."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _require(bool(_WIDE.search(owner)), 0, "a width")
        return super().wrap_str_format(value)

    def _join_filter(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        return _join(values, d) if attribute is None else _join(values, d, make_attrgetter(self, attribute))

    def _formatted(self, text: str | bytes, values: object) -> object:
        _require(len(text), MOST_ELEMENTS, "a format")
        _require(bool(_WIDE.search(text if isinstance(text, str) else text.decode("latin-1"))), 0, "a width")
        return text % values


def _narrow(padded: Callable[..., object]) -> Callable[..., object]:
    """A filter whose widths are bounded; what jinja notes on filters stays."""

    def narrow(*arguments: object, **named: object) -> object:
        _require(_widest([*arguments[1:], *named.values()]), MOST_WIDTH, "a width")
        return padded(*arguments, **named)

    narrow.__dict__.update(getattr(padded, "__dict__", {}))
    return narrow


def _replaced(text: str, old: str, new: str, count: int | None = -1) -> str:
    times = text.count(old)
    _require(len(text) + times * max(0, len(new) - len(old)), MOST_CHARACTERS, "a replacement")
    return text.replace(old, new, -1 if count is None else count)


def _join(values: Iterable[Any], between: str = "", part_of: Callable[[Any], object] = lambda value: value) -> str:
    texts: list[object] = []
    for value in values:
        texts += [between, part_of(value)] if texts else [part_of(value)]
        _require(len(texts), MOST_ELEMENTS, "a join")
    return joined(texts)
