"""Which fault comes when: rounds in which each kind comes once, some more often, in an order that the seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.faults.processes import PROCESSES, RUNNERS
from tests.chaos.faults.requests import REQUESTS
from tests.chaos.faults.storage import STORAGE
from tests.chaos.faults.store import STORE
from tests.chaos.faults.surroundings import SURROUNDINGS
from tests.chaos.platform import ChaosPlatform

ALL = (*PROCESSES, *RUNNERS, *STORE, *STORAGE, *SURROUNDINGS, *REQUESTS)
# How many faults that are not possible yet may wait for their time.
LONGEST_QUEUE = 8
# After so many of the others each kind that is to come often has come again.
OTHERS_BETWEEN = 5


class Schedule:
    """The same seed gives the same faults in the same order with the same choices; only their times are the run's."""

    def __init__(self, seed: int, faults: Sequence[Fault]) -> None:
        self._seed = seed
        self._coming = self._rounds(faults)
        self._waiting: list[tuple[int, Fault]] = []

    def _rounds(self, faults: Sequence[Fault]) -> Iterator[tuple[int, Fault]]:
        order, number = Random(self._seed), 0
        often = [fault for fault in faults if fault.often]
        others = [fault for fault in faults if not fault.often]
        while True:
            coming = order.sample(others, len(others))
            for begin in range(0, max(1, len(others)), OTHERS_BETWEEN):
                part = [*coming[begin : begin + OTHERS_BETWEEN], *often]
                for fault in order.sample(part, len(part)) if often else part:
                    number += 1
                    yield number, fault

    def inflict(self, stage: Stage) -> tuple[Fault, Inflicted] | None:
        """Inflict the next fault that is possible now; the ones before it keep their place."""
        for place in range(LONGEST_QUEUE):
            if place == len(self._waiting):
                self._waiting.append(next(self._coming))
            number, fault = self._waiting[place]
            inflicted = fault.inflict(stage, Random(f"{self._seed}:{number}"))
            if inflicted:
                del self._waiting[place]
                return fault, inflicted
        return None


def possible_faults(platform: ChaosPlatform, kinds: Sequence[str] = ()) -> tuple[list[Fault], list[str]]:
    """The faults that can be inflicted on this machine, and the kinds that cannot.

    kinds: these alone, or with a minus before each all but these.
    """
    named = {kind.removeprefix("-") for kind in kinds}
    without = bool(kinds) and all(kind.startswith("-") for kind in kinds)
    there = [fault for fault in ALL if platform.programs or fault not in RUNNERS]
    wanted = [fault for fault in there if not kinds or (fault.kind in named) != without]
    known = sorted(fault.kind for fault in there)
    if unknown := named - set(known):
        raise SystemExit(f"no such kinds of faults: {sorted(unknown)}; there are {known}")
    impossible = set()
    if not platform.clocks.works:
        impossible |= {"clock ahead", "clock behind", "redis clock ahead", "redis clock behind"}
    if not platform.storage.works:
        impossible |= {"storage read-only", "storage broken", "storage away"}
    if not platform.state_disk.is_small:
        impossible |= {"disk full", "redis disk full"}
    if platform.trainer_ranks == 1:
        impossible |= {"kill rank"}
    return [fault for fault in wanted if fault.kind not in impossible], sorted(impossible)
