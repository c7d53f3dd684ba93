"""The policy's weights, gathered by all ranks into the weight store, and taken from it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor
from ulid import ULID

from services.trainer.checkpoints import write_tensors
from services.trainer.deepspeed_engine import (
    FileUnit,
    WeightSource,
    made_of,
    own_shards,
)
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.errors import InvalidInput
from spo.manifest_folder import Manifest
from spo.model.folder import Adapter
from spo.observability import WEIGHTS_BYTES, WEIGHTS_PUSH_SECONDS
from spo.weights.store import StoredVersion, WeightStore

# Deltas save what a network would carry; from a shared folder replicas read whole files in place.
REMOTE_ANCHOR_INTERVAL = 10


def run_store(run_id: str, weight_store_path: str, settings: Settings) -> WeightStore:
    """The store whose folder (or prefix) for the run is weight_store_path. Raises InvalidInput when it is another's."""
    place, _, name = weight_store_path.rpartition("/")
    if name != run_id:
        raise InvalidInput(f"the weight store of {run_id} cannot lie at {weight_store_path}")
    interval = settings.weight_anchor_interval or (REMOTE_ANCHOR_INTERVAL if "://" in place else 1)
    return WeightStore(place, cache_path=settings.weight_cache_path, anchor_interval=interval)


@dataclass(frozen=True)
class NewVersion:
    """What a weight version is stored as: gathered after `step`, following `parent`, by the lease of `epoch`.

    adapter: what the trained tensors adapt; None on every rank but rank 0, and where all weights are trained.
    """

    run_id: str
    version: int
    parent: int
    step: int
    epoch: int
    adapter: Adapter | None = None

    def head(self, dtype: str) -> Manifest:
        """What the manifest holds besides its files."""
        named = ("version", "parent", "step", "epoch")
        based = {"base_model": self.adapter.base_model} if self.adapter else {}
        return {name: vars(self)[name] for name in named} | {"dtype": dtype} | based


@dataclass(frozen=True)
class _Place:
    """Where all ranks write: the folder that holds `mark`. An adapter is one file, with peft's names."""

    mark: Path
    adapter: bool


@dataclass(frozen=True)
class Written:
    """What rank 0 knows of a version that was stored, and which ranks have a share of the files, as all know."""

    version: StoredVersion | None
    writers: Sequence[int]


@WEIGHTS_PUSH_SECONDS.time()
def store_weights(ranks: Ranks, source: WeightSource, store: WeightStore, new: NewVersion) -> Written:
    """Gather the weights and store them as `new`, each rank its share of the files; rank 0 gets the version.

    Raises, on rank 0 alone, Conflict when a newer owner has written the version, and what any rank met while writing.
    """
    if not ranks.leads:
        place: _Place | None = ranks.share(None)
        return Written(None, _write_together(ranks, source, place)[1] if place else ())
    writers: Sequence[int] = ()
    asked = False

    def write_into(folder: Path) -> None:
        nonlocal asked, writers
        place = _Place(folder / f".{ULID()}", adapter=new.adapter is not None)
        place.mark.touch()
        asked, _ = True, ranks.share(place)
        problems, writers = _write_together(ranks, source, place)
        for problem in problems:
            raise problem
        if new.adapter:
            new.adapter.write(folder)

    size_bytes = sum(source.parameter_bytes().values())
    try:
        written = store.write_files(new.run_id, new.head(source.dtype), write_into, size_bytes)
    finally:
        # Where there was no room even for a folder: the other ranks wait for its name.
        if not asked:
            ranks.share(None)
    WEIGHTS_BYTES.inc(written.stored_bytes)
    return Written(written, writers)


def _write_together(ranks: Ranks, source: WeightSource, place: _Place) -> tuple[list[OSError], list[int]]:
    """Write this rank's share of the files; what went wrong on any rank, after all have written, and who writes.

    The ranks that see the mark have shares: a cache for an object store is on rank 0's machine only.
    """
    writers = [rank for rank, sees in enumerate(ranks.gather(ranks.leads or os.access(place.mark, os.F_OK))) if sees]
    own = own_shards(source, writers, ranks.rank, adapter=place.adapter)
    problem = None
    makers = {name: unit for units in own.values() for unit in units for name in unit.sources}
    parameters = source.full_parameters(makers)
    try:
        if ranks.leads:
            place.mark.unlink()
        _write_shards(own, made_of(makers, parameters), place.mark.parent)
    except (OSError, RuntimeError) as error:
        problem = OSError(getattr(error, "errno", None), f"rank {ranks.rank}: {error}")
    finally:
        # Where writing fails half-way: the other ranks wait in the gathers that are left.
        deque(parameters, maxlen=0)
    return [found for found in ranks.gather(problem) if found], writers


def _write_shards(shards: Mapping[str, Sequence[FileUnit]], made: Iterator[dict[str, Tensor]], folder: Path) -> None:
    """Write files while the next one's parameters are gathered: at most two files of them are in memory."""
    with ThreadPoolExecutor(1) as writer:
        before: Future[None] | None = None
        for file, units in shards.items():
            taken = list(islice(made, len(units)))
            if len(taken) < len(units):
                # Of a copy, where other ranks see the folder by now than when it was begun.
                raise OSError(f"{file} cannot be made of what was copied")
            tensors = {name: tensor for each in taken for name, tensor in each.items()}
            if before:
                before.result()
            before = writer.submit(write_tensors, folder / file, tensors)
        if before:
            before.result()
