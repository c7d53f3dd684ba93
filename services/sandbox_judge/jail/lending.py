"""Lists, dicts and sets that the response and its tests both hold: a copy on either side, alike after each message.

They are carried by value, as everything plain. Of those that the other side may still look at later, what either side
changes is told to the other with the next message, and each side gets its own one back: `graph.nodes.append(4)` is seen
by the graph, and `basket.items() is basket.items()` where that gives one list. The response says which: what it gives
and has not made for the tests alone, and what it was given and has kept.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable

from services.sandbox_judge.jail.wire import Codec, Foreign, Uncarriable, refresh

LENT = (list, dict, set, deque, defaultdict, Counter, OrderedDict, bytearray)
# What either side looks through at each message: the newest, and no large ones.
MOST_LENT, MOST_BYTES, MOST_ELEMENTS = 32, 4096, 512
# References to a result that only a caller, its caller and the one who counts hold; to what stands in such a one.
_RESULT, _IN_A_RESULT = 3, 3
Changes = tuple[tuple[int, object], ...]


class Lending:
    """One side's copies, by the number that both give them."""

    def __init__(self, bytes_of: Callable[[object], bytes], step: int) -> None:
        """bytes_of: a value as it would be carried, raises Uncarriable; step: 1 or -1, from number to number."""
        self._bytes_of, self._step, self._last = bytes_of, step, 0
        self._held: dict[int, tuple[Foreign, bytes]] = {}
        # By identity.
        self.numbers: dict[int, int] = {}
        # Of the message that is being read.
        self._arriving: dict[int, object] = {}

    def lend(self, container: object) -> int:
        """The number of a container that the other side is to hold too; 0 where it would be too much to look through.

        It goes with it wherever it is written from now on.
        """
        if type(container) in LENT and id(container) not in self.numbers:
            self._last += self._step
            self.hold(self._last, container)
        return self.numbers.get(id(container), 0)

    def hold(self, number: int, container: Foreign) -> None:
        """Watch a container under a number, if it is one that is lent."""
        if type(container) not in LENT or len(container) > MOST_ELEMENTS:
            return
        try:
            content = self._bytes_of(container.copy())
        except (Uncarriable, RecursionError):
            return
        if len(content) > MOST_BYTES:
            return
        self._forget(number)
        self._held[number] = container, content
        self.numbers[id(container)] = number
        if len(self._held) > MOST_LENT:
            self._forget(next(iter(self._held)))

    def shared(self, number: int, content: object) -> object:
        """The container that has this number here; what has come for it where there is none."""
        if number in self._held:
            return self._held[number][0]
        return self._arriving.setdefault(number, content)

    def settle(self) -> bool:
        """Hold what a message has brought; whether there was any."""
        arriving, self._arriving = self._arriving, {}
        for number, container in arriving.items():
            self.hold(number, container)
        return bool(arriving)

    def changes(self) -> Changes:
        """What was changed here since the last message; what can no longer be carried is lent no more.

        None stands for such content of the response's.
        """
        changed: list[tuple[int, object]] = []
        for number, (container, before) in list(self._held.items()):
            # The copy is nobody's, and therefore carried with its content.
            copied = container.copy()
            try:
                content = self._bytes_of(copied)
            except (Uncarriable, RecursionError):
                self._forget(number)
                if self._step > 0:
                    # Nobody can say what the tests would see: an error there.
                    changed.append((number, None))
                continue
            if content != before:
                self._held[number] = container, content
                changed.append((number, copied))
            if len(content) > MOST_BYTES:
                # Told this once more, then it is looked through no longer.
                self._forget(number)
        return tuple(changed)

    def take(self, changes: Changes) -> None:
        """Change here what the other side has changed. Raises TypeError for another kind of container, or none."""
        for number, content in changes:
            if type(number) is int and number in self._held:
                container, _ = self._held[number]
                refresh(container, content, self.numbers)
                self._held[number] = container, self._bytes_of(container.copy())

    def _forget(self, number: int) -> None:
        if number in self._held:
            container, _ = self._held.pop(number)
            self.numbers.pop(id(container), None)


class LendingCodec(Codec):
    """Writes a container that is lent with its number, and gives the one here for it."""

    def __init__(self, bytes_of: Callable[[object], bytes], step: int) -> None:
        """As `Lending`."""
        super().__init__()
        self.lending = Lending(bytes_of, step)
        self.lent = self.lending.numbers

    def loads(self, text: bytes) -> object:
        """The value of some bytes. Raises Malformed."""
        value = super().loads(text)
        kept = self.mutables, self.roots
        if self.lending.settle():
            self.mutables, self.roots = kept
        return value

    def shared(self, number: int, content: object) -> object:
        """The container here that is lent under a number."""
        return self.lending.shared(number, content)

    def lend_each(self, values: Iterable[object]) -> None:
        """Lend those of the values that are containers."""
        for value in values:
            self.lending.lend(value)


def holders(container: object) -> int:
    """How many hold a container, to be compared with what this says of it at another time, asked in the same way."""
    return sys.getrefcount(container)


def kept_in(result: object) -> list[object]:
    """Containers that are a result, or stand in a tuple that is one, and that others hold than who asks and its caller.

    Nobody but who has made it can change any other later.
    """
    if type(result) is tuple:
        return [each for each in result if type(each) in LENT and sys.getrefcount(each) > _IN_A_RESULT]
    return [result] if type(result) in LENT and sys.getrefcount(result) > _RESULT else []
