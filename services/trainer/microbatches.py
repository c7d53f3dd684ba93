"""How a batch is cut: over ranks, and into micro-batches of one forward and backward each.

What bounds a micro-batch is its tokens: memory and time follow them. Every rank makes equally many passes, because a
pass ends in collectives. Where the loss compares the trajectories of a prompt, they stay together in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.trainer.batches import TrainingSample, length_of
from spo.algorithm.token_batch import TokenBatch
from spo.spec.job_spec import TrainerSpec

# Rows that stay together: a group where the loss compares its trajectories, else a single one.
Unit = list[TrainingSample]


@dataclass(frozen=True)
class ForwardLimits:
    """What one forward on one rank may hold; a unit that exceeds them alone is a forward of its own.

    tokens: padding included, which there is unless `packed`. rows: trajectories, None: as many as fit.
    """

    tokens: int
    rows: int | None = None
    packed: bool = True

    @classmethod
    def of(cls, trainer: TrainerSpec, *, packed: bool) -> ForwardLimits:
        """A job's; packed: its model computes without padding."""
        return cls(trainer.max_tokens_per_micro_batch, trainer.micro_batch_size, packed)

    def hold(self, rows: int, tokens: int, longest: int) -> bool:
        """Whether so many rows, of so many tokens in all and the longest of so many, may be one forward."""
        return (self.rows is None or rows <= self.rows) and (tokens if self.packed else rows * longest) <= self.tokens


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
    rows: Sequence[TrainingSample], count: int, world_size: int, limits: ForwardLimits, *, whole_groups: bool
) -> list[list[Minibatch]]:
    """Each rank's minibatches, of similar length and equal size (nearly so with `whole_groups`), cut by `cut`.

    Fewer than `count` where there are fewer groups.
    """
    shares: list[list[Minibatch]] = [[] for _ in range(world_size)]
    for units in _balanced(_units(rows, whole_groups=whole_groups), count):
        part = _rows(units)
        if not part:
            continue
        for share, micro_batches in zip(shares, cut(part, world_size, limits, whole_groups=whole_groups), strict=True):
            share.append(Minibatch(micro_batches, len(part)))
    return shares


def cut(
    rows: Sequence[TrainingSample], world_size: int, limits: ForwardLimits, *, whole_groups: bool
) -> list[list[MicroBatch]]:
    """Each rank's micro-batches, as many on every rank, of trajectories of similar length.

    Ranks get equally many trajectories (nearly so with `whole_groups`) of similar total length.
    """
    if not rows:
        return [[] for _ in range(world_size)]
    units = _units(rows, whole_groups=whole_groups)
    shares = [_gathered(share, limits) for share in _balanced(units, world_size)]
    passes = max(map(len, shares))
    smallest = min(units, key=_tokens)
    return [_filled(share, passes, smallest) for share in shares]


def _units(rows: Sequence[TrainingSample], *, whole_groups: bool) -> list[Unit]:
    if not whole_groups:
        return [[row] for row in rows]
    groups: dict[int, Unit] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _balanced(units: Sequence[Unit], shares: int) -> list[list[Unit]]:
    """Units go, the largest first, to the share that has the fewest rows so far, and of those the fewest tokens."""
    found: list[list[Unit]] = [[] for _ in range(shares)]
    loads = [(0, 0)] * shares
    for unit in sorted(units, key=lambda unit: (-len(unit), -_tokens(unit))):
        share = loads.index(min(loads))
        found[share].append(unit)
        loads[share] = (loads[share][0] + len(unit), loads[share][1] + _tokens(unit))
    return found


def _gathered(units: Sequence[Unit], limits: ForwardLimits) -> list[list[Unit]]:
    """Units of similar length together, as many in a forward as the limits allow."""
    forwards: list[list[Unit]] = []
    rows = tokens = 0
    for unit in sorted(units, key=_longest):
        rows, tokens = rows + len(unit), tokens + _tokens(unit)
        if forwards and limits.hold(rows, tokens, _longest(unit)):
            forwards[-1].append(unit)
        else:
            forwards.append([unit])
            rows, tokens = len(unit), _tokens(unit)
    return forwards


def _filled(forwards: list[list[Unit]], passes: int, spare: Unit) -> list[MicroBatch]:
    """Exactly `passes` micro-batches: forwards of several units are halved, then idle ones are added."""
    while len(forwards) < passes and any(len(units) > 1 for units in forwards):
        largest = max(range(len(forwards)), key=lambda index: len(forwards[index]))
        half = len(forwards[largest]) // 2
        forwards[largest : largest + 1] = [forwards[largest][:half], forwards[largest][half:]]
    micro_batches = [MicroBatch(_rows(units)) for units in forwards]
    return micro_batches + [MicroBatch(spare, idle=True)] * (passes - len(micro_batches))


def _rows(units: Sequence[Unit]) -> list[TrainingSample]:
    return [row for unit in units for row in unit]


def _tokens(unit: Unit) -> int:
    return sum(map(length_of, unit))


def _longest(unit: Unit) -> int:
    return max(map(length_of, unit))
