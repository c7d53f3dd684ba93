"""How weights get into the live model, in each of vLLM's workers: from files, or by the broadcast of a trainer.

vLLM asks its factory for one transfer engine; `PolicyWeightTransfer` is ours. For a broadcast it asks the factory for
a second one: vLLM's own "nccl", or "gloo" from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed import Store  # type: ignore[attr-defined]
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from services.inference.broadcast import JoinedBroadcast
from spo.weights.assembly import whole_entries
from spo.weights.broadcast.gloo_group import GlooGroup
from spo.weights.broadcast.rendezvous import (
    BroadcastFailed,
    Roster,
    connect,
    local_address,
    read_roster,
    report_done,
)
from spo.weights.broadcast.shards import DigestCheck, layout

BACKEND = "spo-policy"
GLOO = "gloo"


@dataclass
class JoinInit(WeightTransferInitInfo):
    """The transfer to take part in, as its roster in the sender's store describes it."""

    joined: JoinedBroadcast


@dataclass
class NewWeights(WeightTransferUpdateInfo):
    """A whole model with the tensor names of checkpoints: safetensors files, or what the joined broadcast brings."""

    paths: list[str] = field(default_factory=list)


@dataclass
class GlooInit(WeightTransferInitInfo):
    """A group that gloo forms through the sender's store."""

    store: Store
    joined: JoinedBroadcast
    rank: int
    world_size: int
    ends: float


class GlooWeightTransfer(WeightTransferEngine[GlooInit, NCCLWeightTransferUpdateInfo]):
    """Receives what vLLM's NCCL engine would, over gloo and through CPU memory."""

    init_info_cls = GlooInit
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        joined = init_info.joined
        address = local_address(joined.host, joined.port)
        self._group = GlooGroup(
            init_info.store, joined.key, init_info.rank, init_info.world_size, address=address, ends=init_info.ends
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(self._received(update_info))

    def _received(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise BroadcastFailed("no broadcast was joined")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._group:
            self._group.destroy()
        self._group = None


class CheckedModel:
    """Stands before the model: what is loaded into it must be, in the end, the stored version's bytes."""

    def __init__(self, model: torch.nn.Module, roster: Roster) -> None:
        self._model: Any = model  # every vLLM model has load_weights; nn.Module does not say so
        self._check = DigestCheck(whole_entries(roster.manifest), roster.headers)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """As the model's."""
        return self._model.load_weights(self._checked(tensors))

    def _checked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._check.take(name, tensor)
            yield name, tensor

    def finish(self) -> None:
        """Raise IntegrityError where it was another version, or not all of it."""
        self._check.finish()


class PolicyWeightTransfer(WeightTransferEngine[JoinInit, NewWeights]):
    """Loads weights into the live model, in each of vLLM's workers."""

    init_info_cls = JoinInit
    update_info_cls = NewWeights
    _inner: WeightTransferEngine[Any, Any] | None = None

    def init_transfer_engine(self, init_info: JoinInit) -> None:
        """Form the group of one transfer; there is a new one for each. Raises BroadcastFailed."""
        self.shutdown()
        self._joined = joined = init_info.joined
        self._store = connect(joined.host, joined.port)
        self._roster = roster = read_roster(self._store, joined.key, wait_seconds=1.0)
        self._ends = time.monotonic() + roster.seconds
        rank = joined.first_rank + self.parallel_config.rank
        self._inner = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=joined.transport), self.vllm_config, self.device, self.model
        )
        if joined.transport == GLOO:
            info: WeightTransferInitInfo = GlooInit(self._store, joined, rank, roster.world_size, self._ends)
        else:
            from spo.weights.broadcast.nccl_group import BUFFER_BYTES

            info = NCCLWeightTransferInitInfo(
                nccl_unique_id_b64=roster.nccl_id,
                rank_offset=joined.first_rank,
                world_size=roster.world_size,
                packed=True,
                packed_buffer_size_bytes=BUFFER_BYTES,
            )
        self._within_deadline(lambda inner: inner.init_transfer_engine(info))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: NewWeights) -> None:
        if update_info.paths:
            model: Any = self.model
            model.load_weights(_tensors(update_info.paths))
            return
        roster, checked = self._roster, CheckedModel(self.model, self._roster)
        tensors = [tensor for header in roster.headers for tensor in layout(header)]
        described = NCCLWeightTransferUpdateInfo(
            names=[tensor.name for tensor in tensors],
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )

        def receive(inner: WeightTransferEngine[Any, Any]) -> None:
            inner.set_weight_update_target(checked, self.model_config)  # type: ignore[arg-type]
            inner.receive_weights(described)

        try:
            self._within_deadline(receive)
            checked.finish()
            report_done(self._store, self._joined.key)
        finally:
            self.shutdown()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self.model_config.hf_text_config.tie_word_embeddings:
            _tie_head_again(self.model)

    def shutdown(self) -> None:
        """Leave the group of the last transfer."""
        if self._inner:
            self._inner.shutdown()
        self._inner = None

    def _within_deadline(self, call: Callable[[WeightTransferEngine[Any, Any]], None]) -> None:
        """NCCL itself waits for ever: its communicator is aborted from outside."""
        inner = self._inner
        if inner is None:
            raise BroadcastFailed("no broadcast was joined")
        watch = threading.Timer(max(0.0, self._ends - time.monotonic()), inner.shutdown)
        watch.daemon = True
        watch.start()
        try:
            call(inner)
        finally:
            watch.cancel()


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of files that all workers of a machine map: each byte is in memory once, however many read it."""
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _tie_head_again(model: torch.nn.Module) -> None:
    """Give a tied output head the new embeddings: for the CPU its weights were packed into a kernel of their own.

    The reload packs anew what is sent, and a tied head is not sent: it went on with the old weights.
    """
    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in (module for module in tables if isinstance(module, ParallelLMHead)):
        head.weight = next(table for table in tables if not isinstance(table, ParallelLMHead)).weight
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Makes each of vLLM's worker processes import this module, and so register the transfers below."""


WeightTransferEngineFactory.register_engine(BACKEND, PolicyWeightTransfer)
WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransfer)
