"""Policy versions in the engine: files verified, adapters, broadcasts of a trainer, and their way into the live
model in each of vLLM's workers.

How weights get into the live model, in each of vLLM's workers: from files, or by the broadcast of a trainer.
vLLM asks its factory for one transfer engine; `PolicyWeightTransfer` is ours. For a broadcast it asks the factory for
a second one: vLLM's own "nccl", or "gloo" from here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
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
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from spo.errors import IntegrityError, SpoError, storage_faults_named
from spo.model.folder import (
    CONFIG_FILE,
    PARTS,
    PREFIX,
    TENSORS_FILE,
    Shapes,
    adapted_layers,
    adapter_of,
    inspect_model_folder,
    is_optional,
    open_tensors,
    tensor_shapes,
)
from spo.spec.job_spec import LoraSpec
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.broadcast import (
    NCCL_BUFFER_BYTES,
    BroadcastFailed,
    DigestCheck,
    GlooGroup,
    Roster,
    connect,
    join,
    layout,
    local_address,
    read_roster,
    report_done,
)
from spo.weights.store import Pin, WeightStore, digest_of, whole_entries

# What vLLM can make room for.
# Of vLLM's own loader, in each worker's process: it maps the files otherwise.
vars(weight_utils)["safe_open"] = open_tensors

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

BACKEND = "spo-policy"
GLOO = "gloo"

REFERENCE_VERSION = 0
# Versions that are not read and hashed again: the newest, the one before it, and some under evaluation.
REMEMBERED = 4


@dataclass(frozen=True)
class AdapterRoom:
    """What an engine is built to adapt: layers whose names end so, by adapters of at most this rank."""

    rank: int
    layers: frozenset[str]

    def holds(self, other: AdapterRoom) -> bool:
        """Whether there is room for whatever fits into the other."""
        return self.rank >= other.rank and self.layers >= other.layers


def room_for(lora: LoraSpec, base: Shapes) -> AdapterRoom:
    """The room that a job's adapters need on a model of these tensors."""
    rank = next(rank for rank in RANKS if rank >= lora.rank)
    return AdapterRoom(rank, frozenset(_last(layer) for layer in adapted_layers(base, lora.targets)))


def check_adapter(files: Sequence[Path], base: Shapes, room: AdapterRoom, what: str) -> None:
    """Raise IntegrityError unless the files are an adapter of layers of the base, whole and with room in the engine."""
    folder = adapter_of(files)
    if folder is None:
        raise IntegrityError(f"{what} holds whole weights, not an adapter")
    rank = json.loads((folder / CONFIG_FILE).read_bytes()).get("r")
    found = tensor_shapes(files)
    ends = [(name, part) for name in found for part in PARTS if name.endswith(part)]
    layers = {name.removeprefix(PREFIX).removesuffix(part) for name, part in ends}
    expected: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        rows, columns = base.get(f"{layer}.weight", (0, 0))
        expected |= {f"{PREFIX}{layer}{PARTS[0]}": (rank, columns), f"{PREFIX}{layer}{PARTS[1]}": (rows, rank)}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise IntegrityError(
                f"{what} does not fit the model: {name} is {found.get(name)}, not {expected.get(name)}"
            )
    if not found or rank > room.rank or not {_last(layer) for layer in layers} <= room.layers:
        raise IntegrityError(f"{what} is an adapter of rank {rank} or of layers that the engine has no room for")


def write_neutral_adapter(folder: Path, base: Shapes) -> None:
    """An adapter with which a model of these tensors computes what it computes alone: version 0."""
    layer = adapted_layers(base, "all-linear")[0]
    rows, columns = base[f"{layer}.weight"]
    tensors = {
        f"{PREFIX}{layer}{PARTS[0]}": np.zeros((1, columns), np.float32),
        f"{PREFIX}{layer}{PARTS[1]}": np.zeros((rows, 1), np.float32),
    }
    save_file(tensors, folder / TENSORS_FILE)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [_last(layer)]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


@dataclass(frozen=True)
class JoinedBroadcast:
    """A transfer that has counted this replica in: what its workers need to know, and how much will come."""

    host: str
    port: int
    key: str
    transport: str
    first_rank: int
    size_bytes: int


@dataclass(eq=False)
class OfferedBroadcast:
    """An offer whose sender answers. manifest_digest: of the announced version; check_shapes: raises IntegrityError."""

    offer: BroadcastOffer
    store: Store
    manifest_digest: str
    check_shapes: Callable[[Shapes], None]
    _once: threading.Lock = field(default_factory=threading.Lock)

    def join(self, processes: int) -> JoinedBroadcast:
        """Count this replica's processes in and wait for the group to be complete.

        Raises BroadcastFailed when it comes too late, or a second time, and IntegrityError when it is another version.
        """
        if not self._once.acquire(blocking=False):
            raise BroadcastFailed("a version is sent once")
        offer = self.offer
        first_rank = join(self.store, offer.key, processes, offer.window_seconds)
        roster = read_roster(self.store, offer.key, wait_seconds=1.0)
        if digest_of(roster.manifest) != self.manifest_digest:
            raise IntegrityError("the trainer sends another version than was announced")
        self.check_shapes({tensor.name: tensor.shape for header in roster.headers for tensor in layout(header)})
        size_bytes = sum(int(entry["size_bytes"]) for entry in whole_entries(roster.manifest))
        return JoinedBroadcast(offer.host, offer.port, offer.key, offer.transport, first_rank, size_bytes)


def reached(
    offer: BroadcastOffer, manifest_digest: str, check_shapes: Callable[[Shapes], None]
) -> OfferedBroadcast | None:
    """The offer, if this replica can take part: its sender answers, and NCCL has a GPU here."""
    if offer.transport == "nccl" and not torch.cuda.is_available():
        return None
    try:
        return OfferedBroadcast(offer, connect(offer.host, offer.port), manifest_digest, check_shapes)
    except BroadcastFailed:
        return None


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
        _begin_reload(self.model)

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
            info = NCCLWeightTransferInitInfo(
                nccl_unique_id_b64=roster.nccl_id,
                rank_offset=joined.first_rank,
                world_size=roster.world_size,
                packed=True,
                packed_buffer_size_bytes=NCCL_BUFFER_BYTES,
            )
        self._joined_within_deadline(info)

    def start_weight_update(self) -> None:
        _begin_reload(self.model)

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

    def _joined_within_deadline(self, info: WeightTransferInitInfo) -> None:
        """Form the group, or leave what hangs in it to a thread that nobody waits for: raises BroadcastFailed.

        NCCL's communicator cannot be aborted before it is there, and a peer that died after it joined never comes.
        """
        inner, device, ended = self._inner, self.device, Future[None]()
        if inner is None:
            raise BroadcastFailed("no broadcast was joined")

        def init() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                inner.init_transfer_engine(info)
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=init, name="joins-broadcast", daemon=True).start()
        try:
            ended.result(max(0.0, self._ends - time.monotonic()))
        except TimeoutError:
            if ended.done():
                raise
            self._inner = None
            raise BroadcastFailed("a peer of the broadcast did not come to its group in time") from None

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
    """Of files, one at a time: a worker takes its slices of it and lets it go."""
    for path in paths:
        with open_tensors(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _begin_reload(model: torch.nn.Module) -> None:
    """Have the model take all of its weights anew.

    For the CPU vLLM packs experts into a kernel of their own only while it builds that: left in place it would go on
    with weights that are not packed, and compute something else.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
    initialize_layerwise_reload(model)


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

    def forget_weight_update(self) -> None:
        """After one that failed in another worker: this one would refuse to begin the next."""
        worker: Any = self
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


@contextmanager
def forgotten_where_it_fails(call_workers: Callable[[str], object]) -> Iterator[None]:
    """Around an update: where it fails in one worker of several, the others are in the middle of it."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            call_workers("forget_weight_update")
        raise


WeightTransferEngineFactory.register_engine(BACKEND, PolicyWeightTransfer)
WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransfer)


@dataclass(frozen=True)
class Weights:
    """One servable version; runs that share a model share version 0, whose run_id is empty.

    paths: None while its files are not opened, since it comes by `broadcast`.
    """

    run_id: str
    version: int
    digest: str
    paths: tuple[Path, ...] | None = field(repr=False, compare=False)
    # Keeps cached files from being evicted for as long as they may be loaded.
    pin: Pin | None = field(default=None, repr=False, compare=False)
    broadcast: OfferedBroadcast | None = field(default=None, repr=False, compare=False)


def reference_weights(model_path: Path, model_hash: str) -> Weights:
    """Version 0: the model folder itself."""
    return Weights("", REFERENCE_VERSION, model_hash, inspect_model_folder(model_path).safetensors_files)


class PolicyVersions:
    """Resolves (run, version) to verified weights; a version is read and hashed once.

    With room for adapters, versions are adapters of the reference; else they are whole weights.
    """

    def __init__(self, store: WeightStore, reference: Weights, room: AdapterRoom | None = None) -> None:
        self._store = store
        self.reference = reference
        self._room = room
        self._shapes = tensor_shapes(reference.paths or ())
        self._verified: dict[tuple[str, int], Weights] = {}
        self._lock = threading.Lock()

    def resolve(self, run_id: str, version: int, manifest_digest: str = "") -> Weights:
        """Return verified weights; a manifest_digest, when given, must be that of the stored version.

        Raises NotFound when the version is not kept, IntegrityError when it is damaged or of another model.
        """
        if version == REFERENCE_VERSION:
            return self.reference
        with self._lock, storage_faults_named(self._store.backend.name):
            known = self._verified.pop((run_id, version), None)
            if not (known and manifest_digest in ("", known.digest) and _still_there(known)):
                known = self._open(run_id, version, manifest_digest)
            self._verified[run_id, version] = known
            while len(self._verified) > REMEMBERED:
                del self._verified[next(iter(self._verified))]
            return known

    def offered(self, run_id: str, version: int, manifest_digest: str, offer: BroadcastOffer) -> Weights | None:
        """A version that a trainer sends; None where it is here, an adapter, or its sender is out of reach."""
        if self._room or (run_id, version) in self._verified:
            return None
        what = f"version {version} of run {run_id}"
        broadcast = reached(offer, manifest_digest, lambda shapes: _check_shapes(self._shapes, shapes, what))
        return Weights(run_id, version, manifest_digest, None, broadcast=broadcast) if broadcast else None

    def newest_intact(self, run_id: str, candidates: Iterable[tuple[int, str]]) -> Weights:
        """The first of these (version, manifest digest) that can be served; the reference when none can.

        Raises what may pass by itself: a store that does not answer.
        """
        for version, digest in candidates:
            try:
                return self.resolve(run_id, version, digest)
            except SpoError as error:
                if error.retryable:
                    raise
        return self.reference

    def _open(self, run_id: str, version: int, manifest_digest: str) -> Weights:
        stored = self._store.open(run_id, version)
        if manifest_digest not in ("", stored.manifest_digest):
            raise IntegrityError(f"version {version} of run {run_id} is not the one that was announced")
        what = f"version {version} of run {run_id}"
        if self._room:
            if stored.base_model != self.reference.digest:
                raise IntegrityError(f"{what} is no adapter of the model that is served")
            check_adapter(stored.files, self._shapes, self._room, what)
        elif adapter_of(stored.files):
            raise IntegrityError(f"{what} is an adapter, and the job trains all weights")
        else:
            _check_shapes(self._shapes, tensor_shapes(stored.files), what)
        return Weights(run_id, version, stored.manifest_digest, stored.files, stored.hold)


def _still_there(weights: Weights) -> bool:
    return all(path.is_file() for path in weights.paths or ())


def _check_shapes(expected: Shapes, found: Shapes, what: str) -> None:
    """Raise IntegrityError: a missing tensor would keep its old value, an unknown one would stop the load half-way."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name) and not is_optional(name):
            raise IntegrityError(
                f"{what} does not fit the model: {name} is {found.get(name)}, not {expected.get(name)}"
            )
