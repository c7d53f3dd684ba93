"""Lists, dicts and sets of the response that its tests hold too: a copy on either side, alike after each message.

They are carried by value, as everything plain. Of those that are attributes of its objects, or names of its module,
what either side changes is told to the other with the next message: `graph.nodes.append(4)` is seen by the graph.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

from services.sandbox_judge.jail.wire import Foreign, Uncarriable, refresh

LENT = (list, dict, set, deque, defaultdict, Counter, OrderedDict, bytearray)
# What either side looks through at each message: the newest, and no large ones.
MOST_LENT, MOST_BYTES, MOST_ELEMENTS = 16, 4096, 512
Changes = tuple[tuple[int, object], ...]


class Lending:
    """One side's copies, by the number that both give them."""

    def __init__(self, bytes_of: Callable[[object], bytes]) -> None:
        """bytes_of: a value as it would be carried. Raises Uncarriable."""
        self._bytes_of = bytes_of
        self._held: dict[int, tuple[Foreign, bytes]] = {}
        self._lent = 0

    def lend(self, container: object) -> int:
        """The number of a container of the response; 0 where it is too large to be looked through each time."""
        self._lent += 1
        return self._lent if self.hold(self._lent, container) else 0

    def hold(self, number: int, container: Foreign) -> bool:
        """Watch a container; whether it is one that is lent."""
        if type(container) not in LENT or len(container) > MOST_ELEMENTS:
            return False
        try:
            content = self._bytes_of(container)
        except Uncarriable:
            return False
        if len(content) > MOST_BYTES:
            return False
        self._held[number] = container, content
        while len(self._held) > MOST_LENT:
            del self._held[next(iter(self._held))]
        return True

    def changes(self) -> Changes:
        """What was changed here since the last message; what can no longer be carried is lent no more."""
        changed: list[tuple[int, object]] = []
        for number, (container, before) in list(self._held.items()):
            try:
                content = self._bytes_of(container)
            except Uncarriable:
                del self._held[number]
                continue
            if content != before:
                self._held[number] = container, content
                changed.append((number, container))
            if len(content) > MOST_BYTES:
                # Told this once more, then it is looked through no longer.
                del self._held[number]
        return tuple(changed)

    def take(self, changes: Changes) -> None:
        """Change here what the other side has changed. Raises TypeError for what is another kind of container."""
        for number, content in changes:
            if type(number) is int and number in self._held:
                container, _ = self._held[number]
                refresh(container, content)
                self._held[number] = container, self._bytes_of(container)
