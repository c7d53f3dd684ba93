"""DeepSpeed ZeRO around one model that learns; DeepSpeed's version is pinned in pyproject.toml."""

from __future__ import annotations

import gc
import logging
import math
import os
import warnings
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import Tensor, nn

from services.trainer.ranks import Ranks
from services.trainer.reshard import reshard_state
from services.trainer.zero3.loading import Offload, free_model, offloaded, whole_shape
from spo.errors import IntegrityError, PreconditionFailed
from spo.model.activations import checkpoint_activations, is_large
from spo.spec.job_spec import TrainerSpec

# Optimiser state of torch's AdamW, per parameter or per flat partition.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare_deepspeed(state_path: Path) -> None:
    """Once per process, before the first engine and after torch.distributed is up."""
    # Otherwise init_distributed compiles an op for a minute, and a build killed half-way blocks later starts.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str((state_path / "trainer" / "torch_extensions").absolute()))
    os.environ.setdefault("LOCAL_RANK", "0")
    # DeepSpeed 0.19 calls what torch 2.13 deprecates, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
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
        half = next(model.parameters()).dtype == torch.bfloat16
        # Only the ZeRO optimisers keep fp32 master weights for bfloat16; stage 1 differs from 0 in nothing else.
        self.stage = max(spec.zero_stage, 1) if half else spec.zero_stage
        self._max_grad_norm = spec.max_grad_norm
        # One pass over the state in place of a dozen, on CPU and GPU.
        groups = _groups(model, spec.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)
        self.model, self._optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=self._config(passes, spec.offload, half=half),
            dist_init_required=False,
        )
        if self.stage == 3 and not half:
            self._share_masters()
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
        }

    def _share_masters(self) -> None:
        """Float32 weights are their own master weights; DeepSpeed means it so and compares a device with its name."""
        for master, weights in zip(self._masters(), self._optimizer.fp16_partitioned_groups_flat, strict=True):
            if master.device == weights.device:
                master.data = weights.data

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
            return
        self._optimizer.zero_grad()
        self._optimizer.averaged_gradients = {}
        if self.stage < 3:
            self._optimizer.all_grad_tensors = {}
            # The next gradients replace what the CPU keeps of these, as after a step.
            self._optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def full_parameters(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole parameter on the CPU) of what is trained, one at a time: no rank holds all of it twice.

        wanted: names that this rank needs, None for all; every rank takes part in gathering each.
        """
        for name, parameter in trained_parameters(self.model.module):
            needed = wanted is None or name in wanted
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                # A copy at stage 3: the gathered values are freed when the block ends.
                whole = parameter.detach().to("cpu", copy=self.stage == 3).contiguous() if needed else None
            if whole is not None:
                yield name, whole

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of each whole parameter that is trained, by its name, in the order of `full_parameters`."""
        trained = trained_parameters(self.model.module)
        return {name: whole_shape(found).numel() * found.element_size() for name, found in trained}

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the training state: fp32 weights, Adam moments and step counts."""
        tensors: dict[str, Tensor] = {}
        for index, master in enumerate(self._masters()):
            tensors[f"master.{index}"] = master.detach()
            state = self._adam.state.get(master, {})
            tensors |= {f"{name}.{index}": state[name] for name in (*_MOMENTS, "step") if name in state}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, on the same rank of as many. Raises IntegrityError on another model's."""
        masters = self._masters()
        wanted = {f"master.{index}": master.shape for index, master in enumerate(masters)}
        found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("master.")}
        if wanted != found:
            raise IntegrityError("the checkpoint holds other parameters than the model")
        for index, master in enumerate(masters):
            master.copy_(tensors[f"master.{index}"])
            for name in _MOMENTS:
                if f"{name}.{index}" in tensors:
                    self._adam.state[master][name] = tensors[f"{name}.{index}"].to(master)
            if f"step.{index}" in tensors:
                self._adam.state[master]["step"] = tensors[f"step.{index}"].to(master.device, copy=True)
        self._spread_masters(len(masters))

    def reshard(self, paths: Sequence[Path], prefix: str, ranks: Ranks) -> dict[str, Tensor]:
        """This rank's `state_tensors` from the files that another number of ranks wrote, under names with `prefix`."""
        segments: list[int] | None = None if self.stage else []
        if self.stage == 3:
            segments = [int(found.ds_numel) for group in self._optimizer.fp16_groups for found in group]
        return reshard_state(paths, prefix, self.state_tensors(), ranks.rank, ranks.world_size, segments)

    def close(self) -> None:
        """Free the model and its optimiser; the process goes on to the next job."""
        self.model.destroy()
        self._adam.state.clear()
        self._adam.param_groups.clear()
        vars(self._optimizer).clear()
        free_model(self.model.module)
        del self.model, self._optimizer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._optimizer.optimizer if self.stage else self._optimizer
        return optimizer

    def _masters(self) -> list[Tensor]:
        match self.stage:
            case 0:
                return [parameter for group in self._adam.param_groups for parameter in group["params"]]
            case 1 | 2:
                return list(self._optimizer.single_partition_of_fp32_groups)
            case 3:
                return list(self._optimizer.fp32_partitioned_groups_flat)
        raise PreconditionFailed(f"there is no ZeRO stage {self.stage}")

    def _spread_masters(self, count: int) -> None:
        """Bring the model's parameters in line with the fp32 weights of all ranks."""
        if self.stage == 3:
            for group in range(count):
                self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        elif self.stage:
            self._optimizer.update_lp_params()


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
