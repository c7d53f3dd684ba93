"""Values between the tests' process and the response's as plain bytes: a small tagged code of bounded size and depth.

Nothing that is read here runs code of the other side: builtin types, numbers, dates and numpy's arrays of plain numbers
are made anew from their content. Whatever else a side has is a reference, a tuple that its subclass gives meaning to.
"""

from __future__ import annotations

import builtins
import os
import re
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType
from typing import Any, NoReturn, cast

# What the other side has made, or people's own tests: nobody here knows its type.
Foreign = Any
MOST_BYTES = 32 << 20
MOST_DEPTH = 1000
# Frames of the interpreter that a level of depth takes, at most.
_FRAMES = 4
_LONG_LISTS = 8
_COUNT, _WORD, _FLOAT, _COMPLEX = struct.Struct(">I"), struct.Struct(">q"), struct.Struct(">d"), struct.Struct(">dd")
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "": None,
    **{kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)},
}
_NUMERIC_KINDS = "?biufcSUMm"
# Classes whose instances cannot change; a subclass's are carried with their content.
FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset)
_BY_VALUE = (*FIXED, list, dict, set, bytearray, deque, range, slice, type(None))
# Whom comparison and arithmetic give another value to look at.
BINARY = (
    *(f"__{name}__" for name in sorted(["eq", "ne", "lt", "le", "gt", "ge"])),
    *(
        f"__{reflected}{name}__"
        for name in sorted(
            [
                "add",
                "sub",
                "mul",
                "matmul",
                "truediv",
                "floordiv",
                "mod",
                "divmod",
                "pow",
                "lshift",
                "rshift",
                "and",
                "xor",
                "or",
            ]
        )
        for reflected in ("", "r", "i")
    ),
)
_OTHERS = (
    "len getitem setitem delitem contains iter next reversed call enter exit bool int float complex index str repr "
    "format bytes hash round trunc floor ceil neg pos abs invert get await aenter aexit aiter anext"
)
# What a class can do beside its attributes, so that a class that stands for it on the other side can do it too.
SPECIAL = (*BINARY, *(f"__{name}__" for name in sorted(_OTHERS.split())))
# Builtin classes by name: those of values, and exceptions.
NAMED: dict[str, type] = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and (issubclass(kind, BaseException) or kind in _BY_VALUE or kind is object)
}


class Uncarriable(TypeError):
    """A value that cannot be carried: too large, too deep, or of no plain type."""


class Malformed(Exception):
    """Bytes that no codec has written."""


class Codec:
    """Writes values and reads them; `mutables` are the containers of the last message, in one order on both sides."""

    def __init__(self) -> None:
        self.mutables: list[object] = []
        # Of those, which stand in no other one: place in `mutables`, and the bytes that stand for it.
        self.roots: list[tuple[int, bytes]] = []
        # By identity, numbers of containers that both sides hold.
        self.lent: dict[int, int] = {}
        self._out = bytearray()
        self._text = b""
        self._place = self._depth = self._inside = 0

    def reference(self, value: object) -> tuple[object, ...]:
        """What stands for a value that is not plain. Raises Uncarriable."""
        raise Uncarriable(f"{type(value).__name__} is no plain value")

    def resolve(self, reference: tuple[Foreign, ...]) -> object:
        """What a reference stands for. Raises Malformed."""
        raise Malformed("unknown reference")

    def shared(self, number: int, content: object) -> object:
        """The container that both sides hold under a number, which came with such a content."""
        return content

    def dumps(self, value: object) -> bytes:
        """The bytes of a value. Raises Uncarriable."""
        kept = self._out, self._depth, self._inside
        self._out, self._depth, self._inside, self.mutables, self.roots = bytearray(), 0, 0, [], []
        try:
            self._with_room(self._put, value)
            if len(self._out) > MOST_BYTES:
                raise Uncarriable(f"a value of {len(self._out)} bytes; at most {MOST_BYTES} are carried")
            return bytes(self._out)
        finally:
            self._out, self._depth, self._inside = kept

    def loads(self, text: bytes) -> object:
        """The value of some bytes. Raises Malformed."""
        kept = self._text, self._place, self._depth, self._inside
        self._text, self._place, self._depth, self._inside, self.mutables, self.roots = text, 0, 0, 0, [], []
        try:
            value = self._with_room(self._take)
            if self._place != len(text):
                raise Malformed("bytes left over")
            return value
        except Malformed:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError, struct.error, ImportError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error
        finally:
            self._text, self._place, self._depth, self._inside = kept

    def _with_room(self, work: Callable[..., object], *arguments: object) -> object:
        """Deep values need more frames than a program may have."""
        if sys.getrecursionlimit() >= _FRAMES * MOST_DEPTH:
            return work(*arguments)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _FRAMES * MOST_DEPTH)
        try:
            return work(*arguments)
        finally:
            sys.setrecursionlimit(limit)

    # Writing.

    def _put(self, value: object) -> None:
        writer = _WRITERS.get(type(value))
        if writer is not None:
            writer(self, value)
        elif type(value).__module__ in _WRITERS_BY_MODULE:
            _WRITERS_BY_MODULE[type(value).__module__](self, value)
        else:
            self._put_reference(value)

    def _put_reference(self, value: object) -> None:
        reference = self.reference(value)
        self._out += b"X"
        self._put(reference)

    def _sized(self, tag: bytes, content: bytes) -> None:
        if len(self._out) + len(content) > MOST_BYTES:
            raise Uncarriable(f"a value of more than {MOST_BYTES} bytes")
        self._out += tag + _COUNT.pack(len(content)) + content

    def _put_int(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 63:
            self._out += b"i" + _WORD.pack(value)
        else:
            self._sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _put_elements(self, tag: bytes, elements: Iterable[object], count: int) -> None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Uncarriable(f"a value deeper than {MOST_DEPTH}")
        self._out += tag + _COUNT.pack(count)
        for element in elements:
            self._put(element)
            if len(self._out) > MOST_BYTES:
                raise Uncarriable(f"a value of more than {MOST_BYTES} bytes")
        self._depth -= 1

    def _mutable(self, value: object, write: Callable[[], None]) -> None:
        if id(value) in self.lent:
            self._out += b"L" + _WORD.pack(self.lent[id(value)])
        place, start = len(self.mutables), len(self._out)
        self.mutables.append(value)
        self._inside += 1
        write()
        self._inside -= 1
        if not self._inside:
            self.roots.append((place, bytes(self._out[start:])))

    def _put_list(self, value: list[object]) -> None:
        self._mutable(value, lambda: self._write_list(value))

    def _write_list(self, value: list[object]) -> None:
        if len(value) >= _LONG_LISTS:
            kinds = set(map(type, value))
            try:
                if kinds == {int}:
                    return self._sized(b"j", array("q", cast("list[int]", value)).tobytes())
                if kinds == {float}:
                    return self._sized(b"g", array("d", cast("list[float]", value)).tobytes())
            except OverflowError:
                pass
        return self._put_elements(b"l", list(value), len(value))

    def _put_pairs(self, tag: bytes, value: dict[object, object]) -> None:
        pairs = [part for pair in list(value.items()) for part in pair]
        self._put_elements(tag, pairs, len(pairs) // 2)

    def _put_numpy(self, value: Foreign) -> None:
        numpy = sys.modules["numpy"]
        if type(value) is numpy.ndarray:
            self._mutable(value, lambda: self._write_array(value))
        elif isinstance(value, numpy.generic) and (kind := _kind(value.dtype)) is not None:
            self._put_parts(b"u", (kind, value.tobytes()))
        elif isinstance(value, numpy.dtype) and value.kind in _NUMERIC_KINDS:
            self._put_parts(b"U", (value.str,))
        else:
            self._put_reference(value)

    def _write_array(self, value: Foreign) -> None:
        if (kind := _kind(value.dtype)) is not None:
            self._put_parts(b"a", (kind, tuple(value.shape), value.tobytes()))
        elif value.dtype.kind == "O":
            self._put_parts(b"A", (tuple(value.shape), *value.ravel().tolist()))
        else:
            raise Uncarriable(f"an array of {value.dtype}")

    def _put_parts(self, tag: bytes, parts: tuple[object, ...]) -> None:
        self._put_elements(tag, parts, len(parts))

    def _put_decimal(self, value: object) -> None:
        self._put_parts(b"M", (str(value),)) if type(value).__name__ == "Decimal" else self._put_reference(value)

    def _put_fraction(self, value: Foreign) -> None:
        if type(value).__name__ == "Fraction":
            self._put_parts(b"R", (value.numerator, value.denominator))
        else:
            self._put_reference(value)

    def _put_date(self, value: Foreign) -> None:
        name = type(value).__name__
        if name == "timedelta":
            self._put_parts(b"W", (name, value.days, value.seconds, value.microseconds))
        elif name in ("date", "datetime", "time"):
            self._put_parts(b"W", (name, value.isoformat()))
        elif name == "timezone":
            self._put_parts(b"W", (name, value.utcoffset(None)))
        else:
            self._put_reference(value)

    def _put_path(self, value: object) -> None:
        if type(value).__name__ in ("PosixPath", "PurePosixPath"):
            self._put_parts(b"P", (type(value).__name__, str(value)))
        else:
            self._put_reference(value)

    def _put_pattern(self, value: Foreign) -> None:
        if type(value).__name__ == "Pattern":
            self._put_parts(b"x", (value.pattern, value.flags))
        else:
            self._put_reference(value)

    # Reading.

    def _take(self) -> object:
        tag = self._text[self._place : self._place + 1]
        self._place += 1
        reader = _READERS.get(tag)
        if reader is None:
            raise Malformed(f"unknown tag {tag!r}")
        return reader(self)

    def _content(self) -> bytes:
        (size,) = self._unpack(_COUNT)
        content = self._text[self._place : self._place + size]
        if len(content) != size:
            raise Malformed("cut off")
        self._place += size
        return content

    def _unpack(self, layout: struct.Struct) -> tuple[Foreign, ...]:
        found = layout.unpack_from(self._text, self._place)
        self._place += layout.size
        return found

    def _elements(self, times: int = 1) -> list[Foreign]:
        """So many values, of which there are no more than bytes left."""
        (count,) = self._unpack(_COUNT)
        if count * times > len(self._text) - self._place:
            raise Malformed("cut off")
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Malformed("too deep")
        found = [self._take() for _ in range(count * times)]
        self._depth -= 1
        return found

    def _taken(self, value: Foreign, fill: Callable[[Foreign, list[Foreign]], object], times: int = 1) -> object:
        """A container, which its content comes after."""
        place, start = len(self.mutables), self._place - 1
        self.mutables.append(value)
        self._inside += 1
        fill(value, self._elements(times))
        self._inside -= 1
        if not self._inside:
            self.roots.append((place, self._text[start : self._place]))
        return value

    def _whole(self, make: Callable[[], Foreign]) -> object:
        """A container that is made of its whole content."""
        place, start = len(self.mutables), self._place - 1
        self.mutables.append(None)
        self._inside += 1
        value = self.mutables[place] = make()
        self._inside -= 1
        if not self._inside:
            self.roots.append((place, self._text[start : self._place]))
        return value

    def _take_packed(self, kind: str) -> list[Foreign]:
        numbers = array(kind)
        numbers.frombytes(self._content())
        return numbers.tolist()

    def _take_deque(self) -> object:
        def make() -> object:
            most, *elements = self._elements()
            return deque(elements, most)

        return self._whole(make)

    def _take_defaultdict(self) -> object:
        def make() -> object:
            factory, *pairs = self._elements()
            return defaultdict(_FACTORIES[factory], zip(pairs[::2], pairs[1::2], strict=True))

        return self._whole(make)

    def _take_array(self) -> object:
        def make() -> object:
            import numpy

            kind, shape, content = self._elements()
            return numpy.frombuffer(content, _numeric(kind)).reshape(shape).copy()

        return self._whole(make)

    def _take_objects(self) -> object:
        def make() -> object:
            import numpy

            shape, *elements = self._elements()
            found = numpy.empty(len(elements), dtype=object)
            found[:] = elements
            return found.reshape(shape)

        return self._whole(make)

    def _take_scalar(self) -> object:
        import numpy

        kind, content = self._elements()
        return numpy.frombuffer(content, _numeric(kind), count=1)[0]

    def _take_lent(self) -> object:
        (number,) = self._unpack(_WORD)
        return self.shared(number, self._take())

    def _take_reference(self) -> object:
        reference = self._take()
        if type(reference) is not tuple or not reference:
            raise Malformed("no reference")
        return self.resolve(reference)


def _kind(found: Foreign) -> object:
    """What says which numbers, or named fields of numbers, an array holds; None where it holds anything else."""
    if found.names is None:
        return found.str if found.kind in _NUMERIC_KINDS else None
    fields = tuple((name, found.fields[name][0]) for name in found.names)
    is_plain = all(kind.kind in _NUMERIC_KINDS for _, kind in fields) and found.isalignedstruct is False
    is_packed = found.itemsize == sum(kind.itemsize for _, kind in fields)
    return tuple((name, kind.str) for name, kind in fields) if is_plain and is_packed else None


def _numeric(kind: Foreign) -> Foreign:
    import numpy

    found = numpy.dtype(list(kind) if type(kind) is tuple else kind)
    if _kind(found) is None or found.hasobject:
        raise Malformed("no array of numbers")
    return found


def _decimal(codec: Codec) -> object:
    from decimal import Decimal

    (text,) = codec._elements()
    return Decimal(text)


def _fraction(codec: Codec) -> object:
    from fractions import Fraction

    numerator, denominator = codec._elements()
    if type(numerator) is not int or type(denominator) is not int:
        raise Malformed("no fraction")
    return Fraction(numerator, denominator)


def _date(codec: Codec) -> object:
    import datetime

    name, *parts = codec._elements()
    if name == "timedelta":
        return datetime.timedelta(*parts)
    if name == "timezone":
        return datetime.timezone(*parts)
    kind: Foreign = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}[name]
    return kind.fromisoformat(*parts)


def _path(codec: Codec) -> object:
    import pathlib

    name, text = codec._elements()
    return (pathlib.Path if name == "PosixPath" else pathlib.PurePosixPath)(text)


def _dictionary(found: dict[Foreign, Foreign], pairs: list[Foreign]) -> None:
    found.update(zip(pairs[::2], pairs[1::2], strict=True))


def _no_float(codec: Codec, value: float) -> None:
    codec._out += b"f" + _FLOAT.pack(value)


def _view(kind: bytes) -> Callable[[Codec, Foreign], None]:
    return lambda codec, value: codec._put_parts(b"V", (kind.decode(), *value))


def _take_view(codec: Codec) -> object:
    kind, *elements = codec._elements()
    if kind == "memory":
        return memoryview(elements[0])
    if kind == "values":
        return dict(enumerate(elements)).values()
    return dict.fromkeys(elements).keys() if kind == "keys" else dict(elements).items()


_WRITERS: dict[type, Callable[[Codec, Foreign], None]] = {
    type(None): lambda codec, value: codec._out.extend(b"N"),
    bool: lambda codec, value: codec._out.extend(b"T1" if value else b"T0"),
    int: Codec._put_int,
    float: _no_float,
    complex: lambda codec, value: codec._out.extend(b"c" + _COMPLEX.pack(value.real, value.imag)),
    str: lambda codec, value: codec._sized(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda codec, value: codec._sized(b"b", value),
    bytearray: lambda codec, value: codec._mutable(value, lambda: codec._sized(b"y", bytes(value))),
    list: Codec._put_list,
    tuple: lambda codec, value: codec._put_elements(b"t", value, len(value)),
    dict: lambda codec, value: codec._mutable(value, lambda: codec._put_pairs(b"d", value)),
    set: lambda codec, value: codec._mutable(value, lambda: codec._put_elements(b"e", list(value), len(value))),
    frozenset: lambda codec, value: codec._put_elements(b"z", list(value), len(value)),
    deque: lambda codec, value: codec._mutable(value, lambda: codec._put_parts(b"q", (value.maxlen, *value))),
    Counter: lambda codec, value: codec._mutable(value, lambda: codec._put_pairs(b"C", value)),
    OrderedDict: lambda codec, value: codec._mutable(value, lambda: codec._put_pairs(b"O", value)),
    defaultdict: lambda codec, value: codec._mutable(value, lambda: _put_defaultdict(codec, value)),
    range: lambda codec, value: codec._put_parts(b"r", (value.start, value.stop, value.step)),
    slice: lambda codec, value: codec._put_parts(b"S", (value.start, value.stop, value.step)),
    type(...): lambda codec, value: codec._out.extend(b"."),
    type(NotImplemented): lambda codec, value: codec._out.extend(b"!"),
    memoryview: lambda codec, value: codec._put_parts(b"V", ("memory", value.tobytes())),
    type({}.keys()): _view(b"keys"),
    type({}.values()): _view(b"values"),
    type({}.items()): _view(b"pairs"),
}
_WRITERS_BY_MODULE: dict[str, Callable[[Codec, Foreign], None]] = {
    "numpy": Codec._put_numpy,
    "numpy.dtypes": Codec._put_numpy,
    "decimal": Codec._put_decimal,
    "fractions": Codec._put_fraction,
    "datetime": Codec._put_date,
    "pathlib": Codec._put_path,
    "re": Codec._put_pattern,
}


def _put_defaultdict(codec: Codec, value: defaultdict[Foreign, Foreign]) -> None:
    factory = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), None)
    if factory is None:
        # What it would make of a missing key is code of its side.
        return codec._put_pairs(b"d", value)
    pairs = [part for pair in list(value.items()) for part in pair]
    return codec._put_parts(b"D", (factory, *pairs))


def _truth(codec: Codec) -> bool:
    mark = codec._text[codec._place : codec._place + 1]
    codec._place += 1
    if mark not in (b"0", b"1"):
        raise Malformed("no truth")
    return mark == b"1"


_READERS: dict[bytes, Callable[[Codec], object]] = {
    b"N": lambda codec: None,
    b"T": lambda codec: _truth(codec),
    b"i": lambda codec: codec._unpack(_WORD)[0],
    b"I": lambda codec: int.from_bytes(codec._content(), "little", signed=True),
    b"f": lambda codec: codec._unpack(_FLOAT)[0],
    b"c": lambda codec: complex(*codec._unpack(_COMPLEX)),
    b"s": lambda codec: codec._content().decode("utf-8", "surrogatepass"),
    b"b": Codec._content,
    b"y": lambda codec: codec._whole(lambda: bytearray(codec._content())),
    b"l": lambda codec: codec._taken([], list.extend),
    b"j": lambda codec: codec._whole(lambda: codec._take_packed("q")),
    b"g": lambda codec: codec._whole(lambda: codec._take_packed("d")),
    b"t": lambda codec: tuple(codec._elements()),
    b"d": lambda codec: codec._taken({}, _dictionary, 2),
    b"e": lambda codec: codec._taken(set(), set.update),
    b"z": lambda codec: frozenset(codec._elements()),
    b"q": Codec._take_deque,
    b"C": lambda codec: codec._taken(Counter(), lambda found, pairs: dict.update(found, _pairs(pairs)), 2),
    b"O": lambda codec: codec._taken(OrderedDict(), _dictionary, 2),
    b"D": Codec._take_defaultdict,
    b"r": lambda codec: range(*codec._elements()),
    b"S": lambda codec: slice(*codec._elements()),
    b".": lambda codec: ...,
    b"!": lambda codec: NotImplemented,
    b"V": _take_view,
    b"a": Codec._take_array,
    b"A": Codec._take_objects,
    b"u": Codec._take_scalar,
    b"U": lambda codec: _numeric(*codec._elements()),
    b"M": _decimal,
    b"R": _fraction,
    b"W": _date,
    b"P": _path,
    b"x": lambda codec: re.compile(*codec._elements()),
    b"L": Codec._take_lent,
    b"X": Codec._take_reference,
}


def _pairs(parts: list[Foreign]) -> dict[Foreign, Foreign]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def refresh(old: Foreign, new: Foreign, lent: dict[int, int]) -> None:
    """Give a container the content of another of its type; what both hold stays the same object. Raises TypeError.

    lent: by identity, what stands for itself on both sides and is not to be filled with anything else's content.
    """
    if old is new:
        return
    if type(old) is not type(new):
        raise TypeError("an argument that the response has changed cannot be carried")
    if type(old) is list:
        old[:] = [_kept(before, after, lent) for before, after in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        kept = {key: _kept(old.get(key), after, lent) for key, after in new.items()}
        old.clear()
        (dict.update if type(old) is Counter else type(old).update)(old, kept)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old[slice(None) if type(old) is bytearray else ...] = new


def _kept(before: Foreign, after: Foreign, lent: dict[int, int]) -> Foreign:
    is_one = type(before) is type(after) and type(before) in (list, dict, set, deque, defaultdict, Counter, OrderedDict)
    if is_one and id(before) not in lent and id(after) not in lent:
        refresh(before, after, lent)
        return before
    return after


class Link:
    """One end of the channel: frames of bounded length, one after the other."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._read, self._write = os.read, os.write

    def send(self, frame: bytes) -> None:
        """Write a frame. Raises EOFError when the other side is gone."""
        left = memoryview(_COUNT.pack(len(frame)) + frame)
        try:
            while left:
                left = left[self._write(self.descriptor, left) :]
        except OSError as error:
            raise EOFError from error

    def receive(self) -> bytes:
        """The next frame. Raises EOFError when the other side is gone, Malformed when it is too long."""
        # Most frames are short and come in one piece.
        first = self._some(_COUNT.size + 65536)
        while len(first) < _COUNT.size:
            first += self._some(65536)
        (size,) = _COUNT.unpack_from(first)
        if size > MOST_BYTES:
            raise Malformed(f"a frame of {size} bytes")
        pieces, have = [first[_COUNT.size :]], len(first) - _COUNT.size
        while have < size:
            pieces.append(self._some(min(size - have, 1 << 20)))
            have += len(pieces[-1])
        if have != size:
            raise Malformed("more than one frame at a time")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _some(self, size: int) -> bytes:
        try:
            found = self._read(self.descriptor, size)
        except OSError as error:
            raise EOFError from error
        if not found:
            raise EOFError
        return found


def chances() -> Iterator[tuple[str, object]]:
    """The states of what is random in this process, by library, as plain values."""
    if "random" in sys.modules:
        yield "random", cast("Foreign", sys.modules["random"]).getstate()
    if "numpy.random" in sys.modules:
        name, keys, *rest = cast("Foreign", sys.modules["numpy.random"]).get_state()
        yield "numpy", (name, keys.tobytes(), *rest)


def sow(library: str, state: Foreign) -> None:
    """Bring what is random in this process into such a state."""
    if library == "random":
        import random

        random.setstate(state)
    else:
        import numpy

        name, keys, *rest = state
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))


def chance_of(value: Foreign) -> tuple[object, ...] | None:
    """A source of random numbers by library and state; None for anything else."""
    kind = type(value)
    if kind.__module__ == "random" and kind.__name__ == "Random":
        return "random", value.getstate()
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "Generator":
        return "numpy", value.bit_generator.state
    return None


def chance_in(library: str, state: Foreign) -> object:
    """A source of random numbers in such a state."""
    if library == "random":
        import random

        source = random.Random()
        source.setstate(state)
        return source
    import numpy

    bits = getattr(numpy.random, state["bit_generator"])()
    bits.state = state
    return numpy.random.Generator(bits)


# How a process ends where the response is gone, or has written to the channel what no response writes.
LOST, BROKEN = 14, 15


def end(status: int, text: str = "") -> NoReturn:
    """End this process at once, whatever runs in it."""
    if text:
        os.write(2, text.encode(errors="replace"))
    os._exit(status)


def plain(value: object) -> object:
    """The value, or the text of one that cannot be carried."""
    try:
        Codec().dumps(value)
    except Uncarriable:
        return str(value)
    return value


def parameters(value: object) -> tuple[str, ...] | None:
    """Names of the parameters of a function that has no others than such as a call may not leave out."""
    if not isinstance(value, FunctionType) or value.__defaults__:
        return None
    code = value.__code__
    others = code.co_kwonlyargcount or code.co_posonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
    return None if others else code.co_varnames[: code.co_argcount]


def differs(kind: type, name: str) -> bool:
    """Whether a class has a method of its own, and not object's."""
    found = getattr(kind, name, None)
    return found is not None and found is not getattr(object, name, None)
