"""A batch that cannot be learned from: found on one rank, raised on all of them, so that no rank waits for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from services.trainer.microbatches import MicroBatch
from services.trainer.ranks import Ranks
from spo.errors import InvalidInput

T = TypeVar("T")


class UnusableBatch(Exception):
    """Why nothing can be learned from the batch, the same on every rank; `first` is the first of its faults."""

    def __init__(self, faults: Sequence[tuple[str, InvalidInput]]) -> None:
        super().__init__("; ".join(message for message, _ in faults))
        self.first = faults[0][1]


def on_each(ranks: Ranks, micro_batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], T]) -> list[T]:
    """The results of `compute` on this rank's micro-batches. Every rank calls this alike.

    A fault in one does not keep the others from being computed: forwards gather parameters from all ranks. Raises
    UnusableBatch on every rank when `compute` raises InvalidInput on any.
    """
    results: list[T] = []
    faults: list[tuple[str, InvalidInput]] = []
    for micro_batch in micro_batches:
        try:
            results.append(compute(micro_batch))
        except InvalidInput as error:
            faults.append((_naming_trajectories(error, micro_batch), error))
    everywhere = [fault for found in ranks.gather(faults) for fault in found]
    if everywhere:
        raise UnusableBatch(everywhere)
    return results


def _naming_trajectories(error: InvalidInput, micro_batch: MicroBatch) -> str:
    """The error in words, with the ids of the trajectories that its pointers (/tensor/row) mean."""
    rows = [violation.pointer.rpartition("/")[2] for violation in error.violations]
    ids = {micro_batch.rows[int(row)].trajectory.trajectory_id for row in rows if row.isdigit()}
    return f"{error.message} ({', '.join(sorted(ids))})" if ids else str(error)
