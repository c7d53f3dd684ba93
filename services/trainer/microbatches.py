"""How a batch is cut: over ranks, and into micro-batches of one forward and backward each.

Every rank makes equally many passes, because a pass ends in collectives. Where the loss compares the trajectories of a
prompt, they stay together in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.trainer.batches import TrainingSample, length_of
from spo.algorithm.token_batch import TokenBatch

Group = list[TrainingSample]


@dataclass
class MicroBatch:
    """The rows of one pass, and during a step their tensors.

    An idle one, of no weight, is there only to make the ranks' passes equal in number.
    """

    rows: Sequence[TrainingSample]
    idle: bool = False
    _batch: TokenBatch | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def weight(self) -> int:
        """Trajectories of the batch that it stands for."""
        return 0 if self.idle else len(self.rows)

    def batch(self, build: Callable[[Sequence[TrainingSample]], TokenBatch]) -> TokenBatch:
        """Its tensors, which `build` makes of the rows at the first call; they stay until `release`."""
        if self._batch is None:
            self._batch = build(self.rows)
        return self._batch

    def keep(self, batch: TokenBatch) -> None:
        """Have `batch` as its tensors from now on."""
        self._batch = batch

    def release(self) -> None:
        """Forget the tensors: the step is over."""
        self._batch = None


@dataclass(frozen=True)
class Minibatch:
    """What one rank gets of the trajectories of an optimiser step; size counts them over all ranks."""

    micro_batches: Sequence[MicroBatch]
    size: int


def cut_into_minibatches(
    rows: Sequence[TrainingSample], count: int, world_size: int, size: int, *, whole_groups: bool
) -> list[list[Minibatch]]:
    """Each rank's minibatches, of similar length and equal size (nearly so with `whole_groups`), cut by `cut`.

    Fewer than `count` where there are fewer groups.
    """
    if whole_groups:
        parts = [[row for group in share for row in group] for share in _balanced(_groups(rows), count)]
    else:
        by_length = sorted(rows, key=length_of)
        parts = [by_length[part::count] for part in range(count)]
    shares: list[list[Minibatch]] = [[] for _ in range(world_size)]
    for part in filter(None, parts):
        for share, micro_batches in zip(shares, cut(part, world_size, size, whole_groups=whole_groups), strict=True):
            share.append(Minibatch(micro_batches, len(part)))
    return shares


def cut(rows: Sequence[TrainingSample], world_size: int, size: int, *, whole_groups: bool) -> list[list[MicroBatch]]:
    """Each rank's micro-batches of at most `size` rows, sorted by length so that they need little padding.

    Ranks get equal shares of similar total length, nearly so with `whole_groups`: then a group larger than `size` is a
    micro-batch of its own.
    """
    if not rows:
        return [[] for _ in range(world_size)]
    if not whole_groups:
        by_length = sorted(rows, key=length_of)
        return [_consecutive(by_length[rank::world_size], size) for rank in range(world_size)]
    groups = _groups(rows)
    shares = [_packed(share, size) for share in _balanced(groups, world_size)]
    passes = max(map(len, shares))
    smallest = min(groups, key=_tokens)
    return [_filled(share, passes, smallest) for share in shares]


def _consecutive(rows: Sequence[TrainingSample], size: int) -> list[MicroBatch]:
    return [MicroBatch(list(rows[start : start + size])) for start in range(0, len(rows), size)]


def _groups(rows: Sequence[TrainingSample]) -> list[Group]:
    groups: dict[int, Group] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _balanced(groups: Sequence[Group], world_size: int) -> list[list[Group]]:
    """Groups go, the largest first, to the rank that has the fewest rows so far, and of those the fewest tokens."""
    shares: list[list[Group]] = [[] for _ in range(world_size)]
    loads = [(0, 0)] * world_size
    for group in sorted(groups, key=lambda group: (-len(group), -_tokens(group))):
        rank = loads.index(min(loads))
        shares[rank].append(group)
        loads[rank] = (loads[rank][0] + len(group), loads[rank][1] + _tokens(group))
    return shares


def _packed(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Groups of similar length together, at most `size` rows in a pack unless one group alone is larger."""
    packs: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: max(map(length_of, group))):
        if packs and sum(map(len, packs[-1])) + len(group) <= size:
            packs[-1].append(group)
        else:
            packs.append([group])
    return packs


def _filled(packs: list[list[Group]], passes: int, spare: Group) -> list[MicroBatch]:
    """The packs as exactly `passes` micro-batches: packs of several groups are halved, then idle ones are added."""
    while len(packs) < passes and any(len(pack) > 1 for pack in packs):
        largest = max(range(len(packs)), key=lambda index: len(packs[index]))
        half = len(packs[largest]) // 2
        packs[largest : largest + 1] = [packs[largest][:half], packs[largest][half:]]
    micro_batches = [MicroBatch([row for group in pack for row in group]) for pack in packs]
    return micro_batches + [MicroBatch(spare, idle=True)] * (passes - len(micro_batches))


def _tokens(group: Group) -> int:
    return sum(map(length_of, group))
