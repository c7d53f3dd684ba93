"""The policy's weights, gathered from all ranks into the weight store."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.errors import IntegrityError, InvalidInput
from spo.observability.metrics import WEIGHTS_BYTES, WEIGHTS_PUSH_SECONDS
from spo.weights.store import StoredVersion, WeightStore

SHARD_BYTES = 2 << 30
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
    """What a weight version is stored as: gathered after `step`, following `parent`, by the lease of `epoch`."""

    run_id: str
    version: int
    parent: int
    step: int
    epoch: int


@WEIGHTS_PUSH_SECONDS.time()
def store_weights(
    ranks: Ranks,
    engine: DeepSpeedEngine,
    store: WeightStore,
    new: NewVersion,
    *,
    keep: int,
    spare: Container[int] = (),
) -> StoredVersion | None:
    """Gather the weights (all ranks take part) and store them as `new`; rank 0 gets the stored version, others None.

    All but the newest `keep` versions and those in `spare` are removed. Raises Conflict when a newer owner has written
    the version.
    """
    parameters = engine.full_parameters()
    if not ranks.leads:
        deque(parameters, maxlen=0)
        return None
    dtype = str(next(engine.model.module.parameters()).dtype).removeprefix("torch.")
    try:
        written = store.write(
            new.run_id,
            new.version,
            parent=new.parent,
            step=new.step,
            dtype=dtype,
            shards=_shards(parameters),
            epoch=new.epoch,
            size_bytes=engine.parameter_bytes,
        )
    finally:
        # Where the store fails half-way: the other ranks wait in the gathers that are left.
        deque(parameters, maxlen=0)
    WEIGHTS_BYTES.inc(written.stored_bytes)
    store.prune(new.run_id, keep, spare)
    return written


@torch.no_grad()
def take_weights(model: nn.Module, files: Sequence[Path]) -> None:
    """Put published weights in place of a model's own. Raises IntegrityError when they are another model's."""
    parameters = dict(model.named_parameters())
    for path in files:
        for name, tensor in load_file(path).items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise IntegrityError(f"{path} holds {name} as {tuple(tensor.shape)}, which the model has not")
            parameters[name].copy_(tensor)


def _shards(parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Parameters in files of about SHARD_BYTES, one in memory at a time."""
    shard: dict[str, Tensor] = {}
    number = 1
    for name, parameter in parameters:
        shard[name] = parameter
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield _shard_name(number), shard
            shard, number = {}, number + 1
    if shard:
        yield _shard_name(number), shard


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"
