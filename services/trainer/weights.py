"""The policy's weights, gathered by all ranks into the weight store, and taken from it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from ulid import ULID

from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.deepspeed_fields import put_values
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.errors import IntegrityError, InvalidInput
from spo.manifest_folder import Manifest
from spo.model.folder import TENSORS_FILE, Adapter, open_tensors, tensor_shapes
from spo.model.folder_names import FolderNames, tensors_of
from spo.model.logprobs import adapter_name
from spo.observability import WEIGHTS_BYTES, WEIGHTS_PUSH_SECONDS
from spo.weights.store import StoredVersion, WeightStore

SHARD_BYTES = 1 << 30
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


@WEIGHTS_PUSH_SECONDS.time()
def store_weights(ranks: Ranks, engine: DeepSpeedEngine, store: WeightStore, new: NewVersion) -> StoredVersion | None:
    """Gather the weights and store them as `new`, each rank its share of the files; rank 0 gets the version.

    Raises, on rank 0 alone, Conflict when a newer owner has written the version, and what any rank met while writing.
    """
    if not ranks.leads:
        place: _Place | None = ranks.share(None)
        if place:
            _write_together(ranks, engine, place)
        return None
    asked = False

    def write_into(folder: Path) -> None:
        nonlocal asked
        place = _Place(folder / f".{ULID()}", adapter=new.adapter is not None)
        place.mark.touch()
        asked, _ = True, ranks.share(place)
        for problem in _write_together(ranks, engine, place):
            raise problem
        if new.adapter:
            new.adapter.write(folder)

    dtype = str(next(engine.model.module.parameters()).dtype).removeprefix("torch.")
    try:
        written = store.write_files(new.run_id, new.head(dtype), write_into, sum(engine.parameter_bytes().values()))
    finally:
        # Where there was no room even for a folder: the other ranks wait for its name.
        if not asked:
            ranks.share(None)
    WEIGHTS_BYTES.inc(written.stored_bytes)
    return written


def _write_together(ranks: Ranks, engine: DeepSpeedEngine, place: _Place) -> list[OSError]:
    """Write this rank's share of the files; what went wrong on any rank, after all have written.

    The ranks that see the mark have shares: a cache for an object store is on rank 0's machine only.
    """
    writers = [rank for rank, sees in enumerate(ranks.gather(ranks.leads or os.access(place.mark, os.F_OK))) if sees]
    shards = {TENSORS_FILE: _adapter_units(engine)} if place.adapter else _shards(_model_units(engine))
    own = {
        name: units
        for number, (name, units) in enumerate(shards.items())
        if writers[number % len(writers)] == ranks.rank
    }
    problem = None
    makers = {name: unit for units in own.values() for unit in units for name in unit.sources}
    parameters = engine.full_parameters(makers)
    try:
        if ranks.leads:
            place.mark.unlink()
        _write_shards(own, _made(makers, parameters), place.mark.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        problem = OSError(getattr(error, "errno", None), f"rank {ranks.rank}: {error}")
    finally:
        # Where writing fails half-way: the other ranks wait in the gathers that are left.
        deque(parameters, maxlen=0)
    return [found for found in ranks.gather(problem) if found]


@dataclass(frozen=True)
class _Unit:
    """Tensors in memory that together become what a file holds of them, and the bytes of these."""

    sources: frozenset[str]
    size_bytes: int
    make: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def _model_units(engine: DeepSpeedEngine) -> list[_Unit]:
    names = engine.folder_names
    return [_Unit(frozenset(found.sources), names.size_bytes(found), found.apply_apart) for found in names.to_stored]


def _adapter_units(engine: DeepSpeedEngine) -> list[_Unit]:
    def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {adapter_name(name): tensor for name, tensor in tensors.items()}

    return [_Unit(frozenset({name}), size, renamed) for name, size in engine.parameter_bytes().items()]


def _made(makers: Mapping[str, _Unit], parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """What each unit makes, once all of its parameters have come."""
    held: dict[str, Tensor] = {}
    for name, tensor in parameters:
        held[name] = tensor
        unit = makers[name]
        if unit.sources <= held.keys():
            yield unit.make({source: held.pop(source) for source in sorted(unit.sources)})


def _write_shards(shards: Mapping[str, Sequence[_Unit]], made: Iterator[dict[str, Tensor]], folder: Path) -> None:
    """Write files while the next one's parameters are gathered: at most two files of them are in memory."""
    with ThreadPoolExecutor(1) as writer:
        before: Future[None] | None = None
        for file, units in shards.items():
            tensors = {name: tensor for each in islice(made, len(units)) for name, tensor in each.items()}
            if before:
                before.result()
            before = writer.submit(save_file, tensors, folder / file)
        if before:
            before.result()


@torch.no_grad()
def take_weights(model: PreTrainedModel, files: Sequence[Path]) -> None:
    """Put published weights in place of a model's own. Raises IntegrityError when they are another model's."""
    names = FolderNames(model)
    found = tensor_shapes(files)
    for name in sorted(found.keys() | names.shapes.keys()):
        if found.get(name) != names.shapes.get(name):
            raise IntegrityError(f"{files[0].parent} holds {name} as {found.get(name)}, not {names.shapes.get(name)}")
    own = dict(tensors_of(model))
    with ExitStack() as opened:
        shards = [opened.enter_context(open_tensors(path)) for path in files]
        holders = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 - not a mapping
        for conversion in names.to_own:
            read = {name: holders[name].get_tensor(name) for name in conversion.sources}
            for name, values in conversion.apply(read).items():
                put_values(own[name], values)


def _shards(units: Sequence[_Unit]) -> dict[str, list[_Unit]]:
    """Units by file, in order; files have about SHARD_BYTES, whoever writes them."""
    shards: list[list[_Unit]] = []
    room = 0
    for unit in units:
        if room <= 0:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(unit)
        room -= unit.size_bytes
    return {f"model-{number:05d}.safetensors": units for number, units in enumerate(shards, start=1)}
