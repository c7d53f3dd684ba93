"""DeepSpeed ZeRO around one model: loaded in cuts, its reference, its state for another number of ranks, and what of it
becomes which file of a version.

Models that are cut over the ranks as their files are read: no rank ever holds one whole, in memory or on a device.
transformers builds the model without memory and sets its parameters one by one, read from safetensors files. Each is
cut at that moment, and a rank touches only its own stretch of the file.

Training state for another number of ranks: each new rank reads only its own stretch of what the old ranks wrote.
ZeRO lays parameters out as segments and cuts every segment into equal parts, one per rank, with padding in the last. A
segment is a whole parameter group at stages 1 and 2, and one parameter at stage 3. At stage 0 every rank holds all.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import deepspeed
import deepspeed.comm
import psutil
import torch
import torch.distributed as dist
import transformers
from deepspeed.sequence.layer import DistributedAttention
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.quantizers.base import HfQuantizer
from transformers.utils.loading_report import LoadStateDictInfo

from services.trainer.deepspeed_fields import (
    ZeroOptimizer,
    cut,
    free_model,
    is_cut,
    leave_out_shared_memory_op,
    put_values,
)
from services.trainer.ranks import Ranks
from spo.errors import IntegrityError, InvalidInput, PreconditionFailed
from spo.model.folder import TENSORS_FILE, open_tensors, tensor_shapes
from spo.model.folder_names import FolderNames, saved_buffers, tensors_of, whole_shape
from spo.model.logprobs import LocalAttention, adapter_name, checkpoint_activations, is_large, is_packed
from spo.observability import is_out_of_memory, take_over_logs
from spo.spec.job_spec import TrainerSpec

# With threads transformers reads ahead, and what is converted to another dtype is in memory whole.
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
# The function of transformers.core_model_loading that gives a module a parameter, and what it takes.
SETTER = "set_param_for_module"
TAKEN = ("model", "target_name", "param_value", "loading_info", "hf_quantizer")

SetParameter = Callable[[PreTrainedModel, str, Tensor, LoadStateDictInfo, HfQuantizer], None]

Offload = Literal["none", "optimizer", "optimizer_and_parameters"]

# Of each file of a version.
SHARD_BYTES = 1 << 30
# Of the memory that is free, a copy of what is published may take so much.
MOST_OF_MEMORY = 0.5

_KINDS = ("master", "exp_avg", "exp_avg_sq")
_STEP = "step"

# Optimiser state of torch's AdamW, per parameter or per flat partition.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def offloaded(offload: Offload) -> dict[str, object]:
    """The part of DeepSpeed's `zero_optimization` that says what the CPU's memory holds."""
    on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    names = {"none": (), "optimizer": ("offload_optimizer",)}.get(offload, ("offload_optimizer", "offload_param"))
    return dict.fromkeys(names, on_cpu)


# What libraries raise of a model that they cannot build: no fault of the machine, and the same at the next try.
UNLOADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    ArithmeticError,
    AssertionError,
    SafetensorError,
)


@contextmanager
def model_faults_named(path: str) -> Iterator[None]:
    """Raise InvalidInput (code "model_not_loadable") where the block finds a model that no trainer can be built of."""
    try:
        yield
    except (*UNLOADABLE, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        words = f"the model at {path} cannot be loaded: {type(error).__name__}: {error}"
        raise InvalidInput(words, code="model_not_loadable") from error


@contextmanager
def partitioned_loading(dtype: torch.dtype, *, on_cpu: bool) -> Iterator[None]:
    """Within, `from_pretrained` gives models whose parameters are cut, a part on each rank.

    All ranks load the same files; nothing is sent between them. on_cpu: parts stay in the CPU's memory, else they are
    on the device of the rank.
    """
    # An empty module: DeepSpeed then takes its linear layer that keeps no gathered weights for the backward pass.
    zero = deepspeed.zero.Init(
        nn.Module(),
        dtype=dtype,
        remote_device="cpu" if on_cpu else None,
        pin_memory=on_cpu and torch.cuda.is_available(),
    )

    def cutting(set_parameter: SetParameter) -> SetParameter:
        def set_and_cut(
            model: PreTrainedModel, target_name: str, values: Tensor, info: LoadStateDictInfo, quantizer: HfQuantizer
        ) -> None:
            set_parameter(model, target_name, values, info, quantizer)
            owner, _, own_name = target_name.rpartition(".")
            parameter = model.get_submodule(owner)._parameters.get(own_name)
            if parameter is not None and not parameter.is_meta:
                cut(zero, parameter)

        return set_and_cut

    with parameters_set_by(cutting):
        yield


@contextmanager
def parameters_set_by(changed: Callable[[SetParameter], SetParameter]) -> Iterator[None]:
    """Within, transformers reads parameters one by one and sets each by what `changed` makes of its own function.

    Raises PreconditionFailed (code "transformers_unsupported") where transformers has no such function.
    """
    own = getattr(core_model_loading, SETTER, None)
    if own is None or tuple(inspect.signature(own).parameters) != TAKEN:
        raise PreconditionFailed(
            f"transformers {transformers.__version__} has no {SETTER}({', '.join(TAKEN)}) in core_model_loading, which "
            "loading at trainer.zero_stage 3 goes through",
            code="transformers_unsupported",
        )
    before = os.environ.get(ONE_BY_ONE)
    setattr(core_model_loading, SETTER, changed(own))
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        setattr(core_model_loading, SETTER, own)
        if before is None:
            del os.environ[ONE_BY_ONE]
        else:
            os.environ[ONE_BY_ONE] = before


class SequenceGroup:
    """Ranks that compute each packed row together, as DeepSpeed-Ulysses does: a `SharedRow`.

    Between them the tokens are cut outside of attention, and the heads within: four exchanges a layer and pass.
    """

    def __init__(self, ranks: Ranks, width: int) -> None:
        """width: how many; every rank makes its group together. Raises InvalidInput as `Ranks.neighbours`."""
        self.size = width
        self.rank = ranks.rank % width
        self._group = ranks.neighbours(width)

    @classmethod
    def of(cls, ranks: Ranks, width: int) -> SequenceGroup | None:
        """This rank's; None where each computes its own rows."""
        return cls(ranks, width) if width > 1 else None

    def check(self, model: PreTrainedModel) -> None:
        """Raise InvalidInput (code "sequence_not_shared") where a model cannot be computed so."""
        heads = model.config.get_text_config().num_attention_heads
        problem = ""
        if not is_packed(model):
            problem = f"its type, {model.config.model_type}, is not computed in packed rows"
        elif heads % self.size:
            problem = f"its {heads} attention heads cannot be cut over {self.size} ranks"
        if problem:
            raise InvalidInput(
                f"trainer.sequence_parallel is not possible for this model: {problem}", code="sequence_not_shared"
            )

    def attention(self, attend_to: LocalAttention, query_BLHD: Tensor, key_BLGD: Tensor, value_BLGD: Tensor) -> Tensor:
        """From this rank's stretch of all heads to its stretch of their results (B, L, H, D), gradients included."""
        exchanging = DistributedAttention(attend_to, self._group, scatter_idx=2, gather_idx=1)
        found: Tensor = exchanging(query_BLHD, key_BLGD, value_BLGD, 0)
        return found

    def gathered(self, part_1N: Tensor) -> Tensor:
        """The stretches of all ranks, (1, size N); a rank's gradients go to its own stretch.

        Each rank has the whole loss, so that its part of the gradient is there once.
        """
        parts = [torch.empty_like(part_1N) for _ in range(self.size)]
        dist.all_gather(parts, part_1N.detach().contiguous(), group=self._group)
        parts[self.rank] = part_1N
        return torch.cat(parts, dim=1)


class ReferenceModel:
    """`model` computes log-probs, on every rank alike; `weights` has the parameters, which may be given other values.

    Of a model that was cut over the ranks each layer is gathered while it runs: ZeRO-3 without an optimiser.
    """

    def __init__(self, weights: PreTrainedModel, offload: Offload) -> None:
        """weights: loaded within `partitioned_loading`, or whole. offload: what it was loaded for."""
        self.weights = weights.requires_grad_(requires_grad=False)
        self.model: nn.Module = weights
        self._engine: deepspeed.DeepSpeedEngine | None = None
        if is_cut(next(weights.parameters())):
            kept = offloaded(offload)
            parameters_on_cpu = {"offload_param": kept["offload_param"]} if "offload_param" in kept else {}
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, **parameters_on_cpu},
                "bf16": {"enabled": weights.dtype == torch.bfloat16},
            }
            self._engine, *_ = deepspeed.initialize(model=weights, config=config, dist_init_required=False)
            self._engine.eval()
            self.model = self._engine

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.destroy()
        free_model(self.weights)
        del self.weights, self.model, self._engine


def reshard_state(
    paths: Sequence[Path],
    prefix: str,
    wanted: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    segments: Sequence[int] | None,
) -> dict[str, Tensor]:
    """This rank's state tensors, from the files of all ranks that wrote the checkpoint, in rank order.

    wanted: what this rank holds now, under the same names. segments: values per parameter at stage 3; None at stages 1
    and 2, where whole groups are cut; empty at stage 0. Raises IntegrityError on another model's state.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in paths]
        names = {name.removeprefix(prefix) for name in files[0].keys() if name.startswith(prefix)}  # noqa: SIM118
        if segments is not None and not segments:
            return {name: files[0].get_tensor(prefix + name) for name in names if not name.startswith("random")}
        masters = [wanted[f"master.{index}"].numel() for index in range(_count(wanted, "master"))]
        found: dict[str, Tensor] = {}
        for kind in (kind for kind in _KINDS if f"{kind}.0" in names):
            old = _Written(files, prefix + kind, _count(names, kind))
            cuts = _cuts(old, masters, segments, world_size)
            flat = torch.cat([old.stretch(at, size, part, rank) for at, size, part in cuts])
            if flat.numel() != sum(masters):
                raise IntegrityError("the checkpoint holds other parameters than the model")
            found |= {f"{kind}.{index}": part for index, part in enumerate(torch.split(flat, masters))}
        if f"{_STEP}.0" in names:
            step = files[0].get_tensor(f"{prefix}{_STEP}.0")
            found |= {f"{_STEP}.{index}": step.clone() for index in range(len(masters))}
        return found


class _Written:
    """One kind of state of all old ranks; a rank's tensors count as one row, whatever groups they were stored in."""

    def __init__(self, files: Sequence[Any], prefix: str, count: int) -> None:
        self.files = files
        self.names = [f"{prefix}.{index}" for index in range(count)]
        self.sizes = [int(files[0].get_slice(name).get_shape()[0]) for name in self.names]

    def stretch(self, at: int, size: int, part: int, rank: int) -> Tensor:
        """The `part` values of new rank `rank` in a segment whose old parts of `size` begin at `at` in every row."""
        found = torch.zeros(part)
        start, stop = rank * part, min((rank + 1) * part, size * len(self.files))
        for old in range(len(self.files)):
            first, last = max(start, old * size), min(stop, (old + 1) * size)
            if first < last:
                row = self._row(old, at + first - old * size, at + last - old * size)
                found[first - start : last - start] = row
        return found

    def _row(self, rank: int, start: int, stop: int) -> Tensor:
        parts, begins = [], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            first, last = max(start, begins) - begins, min(stop, begins + size) - begins
            if first < last:
                parts.append(self.files[rank].get_slice(name)[first:last])
            begins += size
        return torch.cat(parts)


def _cuts(
    old: _Written, masters: Sequence[int], segments: Sequence[int] | None, world_size: int
) -> list[tuple[int, int, int]]:
    """(offset in an old rank's row, size of an old part, size of a new part) of every segment."""
    ranks = len(old.files)
    if segments is None:
        if len(masters) != len(old.sizes):
            raise IntegrityError("the checkpoint holds other parameter groups than the model")
        sizes = list(zip(old.sizes, masters, strict=True))
    else:
        sizes = [(-(-values // ranks), -(-values // world_size)) for values in segments]
    cuts, at = [], 0
    for size, part in sizes:
        cuts.append((at, size, part))
        at += size
    if at != sum(old.sizes):
        raise IntegrityError("the checkpoint holds other parameters than the model")
    return cuts


def _count(names: Iterable[str], kind: str) -> int:
    return sum(name.rpartition(".")[0] == kind for name in names)


def prepare_deepspeed(state_path: Path) -> None:
    """Once per process, before the first engine and after torch.distributed is up."""
    leave_out_shared_memory_op()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str((state_path / "trainer" / "torch_extensions").absolute()))
    os.environ.setdefault("LOCAL_RANK", "0")
    # DeepSpeed 0.19 calls what torch 2.13 deprecates, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    take_over_logs("torch", "DeepSpeed")
    deepspeed.init_distributed(auto_mpi_discovery=False)


def leave_deepspeed() -> None:
    """Take DeepSpeed's and torch's process groups down; a later `join_ranks` starts afresh."""
    deepspeed.comm.destroy_process_group()


class DeepSpeedEngine:
    """One model being trained. `model` is what computes log-probs; every rank calls every method alike.

    Parameters that want no gradient are never updated, and are in no state that is stored.
    """

    def __init__(self, model: nn.Module, spec: TrainerSpec, passes: int) -> None:
        """passes: forwards and backwards on each rank before an update."""
        dtype = next(model.parameters()).dtype
        # As a version's manifest names it.
        self.dtype = str(dtype).removeprefix("torch.")
        half = dtype == torch.bfloat16
        # Only the ZeRO optimisers keep fp32 master weights for bfloat16; stage 1 differs from 0 in nothing else.
        self.stage = max(spec.zero_stage, 1) if half else spec.zero_stage
        self._widened = half and spec.gradient_dtype == "float32"
        if self._widened:
            # At stage 1 DeepSpeed would take an optimiser of another kind for it, whose state is laid out otherwise.
            self.stage = max(self.stage, 2)
        self._max_grad_norm = spec.max_grad_norm
        # One pass over the state in place of a dozen, on CPU and GPU.
        groups = _groups(model, spec.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)
        self.model, made, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=self._config(passes, spec.offload, half=half),
            dist_init_required=False,
        )
        self._optimizer = ZeroOptimizer(self.stage, made)
        if self.stage == 3 and not half:
            self._optimizer.share_masters()
        # Evaluation mode although it is trained: with dropout the policy would differ from its reference at step 0.
        self.model.eval()
        wanted = spec.activation_checkpointing
        if is_large(self.model) if wanted is None else wanted:
            checkpoint_activations(self.model, reentrant=self.stage == 3)

    def _config(self, passes: int, offload: Offload, *, half: bool) -> dict[str, object]:
        return {
            # The size of a micro-batch means nothing to DeepSpeed here: losses arrive scaled.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": passes,
            "zero_optimization": {"stage": self.stage, **offloaded(offload)},
            # DeepSpeed's own Adam for the CPU has to be compiled first; torch's fused one does the same.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            # At stage 0 DeepSpeed clips without telling the norm, so `step` clips.
            "gradient_clipping": self._max_grad_norm if self.stage else 0.0,
            "bf16": {"enabled": half},
            **(
                {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"} if self._widened else {}
            ),
        }

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (scaled so that the mean over ranks is right); `last` before a step."""
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float | None:
        """Clip, update, clear the gradients; returns the gradient norm before clipping.

        None, with nothing updated, when the gradient is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage == 0:
            norm = float(nn.utils.clip_grad_norm_(self.model.module.parameters(), self._max_grad_norm))
            if not math.isfinite(norm):
                self.discard_gradients()
                return None
            self.model.step()
            return norm
        self.model.step()
        return float(self.model.get_global_grad_norm()) if self.model.was_step_applied() else None

    def discard_gradients(self) -> None:
        """Forget what `backward` accumulated, as if the batch had never been seen."""
        if self.stage == 0:
            self.model.zero_grad()
        else:
            self._optimizer.forget_gradients()

    def full_parameters(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole parameter on the CPU) of what is trained, one at a time: no rank holds all of it twice.

        wanted: names that this rank needs, None for all; every rank takes part in gathering each. Of `wanted` buffers
        that the model's folder holds come last.
        """
        for name, parameter in trained_parameters(self.model.module):
            needed = wanted is None or name in wanted
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                # A copy at stage 3: the gathered values are freed when the block ends.
                whole = parameter.detach().to("cpu", copy=self.stage == 3).contiguous() if needed else None
            if whole is not None:
                yield name, whole
        for name, buffer in saved_buffers(self.model.module):
            if wanted is not None and name in wanted:
                yield name, buffer.detach().to("cpu").contiguous()

    @cached_property
    def folder_names(self) -> FolderNames:
        """How what is published is called, where all weights are."""
        return FolderNames(self.model.module)

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of each whole parameter that is trained, by its name, in the order of `full_parameters`."""
        trained = trained_parameters(self.model.module)
        return {name: whole_shape(found).numel() * found.element_size() for name, found in trained}

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the training state: fp32 weights, Adam moments and step counts."""
        tensors: dict[str, Tensor] = {}
        for index, master in enumerate(self._optimizer.masters()):
            tensors[f"master.{index}"] = master.detach()
            state = self._optimizer.adam.state.get(master, {})
            tensors |= {f"{name}.{index}": state[name] for name in (*_MOMENTS, "step") if name in state}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, on the same rank of as many. Raises IntegrityError on another model's."""
        masters, adam = self._optimizer.masters(), self._optimizer.adam
        wanted = {f"master.{index}": master.shape for index, master in enumerate(masters)}
        found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("master.")}
        if wanted != found:
            raise IntegrityError("the checkpoint holds other parameters than the model")
        for index, master in enumerate(masters):
            master.copy_(tensors[f"master.{index}"])
            for name in _MOMENTS:
                if f"{name}.{index}" in tensors:
                    adam.state[master][name] = tensors[f"{name}.{index}"].to(master)
            if f"step.{index}" in tensors:
                adam.state[master]["step"] = tensors[f"step.{index}"].to(master.device, copy=True)
        self._optimizer.spread_masters()

    def reshard(self, paths: Sequence[Path], prefix: str, ranks: Ranks) -> dict[str, Tensor]:
        """This rank's `state_tensors` from the files that another number of ranks wrote, under names with `prefix`."""
        segments: list[int] | None = None if self.stage else []
        if self.stage == 3:
            segments = self._optimizer.parameter_sizes()
        return reshard_state(paths, prefix, self.state_tensors(), ranks.rank, ranks.world_size, segments)

    def close(self) -> None:
        """Free the model and its optimiser; the process goes on to the next job."""
        self.model.destroy()
        self._optimizer.close()
        free_model(self.model.module)
        del self.model, self._optimizer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of what learns: with an adapter, the adapter alone."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameters for the optimiser: matrices decay, norms and biases do not. One group where nothing decays."""
    parameters = [parameter for _, parameter in trained_parameters(model)]
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    matrices = [parameter for parameter in parameters if len(whole_shape(parameter)) > 1]
    others = [parameter for parameter in parameters if len(whole_shape(parameter)) <= 1]
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": weight_decay}]
    return groups + ([{"params": others, "weight_decay": 0.0}] if others else [])


class WeightSource(Protocol):
    """What a version is written from: the engine, or a copy of what it held at one moment."""

    dtype: str

    @property
    def folder_names(self) -> FolderNames:
        """How what is published is called, where all weights are."""

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of each whole parameter that is trained, by its name."""

    def full_parameters(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter on the CPU) of `wanted`, None for all; every rank calls this together."""


class WeightCopy:
    """What one rank writes of a version, as the engine held it when it was last taken, in host memory that stays.

    With a CUDA device that memory is pinned, so that copying into it takes no time of the CPU's.
    """

    def __init__(self, engine: DeepSpeedEngine, wanted: Container[str], device: torch.device) -> None:
        self.folder_names, self.dtype = engine.folder_names, engine.dtype
        self._engine, self._wanted, self._pinned = engine, wanted, device.type == "cuda"
        self._sizes = engine.parameter_bytes()
        self._held: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy what the engine holds now. All ranks call this together."""
        for name, tensor in self._engine.full_parameters(self._wanted):
            if name not in self._held:
                self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
            self._held[name].copy_(tensor)

    def parameter_bytes(self) -> dict[str, int]:
        """Of the engine's."""
        return self._sizes

    def full_parameters(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """What was copied of `wanted`, in the engine's order."""
        return ((name, tensor) for name, tensor in self._held.items() if wanted is None or name in wanted)


@dataclass(frozen=True)
class FileUnit:
    """Tensors in memory that together become what a file of a version holds of them, and the bytes of these."""

    sources: frozenset[str]
    size_bytes: int
    make: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def model_units(source: WeightSource) -> list[FileUnit]:
    """Of all weights, by the names of the model's folder."""
    names = source.folder_names
    return [FileUnit(frozenset(found.sources), names.size_bytes(found), found.apply_apart) for found in names.to_stored]


def adapter_units(source: WeightSource) -> list[FileUnit]:
    """Of an adapter, by peft's names."""

    def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {adapter_name(name): tensor for name, tensor in tensors.items()}

    return [FileUnit(frozenset({name}), size, renamed) for name, size in source.parameter_bytes().items()]


def made_of(makers: Mapping[str, FileUnit], parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """What each unit makes, once all of its parameters have come."""
    held: dict[str, Tensor] = {}
    for name, tensor in parameters:
        held[name] = tensor
        unit = makers[name]
        if unit.sources <= held.keys():
            yield unit.make({source: held.pop(source) for source in sorted(unit.sources)})


def own_shards(
    source: WeightSource, writers: Sequence[int], rank: int, *, adapter: bool
) -> dict[str, Sequence[FileUnit]]:
    """The files of a version that a rank writes, by name; the writers have shares in turn."""
    shards = {TENSORS_FILE: adapter_units(source)} if adapter else _shards(model_units(source))
    return {name: units for at, (name, units) in enumerate(shards.items()) if writers[at % len(writers)] == rank}


def copy_for(ranks: Ranks, engine: DeepSpeedEngine, writers: Sequence[int], *, adapter: bool) -> WeightCopy | None:
    """Room for what this rank writes of each version; None, on all ranks, where a machine's memory has too little."""
    units = [unit for found in own_shards(engine, writers, ranks.rank, adapter=adapter).values() for unit in found]
    # All ranks of this machine take theirs.
    wanted_bytes = sum(unit.size_bytes for unit in units) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not all(ranks.gather(wanted_bytes < MOST_OF_MEMORY * psutil.virtual_memory().available)):
        return None
    return WeightCopy(engine, {name for unit in units for name in unit.sources}, ranks.device)


def _shards(units: Sequence[FileUnit]) -> dict[str, list[FileUnit]]:
    """Units by file, in order; files have about SHARD_BYTES, whoever writes them."""
    shards: list[list[FileUnit]] = []
    room = 0
    for unit in units:
        if room <= 0:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(unit)
        room -= unit.size_bytes
    return {f"model-{number:05d}.safetensors": units for number, units in enumerate(shards, start=1)}


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
